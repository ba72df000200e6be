"""A published model: its sizes, Megatron configuration, spec, flags and legal parallel sizes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from ..gdn.sizes import GDNDims
from ..hf.build import flags_of, megatron_flags
from ..hf.model_map import Architecture, HFModelConfig, parse_hf_config
from ..mamba2.sizes import Mamba2Dims
from ..mixers.arguments import LEVELS
from .stack import CHUNK, MAMBA_TAPS, Stack


class Entry(NamedTuple):
    """A model's class in transformers, fields of its ``config.json``, and their source."""

    architecture: str
    fields: dict[str, Any]
    source: str


_TABLES = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
_NEMOTRON = _TABLES["nemotron_h"]  # the one class that `parse_hf_config` refuses


def _entries() -> dict[str, Entry]:
    known, entries = _TABLES["shared"], {}
    for name, own in _TABLES["models"].items():
        architecture, source = own.pop("architecture"), own.pop("source")
        known[name] = known.get(own.pop("like", None), {}) | own
        entries[name] = Entry(architecture, known[name], source)
    return entries


ENTRIES = _entries()


class Parts(NamedTuple):
    """The arguments of a Megatron model: ``HybridModel(config, spec, **arguments)``."""

    config: Any
    spec: Any
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Model:
    """The sizes, configuration, spec and flags of one published model."""

    name: str
    entry: Entry

    @classmethod
    def named(cls, name: str) -> Model:
        """Find a model by name, ignoring case; an unknown name is a ValueError."""
        for known, entry in ENTRIES.items():
            if known.lower() == name.lower():
                return cls(known, entry)
        raise ValueError(f"unknown model {name!r}; known: {', '.join(ENTRIES)}.")

    @cached_property
    def hf(self) -> HFModelConfig | None:
        """The `HFModelConfig`, for `build_model` and for loading weights; None for Nemotron."""
        architecture, fields, _ = self.entry
        if architecture == "NemotronHForCausalLM":
            return None
        return parse_hf_config({"architectures": [architecture]} | fields)

    @property
    def pattern(self) -> str:
        """Layers: 'G' Gated DeltaNet, 'M' Mamba2, '*' attention, '-' MLP, 'E' experts."""
        if self.hf is not None:
            return self.hf.hybrid_layer_pattern
        return self.entry.fields["hybrid_override_pattern"]

    @property
    def tied(self) -> bool:
        return self.entry.fields["tie_word_embeddings"]

    @property
    def _nemotron_sizes(self) -> dict[str, Any]:
        fields = self.entry.fields
        experts = _NEMOTRON["experts"] if "E" in self.pattern else {}
        sizes = _NEMOTRON["sizes"].items()
        return experts | {ours: fields[theirs] for ours, theirs in sizes if theirs in fields}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The model's ``TransformerConfig`` fields, with the ``num_layers`` of a GPTModel."""
        if self.hf is not None:
            return self.hf.megatron_settings()
        from megatron.core.activations import squared_relu

        found = {"num_layers": len(self.pattern), "activation_func": squared_relu}
        return found | _NEMOTRON["fixed"] | self._nemotron_sizes

    @cached_property
    def stack(self) -> Stack:
        config, vocab = SimpleNamespace(**self.settings), self.entry.fields["vocab_size"]
        return Stack.of(config, self.pattern, vocab, self.tied)

    @cached_property
    def dims(self) -> GDNDims | Mamba2Dims:
        config = SimpleNamespace(**self.settings)
        if "G" in self.pattern:
            return GDNDims.from_config(config)
        return Mamba2Dims.from_config(config, config.hidden_size, MAMBA_TAPS, 2)

    def _refuse_mamba2_in_gpt(self, model: Architecture) -> None:
        if self.hf is None and model == "gpt":
            raise NotImplementedError(
                f"{self.name} has Mamba2 layers, and a GPTModel cannot have any; use "
                f"model='hybrid' (pretrain_hybrid.py)."
            )

    def parts(
        self,
        model: Architecture = "hybrid",
        *,
        modules: Literal["auto", "te", "local"] = "auto",
        layer_options: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Parts:
        """Make the configuration, spec and arguments of a ``HybridModel`` or ``GPTModel``.

        Args:
            model: "hybrid" or "gpt".
            modules: the library of linears and norms, as in `megatron_gdn.specs.hybrid_stack_spec`.
            layer_options: options of the Gated DeltaNet layer.
            **changes: fields of the ``TransformerConfig`` to add or override. The defaults of
                parallel sizes are Megatron's current sizes, or 1.

        Raises:
            NotImplementedError: ``model`` is "gpt" and the model has Mamba2 layers.
        """
        from megatron.core import parallel_state
        from megatron.core.transformer.transformer_config import TransformerConfig

        from ..hf.build import current_settings, model_arguments, transformer_config
        from ..specs import gpt_block_spec, hybrid_stack_spec
        from ..specs.layer import resolve_modules

        self._refuse_mamba2_in_gpt(model)
        resolved, options = resolve_modules(modules), dict(layer_options or {})
        if self.hf is not None:
            config = transformer_config(self.hf, model, modules=resolved, **changes)
            arguments = model_arguments(self.hf, config)
        else:
            config = TransformerConfig(**(self.settings | current_settings(resolved) | changes))
            arguments = {
                "vocab_size": self.entry.fields["vocab_size"],
                "share_embeddings_and_output_weights": self.tied,
                "position_embedding_type": "none",
            }
        if model == "gpt":
            first = None if parallel_state.model_parallel_is_initialized() else 0
            return Parts(config, gpt_block_spec(config, pp_rank=first, **options), arguments)
        spec = hybrid_stack_spec(resolved, qk_layernorm=self.hf is not None, **options)
        return Parts(config, spec, arguments | {"hybrid_layer_pattern": self.pattern})

    def flags(self, model: Architecture = "hybrid") -> list[str]:
        """The flags with which Megatron's script builds the model; raises as `parts` does."""
        self._refuse_mamba2_in_gpt(model)
        if self.hf is not None:
            return megatron_flags(self.hf, model)
        described = {
            "spec": "megatron_gdn.specs hybrid_stack_spec",
            "hybrid_layer_pattern": self.pattern,
        }
        return flags_of(described | _NEMOTRON["flags"] | self._nemotron_sizes)

    def tensor_parallel_sizes(self) -> list[int]:
        """The sizes that divide all heads and the MLP's width; experts are not split."""
        heads, groups = self.settings["num_attention_heads"], self.settings["num_query_groups"]
        key_heads = self.dims.layout.counts[-1][1]  # groups in Mamba2
        cut = [heads, key_heads]
        if "-" in self.pattern:
            cut.append(self.settings["ffn_hidden_size"])
        if "E" in self.pattern:
            cut.append(self.settings["moe_shared_expert_intermediate_size"])
        return [
            n
            for n in range(1, heads + 1)
            if all(whole % n == 0 for whole in cut) and (groups % n == 0 or n % groups == 0)
        ]

    def headwise_sizes(self, tp: int) -> list[int]:
        """The context-parallel sizes of headwise, which divide the heads of a tensor rank."""
        layout = self.dims.shard(tp).layout
        return [n for n in range(1, layout.state_heads + 1) if layout.shares_among(n)]

    def expert_parallel_sizes(self) -> list[int]:
        experts = self.settings.get("num_moe_experts") or 1
        return [n for n in range(1, experts + 1) if experts % n == 0]

    def refuse_illegal(self, tp: int, cp: int, ep: int, length: int) -> None:
        """Raise a ValueError, with the legal sizes, for sizes that a launch would refuse."""
        for name, value, legal in (
            ("tensor-parallel size tp", tp, self.tensor_parallel_sizes()),
            ("expert-parallel size ep", ep, self.expert_parallel_sizes()),
        ):
            if value not in legal:
                sizes = ", ".join(map(str, legal))
                raise ValueError(f"{name}={value} is not legal; use one of {sizes}.")
        if cp < 1:
            raise ValueError(f"context-parallel size cp={cp} must be at least 1.")
        multiple = cp * lcm(2 if cp > 1 else 1, tp)
        if length < 1 or length % multiple:
            near = max(round(length / multiple), 1) * multiple
            raise ValueError(
                f"length={length} does not divide: zigzag cuts a sequence into 2 cp pieces, and "
                f"sequence parallelism cuts each rank's share by tp, so the length must be a "
                f"multiple of {multiple} for tp={tp} and cp={cp}, such as {near}."
            )

    def saved_bytes(self, tp: int = 1, recompute: str = "none") -> int:
        """Bytes per token that a Gated DeltaNet keeps for its backward on a tensor-parallel rank.

        For bf16, flash_qla or fla, and sequence parallelism. ``recompute`` is the layer's option,
        or ``"layer"`` for ``--recompute-modules gdn`` of Megatron's dev. States that flash_qla
        keeps for long sequences are not counted (16 MiB for 32768 tokens of 32 heads).
        """
        share: Any = self.dims.shard(tp)
        kept = 2 * share.hidden_size // tp  # in_proj's input, split over the sequence
        if recompute == "layer":
            return kept
        again = LEVELS[recompute]
        kept += 2 * share.layout.width  # in_proj's output
        if "rule" not in again:
            kept += 2 * share.v_dim  # the rule's output
            # One row of the chunk's triangular inverse in bf16; cumulative g and beta in fp32.
            kept += share.num_value_heads * (2 * CHUNK + 2 * 4)
        if "qkv" not in again:
            kept += 2 * (
                share.qk_dim + share.v_dim
            )  # k and v; the backward always computes q again
        if "norm_out" not in again:
            kept += 2 * share.v_dim  # out_proj's input
        return kept


find = Model.named


def config(name: str, *args: Any, **options: Any) -> Parts:
    """Make the configuration, spec and constructor arguments of a model; see `Model.parts`."""
    return find(name).parts(*args, **options)

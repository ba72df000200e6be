"""A published model: its numbers, Megatron configuration, spec and flags."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from ..gdn.sizes import GDNDims
from ..hf.build import megatron_flags
from ..hf.model_config import HFModelConfig, parse_hf_config
from ..hf.model_map import Architecture
from ..mamba2.sizes import Mamba2Dims
from .stack import MAMBA_TAPS, Stack


class Entry(NamedTuple):
    """A model's class in transformers, fields of its ``config.json``, and the source of both."""

    architecture: str
    fields: dict[str, Any]
    source: str


_TABLES = tomllib.loads(Path(__file__).with_name("catalogue.toml").read_text(encoding="utf-8"))
_MEGATRON = _TABLES["megatron"]  # of classes that `parse_hf_config` does not take


def _entries() -> dict[str, Entry]:
    known, entries = _TABLES["shared"], {}
    for name, own in _TABLES["models"].items():
        architecture, source = own.pop("architecture"), own.pop("source")
        known[name] = known.get(own.pop("like", None), {}) | own
        entries[name] = Entry(architecture, known[name], source)
    return entries


ENTRIES = _entries()
# Flags whose name is not that of their field.
_FLAGS = {"layernorm_epsilon": "--norm-epsilon", "num_moe_experts": "--num-experts"}


class Parts(NamedTuple):
    """What a Megatron model is built from: ``HybridModel(config, spec, **arguments)``."""

    config: Any
    spec: Any
    arguments: dict[str, Any]


@dataclass(frozen=True)
class Model:
    """One model: sizes, configuration, spec and flags."""

    name: str
    entry: Entry

    @classmethod
    def named(cls, name: str) -> Model:
        """The model of this name in any case of letters; an unknown name is a ValueError."""
        for known, entry in ENTRIES.items():
            if known.lower() == name.lower():
                return cls(known, entry)
        raise ValueError(f"unknown model {name!r}; known: {', '.join(ENTRIES)}.")

    @cached_property
    def hf(self) -> HFModelConfig | None:
        """The `HFModelConfig` for `build_model` and weights; None for another family."""
        architecture, fields, _ = self.entry
        if architecture in _MEGATRON:
            return None
        return parse_hf_config({"architectures": [architecture]} | fields)

    @property
    def pattern(self) -> str:
        """HybridModel's: 'G' Gated DeltaNet, 'M' Mamba2, '*' attention, '-' MLP, 'E' experts."""
        if self.hf is not None:
            return self.hf.hybrid_layer_pattern
        fields = self.entry.fields
        every_fourth = "G-G-G-*-" * (fields.get("num_hidden_layers", 0) // 4)
        return fields.get("hybrid_override_pattern", every_fourth)

    @property
    def tied(self) -> bool:
        return self.entry.fields["tie_word_embeddings"]

    @property
    def _experts(self) -> dict[str, Any]:
        return _MEGATRON[self.entry.architecture]["experts"] if "E" in self.pattern else {}

    @property
    def _sizes(self) -> dict[str, Any]:
        fields, names = self.entry.fields, _MEGATRON[self.entry.architecture]["sizes"]
        return {ours: fields[theirs] for ours, theirs in names.items() if theirs in fields}

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The model's ``TransformerConfig`` fields; ``num_layers`` is GPTModel's."""
        if self.hf is not None:
            return self.hf.megatron_settings()
        fixed = _MEGATRON[self.entry.architecture]["fixed"]
        found = {"num_layers": len(self.pattern)} | fixed | self._experts | self._sizes
        if not fixed["gated_linear_unit"]:
            from megatron.core.activations import squared_relu

            found["activation_func"] = squared_relu
        return found

    @cached_property
    def stack(self) -> Stack:
        config, vocab = SimpleNamespace(**self.settings), self.entry.fields["vocab_size"]
        wide = self.entry.architecture == "OlmoHybridForCausalLM"
        return Stack.of(config, self.pattern, vocab, self.tied, wide_qk_norm=wide)

    @cached_property
    def dims(self) -> GDNDims | Mamba2Dims:
        config = SimpleNamespace(**self.settings)
        if "G" in self.pattern:
            return GDNDims.from_config(config)
        return Mamba2Dims.from_config(config, config.hidden_size, MAMBA_TAPS, 2)

    def refuse_unless_built(self, model: Architecture = "hybrid") -> None:
        """Refuse (NotImplementedError) a model that Megatron would not build as published."""
        if self.hf is None and "launch" not in _MEGATRON[self.entry.architecture]:
            raise NotImplementedError(
                f"{self.name} is listed for its sizes: its layers norm their outputs and write "
                f"with beta up to 2, which Megatron's blocks and our layer do not do."
            )
        if self.hf is None and model == "gpt":
            raise NotImplementedError(
                f"{self.name} has Mamba2 layers, which a GPTModel has not; use model='hybrid' "
                f"(pretrain_hybrid.py)."
            )

    def parts(
        self,
        model: Architecture = "hybrid",
        *,
        modules: Literal["auto", "te", "local"] = "auto",
        layer_options: Mapping[str, Any] | None = None,
        **changes: Any,
    ) -> Parts:
        """Configuration, spec and arguments of a ``HybridModel`` or ``GPTModel``.

        Args:
            model: "hybrid" or "gpt".
            modules: whose linears and norms, as in `megatron_gdn.specs.hybrid_stack_spec`.
            layer_options: options of the Gated DeltaNet layer.
            **changes: fields of the ``TransformerConfig`` to add or override. Without them parallel
                sizes are Megatron's current ones, or 1. Errors are those of `refuse_unless_built`.
        """
        from megatron.core import parallel_state
        from megatron.core.transformer.transformer_config import TransformerConfig

        from ..hf.build import current_settings, model_arguments, transformer_config
        from ..specs import gpt_block_spec, hybrid_stack_spec
        from ..specs.layer import resolve_modules

        self.refuse_unless_built(model)
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
        """The flags of Megatron's script that build the model; errors as `refuse_unless_built`."""
        self.refuse_unless_built(model)
        if self.hf is not None:
            return megatron_flags(self.hf, model)
        words = ["--spec", "megatron_gdn.specs", "hybrid_stack_spec"]
        words += ["--hybrid-layer-pattern", self.pattern]
        words += _MEGATRON[self.entry.architecture]["launch"]["flags"].split()
        for name, value in (self._experts | self._sizes).items():
            flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
            words += [flag] if value is True else [flag, str(value)]
        return words


find = Model.named


def config(name: str, *args: Any, **options: Any) -> Parts:
    """Configuration, spec and constructor arguments of a model, see `Model.parts`."""
    return find(name).parts(*args, **options)

"""The published models, whose numbers are in ``catalogue.toml``, in Megatron's words."""

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
    """A model's class in transformers, fields of its ``config.json``, and where they were found."""

    architecture: str
    fields: dict[str, Any]
    source: str


def _entries() -> dict[str, Entry]:
    tables = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    known, entries = tables["shared"], {}
    for name, own in tables["models"].items():
        architecture, source = own.pop("architecture"), own.pop("source")
        known[name] = known.get(own.pop("like", None), {}) | own
        entries[name] = Entry(architecture, known[name], source)
    return entries


ENTRIES = _entries()
# Nemotron-H's sizes: field of a TransformerConfig -> field of its config.json.
_NEMOTRON = {
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
    "layernorm_epsilon": "layer_norm_epsilon",
    "mamba_num_heads": "mamba_num_heads",
    "mamba_head_dim": "mamba_head_dim",
    "mamba_state_dim": "ssm_state_size",
    "mamba_num_groups": "n_groups",
    "num_moe_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
    "moe_shared_expert_intermediate_size": "moe_shared_expert_intermediate_size",
    "moe_router_topk_scaling_factor": "routed_scaling_factor",
}
_NEMOTRON_FLAGS = (
    "--group-query-attention --position-embedding-type none --squared-relu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --hidden-dropout 0 "
    "--attention-dropout 0"
)
# Flags that have not their field's name.
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
        """The model of this name; capitals do not count. An unknown name is a ValueError."""
        for known, entry in ENTRIES.items():
            if known.lower() == name.lower():
                return cls(known, entry)
        raise ValueError(f"unknown model {name!r}; known: {', '.join(ENTRIES)}.")

    @cached_property
    def hf(self) -> HFModelConfig | None:
        """For `megatron_gdn.hf.build_model` and weights; None of families it does not know."""
        architecture, fields, _ = self.entry
        if architecture.startswith("Qwen"):
            return parse_hf_config({"architectures": [architecture]} | fields)
        return None

    @property
    def pattern(self) -> str:
        """HybridModel's: 'G' Gated DeltaNet, 'M' Mamba2, '*' attention, '-' MLP, 'E' experts."""
        if self.hf is not None:
            return self.hf.hybrid_layer_pattern
        fields = self.entry.fields
        if self._is_nemotron:
            return fields["hybrid_override_pattern"]
        return "G-G-G-*-" * (fields["num_hidden_layers"] // 4)

    @property
    def _is_nemotron(self) -> bool:
        return self.entry.architecture == "NemotronHForCausalLM"

    @property
    def tied(self) -> bool:
        return self.entry.fields["tie_word_embeddings"]

    @cached_property
    def settings(self) -> dict[str, Any]:
        """The ``TransformerConfig`` fields that describe the model; GPTModel's number of layers."""
        if self.hf is not None:
            return self.hf.megatron_settings()
        fields = self.entry.fields
        if self._is_nemotron:
            return self._nemotron_settings()
        return {name: value for name, value in fields.items() if name.startswith("linear_")} | {
            "hidden_size": fields["hidden_size"],
            "ffn_hidden_size": fields["intermediate_size"],
            "num_attention_heads": fields["num_attention_heads"],
            "num_query_groups": fields["num_key_value_heads"],
            "kv_channels": fields["hidden_size"] // fields["num_attention_heads"],
            "gated_linear_unit": True,
            "qk_layernorm": True,
        }

    @property
    def _nemotron_sizes(self) -> dict[str, Any]:
        fields = self.entry.fields
        return {ours: fields[theirs] for ours, theirs in _NEMOTRON.items() if theirs in fields}

    def _nemotron_settings(self) -> dict[str, Any]:
        from megatron.core.activations import squared_relu

        found = {
            "num_layers": len(self.pattern), "is_hybrid_model": True,
            "activation_func": squared_relu, "gated_linear_unit": False,
            "normalization": "RMSNorm", "add_bias_linear": False,
            "hidden_dropout": 0.0, "attention_dropout": 0.0,
        }  # fmt: skip
        if "E" in self.pattern:
            found |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
        return found | self._nemotron_sizes

    def _nemotron_flags(self) -> list[str]:
        words = ["--spec", "megatron_gdn.specs", "hybrid_stack_spec"]
        words += ["--hybrid-layer-pattern", self.pattern, *_NEMOTRON_FLAGS.split()]
        if "E" in self.pattern:
            words += ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
        for name, value in self._nemotron_sizes.items():
            words += [_FLAGS.get(name, f"--{name.replace('_', '-')}"), str(value)]
        return words

    @cached_property
    def stack(self) -> Stack:
        """What it costs."""
        config, vocab = SimpleNamespace(**self.settings), self.entry.fields["vocab_size"]
        wide = self.entry.architecture == "OlmoHybridForCausalLM"
        return Stack.of(config, self.pattern, vocab, self.tied, wide_qk_norm=wide)

    @cached_property
    def dims(self) -> GDNDims | Mamba2Dims:
        """The sizes of its recurrent layers."""
        config = SimpleNamespace(**self.settings)
        if "G" in self.pattern:
            return GDNDims.from_config(config)
        return Mamba2Dims.from_config(config, config.hidden_size, MAMBA_TAPS, 2)

    def refuse_unless_built(self, model: Architecture = "hybrid") -> None:
        """Refuse a model that Megatron would not build as it was published.

        Raises:
            NotImplementedError: it would be another model.
        """
        if self.hf is None and not self._is_nemotron:
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
            **changes: fields of the ``TransformerConfig`` to add or override, such as
                ``tensor_model_parallel_size=2``. Without them parallel sizes are Megatron's
                current ones; 1 where its parallel state was not set up.

        Raises:
            NotImplementedError: see `refuse_unless_built`.
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
        """The flags of ``pretrain_hybrid.py`` or ``pretrain_gpt.py`` that build the model.

        Raises:
            NotImplementedError: see `refuse_unless_built`.
        """
        self.refuse_unless_built(model)
        return self._nemotron_flags() if self.hf is None else megatron_flags(self.hf, model)

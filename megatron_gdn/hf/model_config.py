"""Read a Hugging Face ``config.json`` of the Gated DeltaNet families into one flat record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.nn.functional as F

from ..gdn.hf import Storage
from ..gdn.sizes import GDNDims
from ..ops.delta_rule.sizes import LINEAR
from .state_dict_adapter import GDN_FP32_CHECKPOINT_ARCHITECTURES


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModelConfig:
    """The sizes and settings of a model that weight mapping needs; an unused size is 0."""

    architecture: str  # one of GDN_FP32_CHECKPOINT_ARCHITECTURES
    storage: Storage  # how the files store the projections of Gated DeltaNet
    gdn: GDNDims
    hidden_size: int
    vocab_size: int
    tied: bool  # the output layer is the embedding
    num_attention_heads: int
    num_query_groups: int
    head_dim: int
    is_linear: tuple[bool, ...]  # for each layer: Gated DeltaNet (True) or attention (False)
    is_moe: tuple[bool, ...]  # for each layer: whether its MLP is a mixture of experts
    ffn_size: int
    num_experts: int
    experts_per_token: int
    expert_ffn_size: int
    shared_expert_ffn_size: int
    norm_eps: float
    rope_theta: float
    rotary_fraction: float

    @property
    def num_layers(self) -> int:
        return len(self.is_linear)

    @property
    def hybrid_layer_pattern(self) -> str:
        """HybridModel's pattern: for each layer one symbol for its mixer, one for its MLP."""
        pairs = zip(self.is_linear, self.is_moe, strict=True)
        return "".join(("G" if gdn else "*") + ("E" if moe else "-") for gdn, moe in pairs)

    def megatron_settings(self) -> dict[str, Any]:
        """The ``TransformerConfig`` fields that the weights need; ``num_layers`` is GPTModel's."""
        settings: dict[str, Any] = {
            "num_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.num_attention_heads,
            "num_query_groups": self.num_query_groups,
            "kv_channels": self.head_dim,
            "normalization": "RMSNorm",
            "layernorm_zero_centered_gamma": True,
            "layernorm_epsilon": self.norm_eps,
            "qk_layernorm": True,
            "attention_output_gate": True,
            "add_bias_linear": False,
            "add_qkv_bias": False,
            "gated_linear_unit": True,
            "activation_func": F.silu,
            "experimental_attention_variant": "gated_delta_net",
            "linear_attention_freq": [int(gdn) for gdn in self.is_linear],
            **self.gdn.config_fields,
            "ffn_hidden_size": self.ffn_size or self.expert_ffn_size,
        }
        if self.num_experts:
            settings |= {
                "num_moe_experts": self.num_experts,
                "moe_layer_freq": [int(moe) for moe in self.is_moe],
                "moe_ffn_hidden_size": self.expert_ffn_size,
                "moe_shared_expert_intermediate_size": self.shared_expert_ffn_size,
                "moe_shared_expert_gate": True,
                "moe_router_topk": self.experts_per_token,
                "moe_router_pre_softmax": False,
            }
        return settings


def read_hf_config(folder: str | Path) -> HFModelConfig:
    """Read ``folder/config.json``; errors are FileNotFoundError and those of `parse_hf_config`."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist; give a Hugging Face model folder.")
    try:
        config = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON: {error}.") from error
    return parse_hf_config(config)


def parse_hf_config(config: Mapping[str, Any]) -> HFModelConfig:
    """Flatten a parsed ``config.json``, with the sizes of ``text_config`` if there is one.

    ``tie_word_embeddings`` is read at the top level only: the nested default is wrong for some
    published models. An unknown architecture, a missing field or a setting that these weights do
    not have is a ValueError.
    """
    known = sorted(GDN_FP32_CHECKPOINT_ARCHITECTURES)
    named = config.get("architectures") or []
    architecture = next((name for name in named if name in known), None)
    if architecture is None:
        raise ValueError(
            f"unknown architecture {list(named)}; known: {', '.join(known)}. Of other models, "
            f"linear-attention layers convert one by one, see gdn_layer_from_hf and "
            f"kda_layer_from_hf of megatron_gdn.hf."
        )
    text = config.get("text_config") or config

    def field(name: str, *default: Any) -> Any:
        value = text.get(name)
        if value is not None:
            return value
        if not default:
            raise ValueError(f"config.json of a {architecture} has no {name!r}.")
        return default[0]

    act, gate = field("hidden_act", "silu"), field("output_gate_type", None)
    if field("attention_bias", False):
        raise ValueError(
            "attention_bias=true is not supported: no published model of these families has it."
        )
    if act != "silu":
        raise ValueError(f"hidden_act={act!r} is not supported; it must be 'silu'.")
    if gate not in (None, "silu", "swish"):
        raise ValueError(
            f"output_gate_type={gate!r} is not supported in whole models; it must be 'silu'. A "
            f"layer of its own takes output_gate_activation='sigmoid'."
        )
    if not field("attn_output_gate", True):
        raise ValueError("attn_output_gate=false is not supported: these weights have the gate.")
    rope = field("rope_parameters", None) or field("rope_scaling", None) or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"rope_type={kind!r} is not supported: the model would be built without the scaling. "
            f"To build it without the scaling, set it to 'default'."
        )
    is_linear = _linear_layers(field)
    is_moe = _moe_layers(field, len(is_linear))
    if any(is_moe) and not field("norm_topk_prob", True):
        raise ValueError("norm_topk_prob=false is not supported: routing weights must sum to one.")
    hidden, heads = field("hidden_size"), field("num_attention_heads")

    def of_experts(name: str) -> int:
        return field(name) if any(is_moe) else 0

    return HFModelConfig(
        architecture=architecture,
        storage="interleaved" if architecture == "Qwen3NextForCausalLM" else "flat",
        gdn=GDNDims(hidden_size=hidden, **{name: field(f"linear_{name}") for name in LINEAR}),
        hidden_size=hidden,
        vocab_size=field("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        num_attention_heads=heads,
        num_query_groups=field("num_key_value_heads"),
        head_dim=field("head_dim", hidden // heads),
        is_linear=is_linear,
        is_moe=is_moe,
        ffn_size=0 if all(is_moe) else field("intermediate_size"),
        num_experts=of_experts("num_experts"),
        experts_per_token=of_experts("num_experts_per_tok"),
        expert_ffn_size=of_experts("moe_intermediate_size"),
        shared_expert_ffn_size=of_experts("shared_expert_intermediate_size"),
        norm_eps=field("rms_norm_eps", 1e-6),
        rope_theta=rope.get("rope_theta", field("rope_theta", 10_000_000.0)),
        rotary_fraction=rope.get("partial_rotary_factor", field("partial_rotary_factor", 0.25)),
    )


def _linear_layers(field: Any) -> tuple[bool, ...]:
    """Which layers are Gated DeltaNet: by the config's list, else every N-th layer is attention."""
    count = field("num_hidden_layers")
    types = field("layer_types", None)
    if types is None:
        interval = field("full_attention_interval", 4)
        return tuple((layer + 1) % interval != 0 for layer in range(count))
    unknown = sorted(set(types) - {"linear_attention", "full_attention"})
    if unknown or len(types) != count:
        raise ValueError(
            f"layer_types must be {count} times 'linear_attention' or 'full_attention'; it has "
            f"{len(types)} entries{f' and also {unknown}' if unknown else ''}."
        )
    return tuple(kind == "linear_attention" for kind in types)


def _moe_layers(field: Any, count: int) -> tuple[bool, ...]:
    """Which layers have experts: every ``decoder_sparse_step``-th, except ``mlp_only_layers``."""
    if not field("num_experts", 0):
        return (False,) * count
    step, dense = field("decoder_sparse_step", 1), field("mlp_only_layers", [])
    return tuple((layer + 1) % step == 0 and layer not in dense for layer in range(count))

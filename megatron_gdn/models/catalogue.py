"""The published models, as their ``config.json`` describes their language model.

Each entry has the fields of transformers' config class of its architecture, and says where the
numbers were read. Vision encoders and heads of multi-token prediction are not part of an entry.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Entry(NamedTuple):
    """One model.

    Attributes:
        architecture: the class in transformers.
        fields: of its ``config.json``.
        source: where these were found.
    """

    architecture: str
    fields: dict[str, Any]
    source: str


_DEV = "Megatron-LM dev, examples/multimodal_dev/models/qwen35_vl/configuration.py"
_CARD = "the model's card"
_BRIDGE = "Megatron-Bridge, recipes/nemotronh"

_GDN = {
    "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "head_dim": 256, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10_000_000.0, "partial_rotary_factor": 0.25,
    },
}  # fmt: skip


def _fields(
    hidden: int, layers: int, heads: int, groups: int, value_heads: int, *,
    tied: bool = False, vocab: int = 248_320, **more: int,
) -> dict[str, Any]:  # fmt: skip
    return _GDN | {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": groups, "linear_num_value_heads": value_heads,
        "tie_word_embeddings": tied, "vocab_size": vocab,
    } | more  # fmt: skip


def _dense(ffn: int, *sizes: int, tied: bool = False) -> dict[str, Any]:
    return _fields(*sizes, tied=tied, intermediate_size=ffn)


def _moe(ffn: int, experts: int, used: int, *sizes: int, vocab: int = 248_320) -> dict[str, Any]:
    return _fields(
        *sizes, vocab=vocab, moe_intermediate_size=ffn, shared_expert_intermediate_size=ffn,
        num_experts=experts, num_experts_per_tok=used,
    )  # fmt: skip


def _nemotron(pattern: str, **more: Any) -> dict[str, Any]:
    return {
        "hybrid_override_pattern": pattern, "vocab_size": 131_072, "head_dim": 128,
        "ssm_state_size": 128, "n_groups": 8, "conv_kernel": 4, "layer_norm_epsilon": 1e-5,
        "tie_word_embeddings": False,
    } | more  # fmt: skip


_DENSE, _MOE, _NEMOTRON = "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "NemotronHForCausalLM"
_27B = _dense(17408, 5120, 64, 24, 4, 48)
_35B = _moe(512, 256, 8, 2048, 40, 16, 2, 32)

ENTRIES: dict[str, Entry] = {
    "tiny": Entry(
        _DENSE,
        _dense(256, 128, 4, 4, 2, 8)
        | {"linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
        | {"head_dim": 32, "vocab_size": 1024},
        "made for trying out",
    ),
    "Qwen3-Next-80B-A3B": Entry(
        "Qwen3NextForCausalLM",
        _moe(512, 512, 10, 2048, 48, 16, 2, 32, vocab=151_936) | {"intermediate_size": 5120},
        "transformers' Qwen3NextConfig; rotary base and unused MLP width: slime, scripts/models",
    ),
    "Qwen3.5-0.8B": Entry(_DENSE, _dense(3584, 1024, 24, 8, 2, 16, tied=True), f"{_DEV}; {_CARD}"),
    "Qwen3.5-2B": Entry(_DENSE, _dense(6144, 2048, 24, 8, 2, 16, tied=True), f"{_DEV}; {_CARD}"),
    "Qwen3.5-4B": Entry(_DENSE, _dense(9216, 2560, 32, 16, 4, 32, tied=True), f"{_DEV}; {_CARD}"),
    "Qwen3.5-9B": Entry(_DENSE, _dense(12288, 4096, 32, 16, 4, 32), _DEV),
    "Qwen3.5-27B": Entry(_DENSE, _27B, _DEV),
    "Qwen3.5-35B-A3B": Entry(_MOE, _35B, _DEV),
    "Qwen3.5-122B-A10B": Entry(_MOE, _moe(1024, 256, 8, 3072, 48, 32, 2, 64), f"{_DEV}; {_CARD}"),
    "Qwen3.5-397B-A17B": Entry(_MOE, _moe(1024, 512, 10, 4096, 60, 32, 2, 64), _DEV),
    "Qwen3.6-27B": Entry(_DENSE, _27B, _CARD),
    "Qwen3.6-35B-A3B": Entry(_MOE, _35B, f"{_CARD}; Megatron-Bridge, docs/models/qwen"),
    "Qwen3.8-27B": Entry(
        _DENSE, _27B, "Megatron-Bridge, examples/model_verification_cards/qwen3.8-27b"
    ),
    "Qwen3.8-2.4T-A95B": Entry(_MOE, _moe(2048, 512, 10, 8192, 92, 64, 4, 128), _CARD),
    "Olmo-Hybrid-7B": Entry(
        "OlmoHybridForCausalLM",
        {
            "vocab_size": 100_352, "hidden_size": 3840, "intermediate_size": 11_008,
            "num_hidden_layers": 32, "num_attention_heads": 30, "num_key_value_heads": 30,
            "linear_num_key_heads": 30, "linear_num_value_heads": 30, "linear_key_head_dim": 96,
            "linear_value_head_dim": 192, "linear_conv_kernel_dim": 4, "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
        },
        "transformers' OlmoHybridConfig",
    ),
    "Nemotron-H-8B": Entry(
        _NEMOTRON,
        _nemotron(
            "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-", hidden_size=4096,
            intermediate_size=21_504, num_attention_heads=32, num_key_value_heads=8,
            mamba_num_heads=128, mamba_head_dim=64,
        ),
        f"transformers' NemotronHConfig; {_BRIDGE}/h100/nemotronh.py",
    ),
    "Nemotron-3-Nano-4B": Entry(
        _NEMOTRON,
        _nemotron(
            "M-M-M-MM-M-M*-M-M*-M-M-M*-M-M-MM*-MMM-M-M-", hidden_size=3136,
            intermediate_size=12_544, num_attention_heads=40, num_key_value_heads=8,
            mamba_num_heads=96, mamba_head_dim=80,
        ),
        f"{_BRIDGE}/h100/nemotron_3_nano_4b.py",
    ),
    "Nemotron-3-Nano-30B-A3B": Entry(
        _NEMOTRON,
        _nemotron(
            "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", hidden_size=2688,
            intermediate_size=1856, num_attention_heads=32, num_key_value_heads=2,
            mamba_num_heads=64, mamba_head_dim=64, n_routed_experts=128, num_experts_per_tok=6,
            moe_intermediate_size=1856, moe_shared_expert_intermediate_size=3712,
            routed_scaling_factor=2.5,
        ),
        f"{_BRIDGE}/h100/nemotron_3_nano.py",
    ),
}  # fmt: skip

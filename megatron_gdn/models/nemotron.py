"""Nemotron-H's ``config.json`` in Megatron's words: fields of a configuration, and flags."""

from __future__ import annotations

from typing import Any


def pattern_of(fields: dict[str, Any]) -> str:
    return fields["hybrid_override_pattern"]


def settings(fields: dict[str, Any]) -> dict[str, Any]:
    """The ``TransformerConfig`` fields of the model."""
    from megatron.core.activations import squared_relu

    found = {
        "num_layers": len(pattern_of(fields)),
        "is_hybrid_model": True,
        "activation_func": squared_relu,
        "gated_linear_unit": False,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }
    if "n_routed_experts" in fields:
        found |= {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    return found | {name: value for name, (_, value) in _sizes(fields).items()}


def flags(fields: dict[str, Any]) -> list[str]:
    """The flags of ``pretrain_hybrid.py`` that build the model."""
    words = ["--spec", "megatron_gdn.specs", "hybrid_stack_spec"]
    words += ["--hybrid-layer-pattern", pattern_of(fields), "--group-query-attention"]
    words += ["--position-embedding-type", "none", "--squared-relu", "--normalization", "RMSNorm"]
    words += ["--disable-bias-linear", "--untie-embeddings-and-output-weights"]
    words += ["--hidden-dropout", "0", "--attention-dropout", "0"]
    if "n_routed_experts" in fields:
        words += ["--moe-router-score-function", "sigmoid", "--moe-router-enable-expert-bias"]
    for flag, value in _sizes(fields).values():
        words += [flag, str(value)]
    return words


def _sizes(fields: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Each field of the configuration with its flag and value."""
    found = {
        "hidden_size": ("--hidden-size", "hidden_size"),
        "ffn_hidden_size": ("--ffn-hidden-size", "intermediate_size"),
        "num_attention_heads": ("--num-attention-heads", "num_attention_heads"),
        "num_query_groups": ("--num-query-groups", "num_key_value_heads"),
        "kv_channels": ("--kv-channels", "head_dim"),
        "layernorm_epsilon": ("--norm-epsilon", "layer_norm_epsilon"),
        "mamba_num_heads": ("--mamba-num-heads", "mamba_num_heads"),
        "mamba_head_dim": ("--mamba-head-dim", "mamba_head_dim"),
        "mamba_state_dim": ("--mamba-state-dim", "ssm_state_size"),
        "mamba_num_groups": ("--mamba-num-groups", "n_groups"),
        "num_moe_experts": ("--num-experts", "n_routed_experts"),
        "moe_router_topk": ("--moe-router-topk", "num_experts_per_tok"),
        "moe_ffn_hidden_size": ("--moe-ffn-hidden-size", "moe_intermediate_size"),
        "moe_shared_expert_intermediate_size": (
            "--moe-shared-expert-intermediate-size", "moe_shared_expert_intermediate_size",
        ),
        "moe_router_topk_scaling_factor": (
            "--moe-router-topk-scaling-factor", "routed_scaling_factor",
        ),
    }  # fmt: skip
    return {
        name: (flag, fields[theirs]) for name, (flag, theirs) in found.items() if theirs in fields
    }

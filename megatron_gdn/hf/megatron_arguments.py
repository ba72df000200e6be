"""A Hugging Face model as Megatron's command-line flags, for launches and for checkpoints.

Megatron's ``--load`` compares the checkpoint's arguments with its own, and
``--use-checkpoint-args`` takes some of them; a launch has to name the rest, which `megatron_flags`
does.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from .maps.model_map import Architecture
from .model_config import HFModelConfig

# Flags whose attribute has another name or the opposite value.
_ATTRIBUTES = {
    "--disable-bias-linear": ("add_bias_linear", False),
    "--norm-epsilon": ("layernorm_epsilon", None),
    "--apply-layernorm-1p": ("layernorm_zero_centered_gamma", True),
}


def megatron_flags(
    config: HFModelConfig, model: Architecture = "hybrid", zero_centered_gamma: bool = True
) -> list[str]:
    """The flags of a Megatron launch that builds the model: sizes, norms, rotary, dropout 0.

    The launch adds parallel sizes, data, tokenizer and optimizer. It also decides how the
    vocabulary is padded; a checkpoint loads with any padding.
    """
    words = []
    for flag, value in _flags(config, model, zero_centered_gamma).items():
        words += [flag] if value is True else [flag, *str(value).split(" ")]
    return words


def megatron_arguments(
    config: HFModelConfig, model: Architecture = "hybrid", zero_centered_gamma: bool = True
) -> Namespace:
    """The ``args`` that a Megatron run of the model would save: those that describe the model."""
    args = Namespace(
        num_layers=_num_layers(config, model),
        hybrid_layer_pattern=None,
        layernorm_zero_centered_gamma=zero_centered_gamma,
        untie_embeddings_and_output_weights=not config.tied,
        add_qkv_bias=False,
        rotary_interleaved=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )
    for flag, value in _flags(config, model, zero_centered_gamma).items():
        name, fixed = _ATTRIBUTES.get(flag, (flag[2:].replace("-", "_"), None))
        if flag != "--spec":
            setattr(args, name, value if fixed is None else fixed)
    return args


def _num_layers(config: HFModelConfig, model: Architecture) -> int:
    return config.num_layers * (2 if model == "hybrid" else 1)


def _flags(config: HFModelConfig, model: Architecture, zero_centered_gamma: bool) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    if model == "hybrid":
        flags["--spec"] = "megatron_gdn.specs gdn_qk_norm_hybrid_stack_spec"
        flags["--hybrid-layer-pattern"] = config.hybrid_layer_pattern
    else:
        flags["--spec"] = "megatron_gdn.specs gpt_block_spec"
        flags["--num-layers"] = config.num_layers
        flags["--experimental-attention-variant"] = "gated_delta_net"
        flags["--linear-attention-freq"] = _list([int(gdn) for gdn in config.is_linear])
    flags |= {
        "--hidden-size": config.hidden_size,
        "--ffn-hidden-size": config.ffn_size or config.expert_ffn_size,
        "--num-attention-heads": config.num_attention_heads,
        "--group-query-attention": True,
        "--num-query-groups": config.num_query_groups,
        "--kv-channels": config.head_dim,
        "--attention-output-gate": True,
        "--qk-layernorm": True,
        "--linear-num-key-heads": config.gdn.num_key_heads,
        "--linear-num-value-heads": config.gdn.num_value_heads,
        "--linear-key-head-dim": config.gdn.key_head_dim,
        "--linear-value-head-dim": config.gdn.value_head_dim,
        "--linear-conv-kernel-dim": config.gdn.conv_kernel_dim,
        "--normalization": "RMSNorm",
        "--norm-epsilon": config.norm_eps,
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--hidden-dropout": 0.0,
        "--attention-dropout": 0.0,
        "--position-embedding-type": "rope",
        "--rotary-percent": config.rotary_fraction,
        "--rotary-base": int(config.rope_theta),
    }
    if zero_centered_gamma:
        flags["--apply-layernorm-1p"] = True
    if not config.tied:
        flags["--untie-embeddings-and-output-weights"] = True
    if config.num_experts:
        flags |= {
            "--num-experts": config.num_experts,
            "--moe-ffn-hidden-size": config.expert_ffn_size,
            "--moe-router-topk": config.experts_per_token,
            "--moe-shared-expert-intermediate-size": config.shared_expert_ffn_size,
            "--moe-shared-expert-gate": True,
        }
        if model == "gpt":
            flags["--moe-layer-freq"] = _list([int(moe) for moe in config.is_moe])
    return flags


def _list(numbers: list[int]) -> str:
    return "([" + ",".join(map(str, numbers)) + "])"

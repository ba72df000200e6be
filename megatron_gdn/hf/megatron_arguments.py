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

# Settings whose flag has another name; flags whose attribute has another value.
_FLAGS = {"layernorm_epsilon": "norm_epsilon", "num_moe_experts": "num_experts"}
_ATTRIBUTES = {
    "disable_bias_linear": ("add_bias_linear", False),
    "norm_epsilon": ("layernorm_epsilon", None),
    "apply_layernorm_1p": ("layernorm_zero_centered_gamma", True),
}
# Settings that other flags say, or nobody; and of a HybridModel, those that its pattern says.
_SAID_OTHERWISE = {
    "layernorm_zero_centered_gamma", "add_bias_linear", "add_qkv_bias", "gated_linear_unit",
    "activation_func", "moe_router_pre_softmax",
}  # fmt: skip
_IN_THE_PATTERN = {
    "num_layers", "experimental_attention_variant", "linear_attention_freq", "moe_layer_freq",
}  # fmt: skip


def megatron_flags(
    config: HFModelConfig, model: Architecture = "hybrid", zero_centered_gamma: bool = True
) -> list[str]:
    """The flags of a Megatron launch that builds the model: sizes, norms, rotary, dropout 0.

    The launch adds parallel sizes, data, tokenizer and optimizer. It also decides how the
    vocabulary is padded; a checkpoint loads with any padding.
    """
    words = []
    for name, value in _flags(config, model, zero_centered_gamma).items():
        flag = f"--{name.replace('_', '-')}"
        words += [flag] if value is True else [flag, *str(value).split(" ")]
    return words


def megatron_arguments(
    config: HFModelConfig, model: Architecture = "hybrid", zero_centered_gamma: bool = True
) -> Namespace:
    """The ``args`` that a Megatron run of the model would save: those that describe the model."""
    args = Namespace(
        num_layers=config.num_layers * (2 if model == "hybrid" else 1),
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
        name, fixed = _ATTRIBUTES.get(flag, (flag, None))
        if flag != "spec":
            setattr(args, name, value if fixed is None else fixed)
    return args


def _flags(config: HFModelConfig, model: Architecture, zero_centered_gamma: bool) -> dict[str, Any]:
    """By the flags' names, with underscores."""
    if model == "hybrid":
        flags: dict[str, Any] = {"spec": "megatron_gdn.specs gdn_qk_norm_hybrid_stack_spec"}
        flags["hybrid_layer_pattern"] = config.hybrid_layer_pattern
        left_out = _SAID_OTHERWISE | _IN_THE_PATTERN
    else:
        flags, left_out = {"spec": "megatron_gdn.specs gpt_block_spec"}, _SAID_OTHERWISE
    for name, value in config.megatron_settings().items():
        if name not in left_out:
            value = f"([{','.join(map(str, value))}])" if isinstance(value, list) else value
            flags[_FLAGS.get(name, name)] = value
    flags |= {
        "group_query_attention": True,
        "swiglu": True,
        "disable_bias_linear": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "position_embedding_type": "rope",
        "rotary_percent": config.rotary_fraction,
        "rotary_base": int(config.rope_theta),
    }
    if zero_centered_gamma:
        flags["apply_layernorm_1p"] = True
    if not config.tied:
        flags["untie_embeddings_and_output_weights"] = True
    return flags

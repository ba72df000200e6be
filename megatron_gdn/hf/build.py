"""Build a Megatron model from ``config.json``, or list the flags of a launch that builds it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from .model_map import Architecture, HFModelConfig, read_hf_config


def build_model(
    source: str | Path | HFModelConfig,
    model: Architecture = "hybrid",
    *,
    modules: Literal["auto", "te", "local"] = "auto",
    dtype: torch.dtype | None = None,
    max_sequence_length: int = 4096,
    vocab_divisible_by: int = 8,
    layer_pattern: str | None = None,
    vp_stage: int | None = None,
    parallel_output: bool = True,
    layer_options: dict[str, Any] | None = None,
    spec: Any = None,
    **changes: Any,
) -> tuple[nn.Module, Any]:
    """Build this rank's part of a Megatron model that computes what the Hugging Face model does.

    Megatron's parallel state and random seeds must have been set up. Weights are random until
    `load_hf_weights` or a checkpoint fills them. Sizes, norms (zero-centred), epsilon, output
    gates, rotary settings, experts, tied embeddings and dropout 0 come from ``config.json``.

    Args:
        source: a folder with ``config.json``, or what `read_hf_config` returned for it.
        model: "hybrid" for a HybridModel, two Megatron layers for each layer of the config; "gpt"
            for a GPTModel, one for each.
        modules: "te" for Transformer Engine's linears and norms, "local" for Megatron's own;
            "auto" takes Transformer Engine where it is installed.
        dtype: dtype of the parameters; ``A_log`` and ``dt_bias`` are always fp32. None means bf16
            on a machine with a GPU, else fp32.
        max_sequence_length: tokens of the longest sequence.
        vocab_divisible_by: the vocabulary is padded to a multiple of this number times the
            tensor-parallel size. Megatron's softmax counts padding; published sizes need none.
        layer_pattern: the hybrid pattern with ``|`` between pipeline stages; None: no cuts.
        vp_stage: which virtual pipeline stage to build.
        parallel_output: keep the logits cut over tensor-parallel ranks, as Megatron's loss needs.
        layer_options: options of the Gated DeltaNet layer (`gated_delta_net_spec`).
        spec: a spec of a HybridStack or a GPT block, used in place of this package's.
        **changes: fields of ``TransformerConfig`` to override, such as ``sequence_parallel``.

    Returns:
        The model, on the CPU or the current GPU as Megatron's layers decide, and its
        ``TransformerConfig``.

    Raises:
        FileNotFoundError, ValueError: ``config.json`` is missing or describes another model;
            ``layer_pattern`` is not the config's.
        ImportError: ``modules="te"`` without Transformer Engine.
    """
    from megatron.core import parallel_state

    from ..specs import gpt_block_spec, hybrid_stack_spec
    from ..specs.layer import resolve_modules

    hf = source if isinstance(source, HFModelConfig) else read_hf_config(source)
    resolved = resolve_modules(modules)
    config = transformer_config(hf, model, modules=resolved, dtype=dtype, **changes)
    stage: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    arguments = model_arguments(hf, config, vocab_divisible_by) | {
        "max_sequence_length": max_sequence_length,
        "parallel_output": parallel_output,
        "pre_process": parallel_state.is_pipeline_first_stage(**stage),
        "post_process": parallel_state.is_pipeline_last_stage(**stage),
        "vp_stage": vp_stage,
    }
    options = layer_options or {}
    if spec is not None and options:
        raise ValueError("layer_options change this package's spec; put them into the spec given.")
    if model == "gpt":
        from megatron.core.models.gpt import GPTModel

        spec = spec or gpt_block_spec(config, vp_stage, **options)
        return GPTModel(config, spec, **arguments), config

    from megatron.core.models.hybrid.hybrid_model import HybridModel

    spec = spec or hybrid_stack_spec(resolved, qk_layernorm=True, **options)
    pattern = layer_pattern or hf.hybrid_layer_pattern
    if pattern.replace("|", "") != hf.hybrid_layer_pattern:
        raise ValueError(
            f"layer_pattern={layer_pattern!r} is not the model's, which is "
            f"{hf.hybrid_layer_pattern!r}; only '|' may be added, between pipeline stages."
        )
    return HybridModel(config, spec, hybrid_layer_pattern=pattern, **arguments), config


def model_arguments(hf: HFModelConfig, config: Any, vocab_divisible_by: int = 8) -> dict[str, Any]:
    """The constructor arguments of a HybridModel or GPTModel, from ``config.json``."""
    multiple = vocab_divisible_by * config.tensor_model_parallel_size
    return {
        "vocab_size": -(-hf.vocab_size // multiple) * multiple,
        "share_embeddings_and_output_weights": hf.tied,
        "position_embedding_type": "rope",
        "rotary_percent": hf.rotary_fraction,
        "rotary_base": hf.rope_theta,
    }


def transformer_config(
    hf: HFModelConfig,
    model: Architecture = "hybrid",
    *,
    modules: Literal["te", "local"] = "local",
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> Any:
    """The ``TransformerConfig`` of `build_model`; see `model_arguments` for other settings."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    settings = hf.megatron_settings() | current_settings(modules, dtype)
    settings |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
    if hf.num_experts and modules == "te":
        settings["moe_grouped_gemm"] = True
    if model == "hybrid":
        # A pattern gives the kind of each layer; the lists of `hf` describe half as many layers.
        settings |= {
            "num_layers": len(hf.hybrid_layer_pattern),
            "linear_attention_freq": 1,
            "moe_layer_freq": 1,
            "is_hybrid_model": True,
        }
    return TransformerConfig(**(settings | changes))


def current_settings(
    modules: Literal["te", "local"], dtype: torch.dtype | None = None
) -> dict[str, Any]:
    """The ``TransformerConfig`` fields for device, dtype and parallel sizes of this process."""
    from megatron.core import parallel_state

    has_gpu = torch.cuda.is_available()
    if dtype is None:
        dtype = torch.bfloat16 if has_gpu else torch.float32
    settings: dict[str, Any] = {
        "transformer_impl": "transformer_engine" if modules == "te" else "local",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu_initialization": not has_gpu,
        "gradient_accumulation_fusion": False,
    }
    if parallel_state.model_parallel_is_initialized():
        for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
            size = getattr(parallel_state, f"get_{name}_parallel_world_size")()
            settings[f"{name}_parallel_size"] = size
    return settings


# Settings whose flag does not have the setting's name.
_FLAGS = {
    "num_moe_experts": "num_experts",
    "layernorm_epsilon": "norm_epsilon",
    "add_bias_linear": "disable_bias_linear",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
}
# Settings that are not passed as flags; a HybridModel's pattern replaces the second set.
_NOT_FLAGS = {
    "add_qkv_bias", "gated_linear_unit", "activation_func", "moe_router_pre_softmax",
}  # fmt: skip
_IN_THE_PATTERN = {
    "num_layers", "experimental_attention_variant", "linear_attention_freq", "moe_layer_freq",
}  # fmt: skip


def megatron_flags(config: HFModelConfig, model: Architecture = "hybrid") -> list[str]:
    """The flags of a Megatron launch that builds the model: sizes, norms, rotary, dropout 0.

    The launch adds parallel sizes, data, tokenizer and optimizer. The launch also pads
    the vocabulary; a checkpoint loads with any padding.
    """
    return flags_of(_launch_settings(config, model))


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Flags of a launch; ``settings`` have the names of Megatron's config or arguments."""
    words = []
    for name, value in settings.items():
        flag = f"--{_FLAGS.get(name, name).replace('_', '-')}"
        words += [flag] if isinstance(value, bool) else [flag, *str(value).split(" ")]
    return words


def megatron_arguments(config: HFModelConfig, model: Architecture = "hybrid") -> Namespace:
    """The ``args`` of a Megatron run of the model, as far as they describe the model."""
    args = Namespace(
        num_layers=config.num_layers * (2 if model == "hybrid" else 1),
        hybrid_layer_pattern=None,
        untie_embeddings_and_output_weights=not config.tied,
        add_qkv_bias=False,
        rotary_interleaved=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )
    vars(args).update(_launch_settings(config, model))
    del vars(args)["spec"]
    return args


def _launch_settings(config: HFModelConfig, model: Architecture) -> dict[str, Any]:
    """The model's settings under the names of Megatron's arguments, in the order of the flags."""
    if model == "hybrid":
        flags: dict[str, Any] = {"spec": "megatron_gdn.specs gdn_qk_norm_hybrid_stack_spec"}
        flags["hybrid_layer_pattern"] = config.hybrid_layer_pattern
        left_out = _NOT_FLAGS | _IN_THE_PATTERN
    else:
        flags, left_out = {"spec": "megatron_gdn.specs gpt_block_spec"}, _NOT_FLAGS
    for name, value in config.megatron_settings().items():
        if name not in left_out:
            value = f"([{','.join(map(str, value))}])" if isinstance(value, list) else value
            flags["num_experts" if name == "num_moe_experts" else name] = value
    flags |= {
        "group_query_attention": True,
        "swiglu": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "position_embedding_type": "rope",
        "rotary_percent": config.rotary_fraction,
        "rotary_base": int(config.rope_theta),
    }
    if not config.tied:
        flags["untie_embeddings_and_output_weights"] = True
    return flags

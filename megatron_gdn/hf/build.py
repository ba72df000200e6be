"""Build a Megatron model from ``config.json``, or list the flags of a launch that
builds this model."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from ..kda.sizes import CONFIG_FIELD_OF_LOW_RANK
from .kimi import KIMI_ARCHITECTURE
from .model_map import HFModelConfig, MegatronModelKind, read_hf_config

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


def build_model(
    source: str | Path | HFModelConfig,
    model: MegatronModelKind = "hybrid",
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
) -> tuple[nn.Module, TransformerConfig]:
    """Build this rank's part of a Megatron model that computes what the Hugging Face
    model does.

    Megatron's parallel state and random seeds must have been set up. Weights are random
    until `load_hf_weights` or a checkpoint fills them. Sizes, norms (zero-centred),
    epsilon, output gates, rotary settings, experts and tied embeddings come from
    ``config.json``; dropout is 0.

    Args:
        source: a folder with ``config.json``, or the result of `read_hf_config`.
        model: "hybrid" for a HybridModel (two Megatron layers for each layer of the
            config), "gpt" for a GPTModel (one Megatron layer for each).
        modules: "te" for Transformer Engine's linears and norms, "local" for Megatron's
            own; "auto" means "te" if Transformer Engine is installed, else "local".
        dtype: dtype of the parameters; ``A_log`` and ``dt_bias`` are always fp32. None
            means bf16 on a machine with a GPU, else fp32.
        max_sequence_length: tokens of the longest sequence.
        vocab_divisible_by: the vocabulary is padded to a multiple of this number times
            the tensor-parallel size. The softmax includes the added rows. Vocabularies
            of published models need no padding.
        layer_pattern: for a HybridModel, the config's ``hybrid_layer_pattern`` with
            ``|`` added between pipeline stages. None adds no ``|``.
        vp_stage: number of the virtual pipeline stage to build; None if there are no
            virtual stages.
        parallel_output: keep logits split over tensor-parallel ranks, as Megatron's
            loss needs.
        layer_options: options of the Gated DeltaNet layers (`gated_delta_net_spec`). In
            a Kimi Linear they are options of the Kimi Delta Attention layers.
        spec: a spec of a HybridStack or a GPT block, used in place of this package's
            spec.
        **changes: fields of ``TransformerConfig`` to override, such as
            ``sequence_parallel``.

    Returns:
        The model and its ``TransformerConfig``. Megatron's layers decide whether the
        model is on the CPU or on the current GPU.

    Raises:
        FileNotFoundError, ValueError: ``config.json`` is missing or describes a model
            that is not supported; ``layer_pattern`` has other layers than the config.
        ImportError: ``modules="te"`` without Transformer Engine.
    """
    from megatron.core import parallel_state

    from ..specs import gpt_block_spec, hybrid_stack_spec
    from ..specs.layer import resolve_modules

    if isinstance(source, HFModelConfig):
        hf = source
    else:
        hf = read_hf_config(source)
    te_or_local = resolve_modules(modules)
    options = layer_options or {}
    config = transformer_config(hf, model, modules=te_or_local, dtype=dtype, **changes)
    multiple = vocab_divisible_by * config.tensor_model_parallel_size
    added_rows = -hf.vocab_size % multiple
    # Unless ignore_virtual is True, Megatron asserts that a virtual stage is given.
    stage: dict[str, Any] = {"ignore_virtual": vp_stage is None, "vp_stage": vp_stage}
    arguments: dict[str, Any] = {
        "vocab_size": hf.vocab_size + added_rows,
        "max_sequence_length": max_sequence_length,
        "share_embeddings_and_output_weights": hf.tied,
        "position_embedding_type": "rope" if hf.rotary_fraction else "none",
        "rotary_percent": hf.rotary_fraction,
        "rotary_base": hf.rope_theta,
        "parallel_output": parallel_output,
        "pre_process": parallel_state.is_pipeline_first_stage(**stage),
        "post_process": parallel_state.is_pipeline_last_stage(**stage),
        "vp_stage": vp_stage,
    }
    if spec is not None and options:
        raise ValueError(
            "layer_options change this package's spec; put them into the spec given."
        )
    if model == "gpt":
        from megatron.core.models.gpt import GPTModel

        spec = spec or gpt_block_spec(config, vp_stage, **options)
        return GPTModel(config, spec, **arguments), config

    from megatron.core.models.hybrid.hybrid_model import HybridModel

    if spec is None and hf.architecture == KIMI_ARCHITECTURE:
        spec = _kimi_stack_spec(hf, te_or_local, options)
    spec = spec or hybrid_stack_spec(
        te_or_local,
        qk_layernorm=config.qk_layernorm,
        mamba=hf.mamba_options,
        **options,
    )
    pattern = layer_pattern or hf.hybrid_layer_pattern
    if pattern.replace("|", "") != hf.hybrid_layer_pattern:
        raise ValueError(
            f"layer_pattern={layer_pattern!r} is not the model's, which is "
            f"{hf.hybrid_layer_pattern!r}; only '|' may be added, between pipeline "
            "stages."
        )
    return HybridModel(config, spec, hybrid_layer_pattern=pattern, **arguments), config


def _kimi_stack_spec(hf: HFModelConfig, modules: str, options: dict[str, Any]) -> Any:
    """The spec of a HybridStack for a Kimi Linear.

    ``modules``: "te" or "local". ``options``: options of its 'K' layers. Its '+' layers
    are latent attention without position embedding.
    """
    from ..specs import hybrid_stack_spec
    from ..specs.hybrid import KIMI_LATENT_OPTIONS

    # The '+' layers need the sequence layout of the 'K' layers.
    shared_options = {}
    if "cp_layout" in options:
        shared_options["cp_layout"] = options["cp_layout"]
    kda_options = hf.kda_options | options
    return hybrid_stack_spec(
        modules, kda=kda_options, mla=KIMI_LATENT_OPTIONS, **shared_options
    )


def transformer_config(
    hf: HFModelConfig,
    model: MegatronModelKind = "hybrid",
    *,
    modules: Literal["te", "local"] = "local",
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> TransformerConfig:
    """The ``TransformerConfig`` with which `build_model` builds a model.

    If Megatron's parallel state is initialised, the parallel sizes are taken from it,
    else they are Megatron's defaults.

    Args:
        hf: the model's config.
        model: "hybrid" for a HybridModel, "gpt" for a GPTModel.
        modules: "te" for Transformer Engine's linears and norms, "local" for Megatron's
            own. Unlike in `build_model` there is no "auto", because a config does not
            build modules.
        dtype: dtype of the parameters; None means bf16 on a machine with a GPU, else
            fp32.
        **changes: fields of ``TransformerConfig`` to override.

    Returns:
        A ``TransformerConfig``, or its subclass ``MLATransformerConfig`` for a model
        with latent attention.

    Raises:
        NotImplementedError: as in `HFModelConfig.megatron_settings`.
    """
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    has_gpu = torch.cuda.is_available()
    if dtype is None:
        if has_gpu:
            dtype = torch.bfloat16
        else:
            dtype = torch.float32
    settings = hf.megatron_settings(model) | {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "transformer_impl": "transformer_engine" if modules == "te" else "local",
        "moe_grouped_gemm": "E" in hf.hybrid_layer_pattern and modules == "te",
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "fp16": dtype == torch.float16,
        "use_cpu_initialization": not has_gpu,
        # the fusion needs a compiled extension of Apex
        "gradient_accumulation_fusion": False,
    }
    if parallel_state.model_parallel_is_initialized():
        for name in (
            "tensor_model",
            "pipeline_model",
            "context",
            "expert_model",
            "expert_tensor",
        ):
            size = getattr(parallel_state, f"get_{name}_parallel_world_size")()
            settings[f"{name}_parallel_size"] = size
    settings |= changes
    if settings.get("multi_latent_attention"):
        return MLATransformerConfig(**settings)
    return TransformerConfig(**settings)


# Names of arguments -> names of their flags, where the two differ. A flag that begins
# with "disable_" or "no_" sets its argument to False.
_FLAGS_WITH_OTHER_NAMES = {
    "layernorm_epsilon": "norm_epsilon",
    "add_bias_linear": "disable_bias_linear",
    "layernorm_zero_centered_gamma": "apply_layernorm_1p",
    "apply_rope_fusion": "no_rope_fusion",
}


def megatron_flags(
    config: HFModelConfig, model: MegatronModelKind = "hybrid"
) -> list[str]:
    """The flags of a Megatron launch that builds the model: spec, sizes, norms, rotary
    embedding, dropout 0.

    The caller must add the flags of parallel sizes, data, tokenizer and optimizer.
    Megatron pads the vocabulary; the model's checkpoint loads with any padding. Megatron
    has no flag for ``time_step_min``, the lower bound of a NemotronH's time steps. So a
    launched model has no such bound; a model of `build_model` has it.

    Raises:
        NotImplementedError: as in `HFModelConfig.megatron_settings`.
    """
    flags: list[str] = []
    for name, value in _launch_arguments(config, model).items():
        flags.append(f"--{_FLAGS_WITH_OTHER_NAMES.get(name, name).replace('_', '-')}")
        if isinstance(value, tuple):  # a flag with several values
            flags += value
        elif not isinstance(value, bool):  # the flag of a bool has no value
            flags.append(str(value))
    return flags


def megatron_arguments(
    config: HFModelConfig, model: MegatronModelKind = "hybrid"
) -> Namespace:
    """Megatron's ``args`` that describe the model, to be stored in a checkpoint of one
    rank."""
    args = Namespace(
        num_layers=config.megatron_settings(model)["num_layers"],
        hybrid_layer_pattern=None,
        untie_embeddings_and_output_weights=not config.tied,
        add_qkv_bias=False,
        rotary_interleaved=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        no_save_optim=True,
        no_save_rng=True,
    )
    vars(args).update(_launch_arguments(config, model))
    del vars(args)["spec"]  # Megatron takes no spec from a checkpoint
    return args


def _launch_arguments(
    config: HFModelConfig, model: MegatronModelKind
) -> dict[str, Any]:
    """Names of Megatron's launch arguments -> their values for the model, in the order
    of `megatron_flags`.

    The value of ``spec`` is a pair: module, name. A bool is in the dict only if its
    flag must be given. The name of the activation replaces ``activation_func``, since a
    flag cannot hold a function.
    """
    settings = config.megatron_settings(model)
    if settings.pop("gated_linear_unit"):
        activation = "swiglu"
    else:
        activation = "squared_relu"
    del settings["activation_func"]
    spec = "gpt_block_spec"
    if model == "hybrid":
        if config.architecture == KIMI_ARCHITECTURE:
            spec = "kimi_linear_stack_spec"
        elif "qk_layernorm" in settings:
            spec = "gdn_qk_norm_hybrid_stack_spec"
        else:
            spec = "hybrid_stack_spec"
        # the pattern implies both
        del settings["num_layers"], settings["is_hybrid_model"]
        settings = {"hybrid_layer_pattern": config.hybrid_layer_pattern} | settings
    arguments: dict[str, Any] = {"spec": ("megatron_gdn.specs", spec)}
    # the low ranks of the 'K' layers' gates, under the names of the config's fields
    for option, value in config.kda_options.items():
        settings[CONFIG_FIELD_OF_LOW_RANK[option]] = value
    for name, value in settings.items():
        if value is None:  # Megatron's default
            continue
        if isinstance(value, list):  # Megatron evaluates the text as Python
            value = f"([{','.join(map(str, value))}])"
        if name == "num_moe_experts":
            name = "num_experts"
        arguments[name] = value
    if "num_query_groups" in settings:
        arguments["group_query_attention"] = True
    arguments |= {
        activation: True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "position_embedding_type": "none",
    }
    if config.rotary_fraction:
        arguments["position_embedding_type"] = "rope"
        arguments["rotary_percent"] = config.rotary_fraction
        if config.rope_theta != int(config.rope_theta):
            raise ValueError(
                f"rope_theta={config.rope_theta}: Megatron's --rotary-base is a whole "
                "number. Only a model with a whole rope_theta can be launched or "
                "imported."
            )
        arguments["rotary_base"] = int(config.rope_theta)
    if not config.tied:
        arguments["untie_embeddings_and_output_weights"] = True
    return arguments

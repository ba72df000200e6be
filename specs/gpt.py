"""GPT blocks that mix Gated DeltaNet and full attention by
``config.linear_attention_freq``."""

import functools
import inspect
from typing import Any, cast

from megatron.core.models.gpt import (
    experimental_attention_variant_module_specs as variants,
)
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.ssm import gated_delta_net as upstream
from megatron.core.transformer import transformer_block
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.pipeline_parallel_layer_layout import (
    PipelineParallelLayerLayout,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.mixers.base import RecurrentMixer
from megatron_gdn.mixers.loader_layout import AUTO

from .layer import (
    BIAS_DROPOUT_ADD,
    gated_delta_net2_spec,
    gated_delta_net_spec,
    local_attention_spec,
    local_mlp_builder,
    norms_before,
    resolve_modules,
    with_launch_options,
)

# Gated DeltaNet's names in experimental_attention_variant: in Megatron 0.19 and in
# later versions.
GDN_VARIANTS = ("gated_delta_net", "gdn")
_SPEC_OF_VARIANT = {
    **dict.fromkeys(GDN_VARIANTS, gated_delta_net_spec),
    "gdn2": gated_delta_net2_spec,
}


_get_block_submodules = transformer_block._get_block_submodules


# ``--spec`` names a function that makes a spec. Megatron's ``pretrain_gpt.py`` calls it
# on core_r0.19.0 and main. On dev the script passes the function itself to the model,
# which raises an error ("specialize for function"). So `_submodules_of` replaces the
# model's ``_get_block_submodules``: it makes the spec, then calls Megatron's original.
@functools.wraps(_get_block_submodules)
def _submodules_of(
    config: TransformerConfig, spec: Any, *stage: int | None, **named: Any
) -> Any:
    """Megatron's ``_get_block_submodules``, but ``spec`` may be a function that makes a
    spec.

    ``stage`` and ``named`` are Megatron's arguments ``vp_stage`` and ``pp_rank``.
    """
    if callable(spec) and not isinstance(spec, ModuleSpec | TransformerBlockSubmodules):
        parameters = inspect.signature(spec).parameters
        given = dict(zip(("vp_stage", "pp_rank"), stage, strict=False)) | named
        taken = {name: x for name, x in given.items() if name in parameters}
        spec = spec(config, **taken)
    return _get_block_submodules(config, spec, *stage, **named)


# Replaced at import, since no code of ours runs between this import and the model's
# constructor.
transformer_block._get_block_submodules = _submodules_of


def gpt_block_spec(
    config: Any, vp_stage: int | None = None, pp_rank: int | None = None, **options: Any
) -> TransformerBlockSubmodules:
    """The specs of the Gated DeltaNet and attention layers on one pipeline stage.

    ``config.linear_attention_freq = N`` makes every N-th layer full attention; a list
    of 0 and 1 marks the Gated DeltaNet layers with 1. MLPs are dense or MoE by
    ``config.moe_layer_freq``. ``config.transformer_impl`` chooses the modules:
    ``"transformer_engine"`` or ``"local"``.

    Args:
        config: a ``TransformerConfig``, or the ``GPTModelConfig`` that
            ``--spec megatron_gdn.specs gpt_block_spec`` passes.
        vp_stage, pp_rank: the virtual stage and the pipeline rank; None: those of this
            process.
        **options: keyword arguments of the constructor of GatedDeltaNet, or of
            GatedDeltaNet2 for the variant "gdn2".

    Raises:
        ValueError: the config does not ask for Gated DeltaNet layers.
        ImportError: ``"transformer_engine"`` without Transformer Engine.
    """
    config = getattr(config, "transformer", config)
    if config.experimental_attention_variant not in _SPEC_OF_VARIANT:
        raise ValueError(
            "gpt_block_spec builds Gated DeltaNet layers, but "
            "experimental_attention_variant is "
            f"{config.experimental_attention_variant!r}; set it to 'gated_delta_net' "
            "(in newer Megatrons 'gdn', or 'gdn2' for Gated DeltaNet-2) and choose "
            "linear_attention_freq (an interval, or a list of 0 and 1 per layer)."
        )
    # the mixer's class, which is the same in "te"; "local" needs no Transformer Engine
    mixer = cast(type[RecurrentMixer], _mixer_spec(config, "local").module)
    options = with_launch_options(mixer, options)
    if config.transformer_impl == "local":
        layer_specs = _local_layer_specs(config, options)
        final_norm = TorchRMSNorm
    else:
        resolve_modules("te")
        layer_specs, final_norm = _te_layer_specs(config, options)
    indices = _layers_of_stage(config, vp_stage, pp_rank)
    return TransformerBlockSubmodules(
        layer_specs=[layer_specs[index] for index in indices], layer_norm=final_norm
    )


def _mixer_spec(config: Any, modules: str, **options: Any) -> ModuleSpec:
    """The spec of the mixer that ``config.experimental_attention_variant`` names."""
    return _SPEC_OF_VARIANT[config.experimental_attention_variant](modules, **options)


def _te_layer_specs(config: TransformerConfig, options: dict[str, Any]):
    """Megatron's specs of the model's layers, in which our mixer replaces Megatron's,
    and Megatron's final norm. ``options`` are those of our mixer."""
    layer_specs = (
        variants.get_transformer_layer_with_experimental_attention_variant_spec(config)
    )
    mixer = _mixer_spec(config, "te", **options)
    upstream_mixers = upstream.GatedDeltaNet, getattr(upstream, "GatedDeltaNet2", None)
    for layer in layer_specs:
        submodules = cast(Any, layer.submodules)
        if submodules.self_attention.module in upstream_mixers:
            submodules.self_attention = mixer
    provider = variants._get_backend_spec_provider(config)
    rms_norm = config.normalization == "RMSNorm"
    return layer_specs, provider.layer_norm(rms_norm=rms_norm, for_qk=False)


def _local_layer_specs(
    config: TransformerConfig, options: dict[str, Any]
) -> list[ModuleSpec]:
    """For each layer of the model a spec of plain-torch modules; ``options`` are those
    of the mixer."""
    cp_layout = options.get("cp_layout", AUTO)
    attention = local_attention_spec(config.qk_layernorm, cp_layout)
    mixer = _mixer_spec(config, "local", **options)
    layer_specs = []
    for is_gdn, has_experts in layer_kinds(config):
        if is_gdn:
            self_attention = mixer
            linears = {"input_layernorm": "self_attention.in_proj"}
        else:
            self_attention = attention
            linears = {"input_layernorm": "self_attention.linear_qkv"}
        # A norm before experts is a module of its own in Transformer Engine's layers
        # too, so its checkpoint keys need no change.
        norms: dict[str, Any] = {"pre_mlp_layernorm": TorchRMSNorm}
        if has_experts:
            mlp = get_moe_module_spec(
                use_te=False, num_experts=config.num_moe_experts, moe_grouped_gemm=False
            )
        else:
            mlp = local_mlp_builder()
            linears["pre_mlp_layernorm"] = "mlp.linear_fc1"
        norms = norms | norms_before(**linears)
        submodules = TransformerLayerSubmodules(
            self_attention=self_attention,
            self_attn_bda=BIAS_DROPOUT_ADD,
            mlp=mlp,
            mlp_bda=BIAS_DROPOUT_ADD,
            **norms,
        )
        layer_specs.append(ModuleSpec(module=TransformerLayer, submodules=submodules))
    return layer_specs


def layer_kinds(config: Any) -> list[tuple[int, int]]:
    """Two flags for each layer, 1 or 0: whether it is a Gated DeltaNet, and whether it
    has experts."""
    dense = [0] * config.num_layers
    variant = config.experimental_attention_variant
    if variant is None:
        is_gdn = dense
    else:
        is_gdn = variants.get_linear_attention_pattern(config)
    if config.num_moe_experts:
        is_moe = variants.get_moe_layer_pattern(config)
    else:
        is_moe = dense
    return list(zip(is_gdn, is_moe, strict=True))


def _layers_of_stage(
    config: TransformerConfig, vp_stage: int | None, pp_rank: int | None
):
    """The indices, in the whole model, of the layers on one pipeline stage; None: the
    stage of this process."""
    stage = {"vp_stage": vp_stage, "pp_rank": pp_rank}
    layout = cast(
        PipelineParallelLayerLayout | None, config.pipeline_model_parallel_layout
    )
    if layout is not None:
        return layout.get_layer_id_list(layer_type=LayerType.decoder, **stage)
    first = get_transformer_layer_offset(config, **stage)
    return range(first, first + get_num_layers_to_build(config, **stage))

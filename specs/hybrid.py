"""Hybrid stacks with our mixers: 'G' Gated DeltaNet, 'K' Kimi Delta Attention, 'M' Mamba2, ...

    HybridModel(config, hybrid_stack_spec("local"), hybrid_layer_pattern="G-G-G-*-", ...)
    --spec megatron_gdn.specs hybrid_stack_spec --hybrid-layer-pattern "G-G-G-*-"

A 'G' is a Gated DeltaNet-2 if ``config.experimental_attention_variant`` is "gdn2".
"""

from dataclasses import fields, replace
from functools import partial
from typing import Any, cast

from megatron.core.extensions import transformer_engine as te
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.gdn2.layer import GatedDeltaNet2
from megatron_gdn.mixers.attention import TorchSelfAttention, beside_torch_attention
from megatron_gdn.mixers.loader_layout import AUTO

from .layer import (
    BIAS_DROPOUT_ADD,
    LocalMoELayer,
    UnavailableLayer,
    flex_by_option,
    gated_delta_net2_spec,
    gated_delta_net_spec,
    kda_launch_options,
    kimi_delta_attention_spec,
    local_attention_spec,
    local_mlp_builder,
    mamba2_spec,
    norms_before,
    resolve_modules,
    with_launch_options,
)
from .stack import GDN2, KDA, KDAHybridStack, checked_mtp_spec, know_letter, local_mtp_spec

_OF_BOTH = ("cp_layout", "linear_cp_mode", "cp_ranks_per_machine")
_BACKENDS = {"mamba2": ("fla", "reference"), "kda": ("fla", "cudnn", "reference")}
_SYMBOLS = {"dsa_layer": "D", "mla_layer": "+", "moe_layer": "E"}


class HybridStackSpec(ModuleSpec):
    """Spec of a ``HybridStack`` with the mixers of this package; a call returns another spec."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        """The spec over these modules and with these options.

            spec(modules="auto", *, qk_layernorm=False, attention="auto", mamba=None, kda=None,
                 **options)

        Args:
            modules: ``"te"`` is Megatron's own hybrid stack with the 'G' and 'M' mixers exchanged;
                ``"local"`` is plain torch (GDN, Mamba2, MLP, attention, experts); ``"auto"`` is
                ``"te"`` where Transformer Engine is installed. Checkpoints of the two are
                interchangeable.
            qk_layernorm: norms on query and key in the '*' layers (``config.qk_layernorm``).
            attention: ``"auto"`` is Transformer Engine's attention, or with local modules torch's;
                documents that continue others (`megatron_gdn.pack_tree`) run torch's in both, on a
                GPU ``flex_attention``. ``"flex"`` is ``flex_attention`` for all training batches.
            mamba, kda: keyword arguments of the Mamba2Mixer and KimiDeltaAttention constructors.
            **options: keyword arguments of the GatedDeltaNet constructor, such as ``backend`` (of
                the delta rule), or of GatedDeltaNet2's if the config's variant is "gdn2".
                ``cp_layout`` also goes to 'M', 'K' and local '*' layers. 'M' and 'K' layers also
                get ``linear_cp_mode``, ``cp_ranks_per_machine``, and ``backend`` if they have it;
                ``mamba`` and ``kda`` override all four.

        Returns:
            a HybridStackSpec; a ``HybridStack`` if ``modules`` is a config, which is how Megatron
            calls a spec to build it.

        Raises:
            ValueError, ImportError: as `gated_delta_net_spec`.
        """
        if "config" in options or (args and isinstance(args[0], TransformerConfig)):
            return super().__call__(*args, **options)
        return _hybrid_stack_spec(*args, **options)


def _hybrid_stack_spec(
    modules: str = "auto",
    *,
    qk_layernorm: bool = False,
    attention: str = "auto",
    mamba: dict[str, Any] | None = None,
    kda: dict[str, Any] | None = None,
    **options: Any,
) -> HybridStackSpec:
    of_k, of_gdn2 = kda_launch_options(options), with_launch_options(options, GatedDeltaNet2)
    modules, options = resolve_modules(modules), with_launch_options(options)
    mixer = gated_delta_net_spec(modules, **options)
    mamba2 = mamba2_spec(modules, **_options_of_both(options, "mamba2") | (mamba or {}))
    of_k = _options_of_both(options, "kda") | of_k | (kda or {})
    others = {
        KDA: kimi_delta_attention_spec(modules, **of_k),
        GDN2: gated_delta_net2_spec(modules, **of_gdn2),
    }
    cp_layout = options.get("cp_layout", AUTO)
    if modules == "te":
        beside = {"cp_layout": cp_layout, "flex": flex_by_option(attention)}
        submodules = _te_submodules(mixer, mamba2, qk_layernorm, beside)
        layers = {name: _layer(each) for name, each in others.items()}
        theirs = cast(ModuleSpec, _upstream().mtp_block_spec)
        heads = checked_mtp_spec(theirs, layers=layers, cp_layout=cp_layout)
    else:
        local = local_attention_spec(qk_layernorm, cp_layout, attention)
        submodules = _local_submodules(mixer, mamba2, local)
        layers = {name: _layer(each, "in_proj") for name, each in others.items()}
        heads = local_mtp_spec(layers=layers, cp_layout=cp_layout)
    submodules = replace(submodules, mtp_block_spec=heads)
    return HybridStackSpec(module=KDAHybridStack, params={"layers": layers}, submodules=submodules)


def _upstream() -> HybridStackSubmodules:
    return cast(HybridStackSubmodules, hybrid_layer_specs.hybrid_stack_spec.submodules)


def _options_of_both(options: dict[str, Any], mixer: str) -> dict[str, Any]:
    """Those options of GatedDeltaNet that mean the same in another mixer."""
    shared = {k: v for k, v in options.items() if k in _OF_BOTH}
    if options.get("backend") in _BACKENDS[mixer]:
        shared["backend"] = options["backend"]
    return shared


def _te_submodules(
    mixer: ModuleSpec, mamba2: ModuleSpec, qk_layernorm: bool, beside: dict[str, Any]
) -> HybridStackSubmodules:
    """Megatron's own hybrid stack with our mixers, and torch's attention beside its own."""
    layer = cast(Any, _upstream().attention_layer)
    theirs = layer.submodules.self_attention
    core = partial(beside_torch_attention(theirs.submodules.core_attention), **beside)
    # Megatron's own stack has no place for these norms, even if the config asks for them.
    norms = {"q_layernorm": te.TENorm, "k_layernorm": te.TENorm} if qk_layernorm else {}
    attention = replace(
        theirs,
        module=TorchSelfAttention,
        params={**theirs.params, "cp_layout": beside["cp_layout"]},
        submodules=replace(theirs.submodules, core_attention=core, **norms),
    )
    return replace(
        _upstream(),
        gdn_layer=_layer(mixer),
        mamba_layer=_mamba_layer(mamba2),
        attention_layer=replace(
            layer, submodules=replace(layer.submodules, self_attention=attention)
        ),
    )


def _local_submodules(
    mixer: ModuleSpec, mamba2: ModuleSpec, attention: ModuleSpec
) -> HybridStackSubmodules:
    mlp = TransformerLayerSubmodules(
        mlp=local_mlp_builder(),
        mlp_bda=BIAS_DROPOUT_ADD,
        **norms_before(pre_mlp_layernorm="mlp.linear_fc1"),
    )
    experts = TransformerLayerSubmodules(pre_mlp_layernorm=TorchRMSNorm, mlp_bda=BIAS_DROPOUT_ADD)
    layers = {
        "gdn_layer": _layer(mixer, "in_proj"),
        "mamba_layer": _mamba_layer(mamba2, **norms_before(norm="mixer.in_proj")),
        "attention_layer": _layer(attention, "linear_qkv"),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp),
        "moe_layer": ModuleSpec(module=LocalMoELayer, submodules=experts),
    }
    # Versions of Megatron have different layers. A layer that is left out would do nothing.
    places = {field.name for field in fields(HybridStackSubmodules)}
    for place in sorted(place for place in places - layers.keys() if place.endswith("_layer")):
        symbol = {"symbol": _SYMBOLS.get(place, place)}
        layers[place] = ModuleSpec(module=UnavailableLayer, params=symbol)
    return HybridStackSubmodules(**layers)


def _layer(mixer: ModuleSpec, linear: str | None = None) -> ModuleSpec:
    """A layer of one mixer; ``linear`` is the mixer's, and a given norm stands before it."""
    norm = {} if linear is None else norms_before(input_layernorm=f"self_attention.{linear}")
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=mixer, self_attn_bda=BIAS_DROPOUT_ADD, **norm
        ),
    )


def _mamba_layer(mixer: ModuleSpec, **norm: Any) -> ModuleSpec:
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(mixer=mixer, mamba_bda=BIAS_DROPOUT_ADD, **norm),
    )


know_letter()
# Megatron's `--spec` finds these by name and does not call them.
hybrid_stack_spec = _hybrid_stack_spec("auto")
gdn_hybrid_stack_spec = hybrid_stack_spec
gdn_hybrid_stack_spec_local = _hybrid_stack_spec("local")
# For models with --qk-layernorm, as Qwen3-Next and Qwen3.5 are.
gdn_qk_norm_hybrid_stack_spec = _hybrid_stack_spec("auto", qk_layernorm=True)

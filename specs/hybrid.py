"""Hybrid stacks with our mixers: 'G' Gated DeltaNet, 'K' Kimi Delta Attention, 'M'
Mamba2, or Gated DeltaProduct in ``gdp_stack_spec``.

    HybridModel(config, hybrid_stack_spec("local"), hybrid_layer_pattern="G-G-G-*-", ...)
    --spec megatron_gdn.specs hybrid_stack_spec --hybrid-layer-pattern "G-G-G-*-"

A 'G' is a Gated DeltaNet-2 if ``config.experimental_attention_variant`` is "gdn2".
Patterns of Megatron 0.19 have no letter for Kimi Delta Attention; pull request 6556
adds one. So this file passes 'G' for each 'K' to Megatron, and builds 'K' layers from
their own spec. ``"M*G-/M*/M*"`` is the model ``M*G-`` with two heads of multi-token
prediction, each with layers ``M*``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

from megatron.core.extensions import transformer_engine as te
from megatron.core.models.hybrid import hybrid_layer_specs
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer import multi_token_prediction as mtp
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.context_parallel import SequenceLayout
from megatron_gdn.gdn.layer import GatedDeltaNet
from megatron_gdn.gdn2.layer import GatedDeltaNet2
from megatron_gdn.gdp.layer import GatedDeltaProduct
from megatron_gdn.kda.layer import KimiDeltaAttention
from megatron_gdn.mixers.attention import TorchSelfAttention, class_with_tree_attention
from megatron_gdn.mixers.base import RecurrentMixer
from megatron_gdn.mixers.loader_layout import AUTO, HasCpLayout, LoaderLayout
from megatron_gdn.mixers.packing import TREE_FORMAT

from .layer import (
    BIAS_DROPOUT_ADD,
    LocalMoELayer,
    UnavailableLayer,
    gated_delta_net2_spec,
    gated_delta_net_spec,
    gated_delta_product_spec,
    kimi_delta_attention_spec,
    latent_attention_spec,
    local_attention_spec,
    local_mlp_builder,
    mamba2_spec,
    norms_before,
    resolve_modules,
    with_launch_options,
)

KDA_LETTER = "K"  # the letter of Kimi Delta Attention in layer patterns
GDN2_VARIANT = "gdn2"  # the value of config.experimental_attention_variant
# Options of 'G' layers that mean the same in 'M' and 'K' layers.
_SHARED_OPTIONS = ("cp_layout", "linear_cp_mode", "cp_ranks_per_machine", "backend")
# Legal values of the option ``backend`` in 'M' and 'K' layers.
_MAMBA_BACKENDS = ("fla", "reference")
_KDA_BACKENDS = ("fla", "cudnn", "reference")
# Megatron's fields for layers that the local spec lacks -> their letters.
_LETTER_OF_FIELD = {"dsa_layer": "D", "mla_layer": "+", "moe_layer": "E"}


class HybridStackSpec(ModuleSpec):
    """Spec of a ``HybridStack`` with this package's mixers; call it to get a spec with
    options. ``build_module(spec, config, ...)`` builds the stack, as Megatron does."""

    def __call__(
        self,
        modules: str = "auto",
        *,
        qk_layernorm: bool = False,
        mamba: dict[str, Any] | None = None,
        kda: dict[str, Any] | None = None,
        gdp: dict[str, Any] | None = None,
        mla: dict[str, Any] | None = None,
        **options: Any,
    ) -> HybridStackSpec:
        """A new spec with the given modules and options; the options of this spec are
        not kept.

        Args:
            modules: ``"te"`` is Megatron's hybrid stack with our 'G' and 'M' mixers;
                ``"local"`` is plain torch (GDN, Mamba2, MLP, attention, experts);
                ``"auto"`` is ``"te"`` if Transformer Engine is installed. "te" and
                "local" load each other's checkpoints. Documents that continue others
                (`megatron_gdn.pack_tree`) use torch's attention in '*' layers (on a GPU
                ``flex_attention``), with "te" and with "local".
            qk_layernorm: norms on query and key in the '*' layers
                (``config.qk_layernorm``).
            mamba, kda: keyword arguments of the Mamba2Mixer and KimiDeltaAttention
                constructors.
            gdp: keyword arguments of the GatedDeltaProduct constructor; if given, 'M'
                layers are Gated DeltaProducts, as in Megatron's ``gdp_stack_spec``.
            mla: keyword arguments of the LatentAttention constructor; '+' layers are
                then LatentAttentions, without position embedding. None: "te" has
                Megatron's '+' layers, and "local" has none.
            **options: keyword arguments of the GatedDeltaNet constructor, or of
                GatedDeltaNet2's if the config's variant is "gdn2". 'M' and 'K' layers
                also get ``cp_layout``, ``linear_cp_mode``, ``cp_ranks_per_machine``
                and, if its value is legal there, ``backend``. Values in ``mamba``,
                ``kda`` and ``gdp`` override these. '*' and '+' layers get
                ``cp_layout``.

        Raises:
            ValueError: ``modules`` is unknown. ImportError: "te" without Transformer
                Engine.
        """
        return _hybrid_stack_spec(
            modules,
            qk_layernorm=qk_layernorm,
            mamba=mamba,
            kda=kda,
            gdp=gdp,
            mla=mla,
            **options,
        )


def _hybrid_stack_spec(
    modules: str = "auto",
    *,
    qk_layernorm: bool = False,
    mamba: dict[str, Any] | None = None,
    kda: dict[str, Any] | None = None,
    gdp: dict[str, Any] | None = None,
    mla: dict[str, Any] | None = None,
    **options: Any,
) -> HybridStackSpec:
    """The spec of a hybrid stack with these options, as in
    :meth:`HybridStackSpec.__call__`."""
    modules = resolve_modules(modules)
    gdn_options = with_launch_options(GatedDeltaNet, options)
    shared = {
        name: value for name, value in gdn_options.items() if name in _SHARED_OPTIONS
    }
    mamba_options = _with_legal_backend(shared, _MAMBA_BACKENDS)
    kda_options = _with_legal_backend(shared, _KDA_BACKENDS)
    kda_options |= _own_launch_options(KimiDeltaAttention, options)
    gdn2_options = with_launch_options(GatedDeltaNet2, options)
    gdn = gated_delta_net_spec(modules, **gdn_options)
    if gdp is None:
        mamba_mixer = mamba2_spec(modules, **mamba_options | (mamba or {}))
    else:
        gdp_options = shared | _own_launch_options(GatedDeltaProduct, options) | gdp
        mamba_mixer = gated_delta_product_spec(modules, **gdp_options)
    cp_layout = gdn_options.get("cp_layout", AUTO)
    if modules == "te":
        # the linear after a norm of its own; Transformer Engine fuses the norm into it
        normed_linear = None
        mtp_spec = cast(ModuleSpec, _upstream_submodules().mtp_block_spec)
        submodules = _te_submodules(gdn, mamba_mixer, qk_layernorm, cp_layout)
    else:
        normed_linear = "in_proj"
        mtp_spec = _local_mtp_spec()
        attention = local_attention_spec(qk_layernorm, cp_layout)
        submodules = _local_submodules(gdn, mamba_mixer, attention)
    # Megatrons without the letter '+' (0.18) have no field for a '+' layer.
    if mla is not None and hasattr(submodules, "mla_layer"):
        attention = latent_attention_spec(modules, **{"cp_layout": cp_layout} | mla)
        latent = _layer_after_norm(modules, attention)
        submodules = replace(submodules, mla_layer=latent)
    kda_mixer = kimi_delta_attention_spec(modules, **kda_options | (kda or {}))
    gdn2 = gated_delta_net2_spec(modules, **gdn2_options)
    layers = {
        KDA_LETTER: _layer_after_norm(modules, kda_mixer),
        GDN2_VARIANT: _mixer_layer(gdn2, normed_linear),
    }
    mtp_spec = checked_mtp_spec(mtp_spec, layers=layers, cp_layout=cp_layout)
    submodules = replace(submodules, mtp_block_spec=mtp_spec)
    return HybridStackSpec(
        module=KDAHybridStack, params={"layers": layers}, submodules=submodules
    )


def _with_legal_backend(
    options: Mapping[str, Any], backends: tuple[str, ...]
) -> dict[str, Any]:
    """``options``, without the option ``backend`` if its value is not one of
    ``backends``."""
    kept = dict(options)
    if kept.get("backend") not in backends:
        kept.pop("backend", None)
    return kept


def _own_launch_options(
    mixer: type[RecurrentMixer], options: Mapping[str, Any]
) -> dict[str, Any]:
    """The launch's options of ``mixer``, without the options shared with 'G' layers and
    without those that ``options`` of a call override."""
    overridden = options.keys() | _SHARED_OPTIONS
    launched = with_launch_options(mixer, {}).items()
    return {name: value for name, value in launched if name not in overridden}


def _upstream_submodules() -> HybridStackSubmodules:
    """The submodules of Megatron's own hybrid stack, with Transformer Engine."""
    return cast(HybridStackSubmodules, hybrid_layer_specs.hybrid_stack_spec.submodules)


def _te_submodules(
    gdn: ModuleSpec, mamba_mixer: ModuleSpec, qk_layernorm: bool, cp_layout: str
) -> HybridStackSubmodules:
    """Megatron's hybrid stack with the mixers ``gdn`` for 'G' and ``mamba_mixer`` for
    'M'. The attention is ours, which supports trees and ``cp_layout``."""
    layer = cast(Any, _upstream_submodules().attention_layer)
    upstream_attention = layer.submodules.self_attention
    core_class = class_with_tree_attention(upstream_attention.submodules.core_attention)
    core = partial(core_class, cp_layout=cp_layout)
    # Megatron's own stack has no norms of query and key, even if config.qk_layernorm is
    # set.
    if qk_layernorm:
        norms = {"q_layernorm": te.TENorm, "k_layernorm": te.TENorm}
    else:
        norms = {}
    attention = replace(
        upstream_attention,
        module=TorchSelfAttention,
        params=upstream_attention.params | {"cp_layout": cp_layout},
        submodules=replace(upstream_attention.submodules, core_attention=core, **norms),
    )
    return replace(
        _upstream_submodules(),
        gdn_layer=_mixer_layer(gdn),
        mamba_layer=_mamba_layer(mamba_mixer),
        attention_layer=replace(
            layer, submodules=replace(layer.submodules, self_attention=attention)
        ),
    )


def _local_submodules(
    gdn: ModuleSpec, mamba_mixer: ModuleSpec, attention: ModuleSpec
) -> HybridStackSubmodules:
    """A hybrid stack of plain-torch layers with the mixers ``gdn`` for 'G' and
    ``mamba_mixer`` for 'M'."""
    mlp = TransformerLayerSubmodules(
        mlp=local_mlp_builder(),
        mlp_bda=BIAS_DROPOUT_ADD,
        **norms_before(pre_mlp_layernorm="mlp.linear_fc1"),
    )
    experts = TransformerLayerSubmodules(
        pre_mlp_layernorm=TorchRMSNorm, mlp_bda=BIAS_DROPOUT_ADD
    )
    layers = {
        "gdn_layer": _mixer_layer(gdn, "in_proj"),
        "mamba_layer": _mamba_layer(mamba_mixer, **norms_before(norm="mixer.in_proj")),
        "attention_layer": _mixer_layer(attention, "linear_qkv"),
        "mlp_layer": ModuleSpec(module=MLPLayer, submodules=mlp),
        "moe_layer": ModuleSpec(module=LocalMoELayer, submodules=experts),
    }
    # Megatron's versions have different fields. Without a spec, Megatron would build a
    # layer that returns its input.
    for field in fields(HybridStackSubmodules):
        if field.name.endswith("_layer") and field.name not in layers:
            symbol = {"symbol": _LETTER_OF_FIELD.get(field.name, field.name)}
            layers[field.name] = ModuleSpec(module=UnavailableLayer, params=symbol)
    return HybridStackSubmodules(**layers)


def _mixer_layer(mixer: ModuleSpec, linear: str | None = None) -> ModuleSpec:
    """Spec of a TransformerLayer with ``mixer`` in the place of attention.

    The layer has a norm before the mixer's submodule ``linear``; None: no norm.
    """
    if linear is None:
        norm = {}
    else:
        norm = norms_before(input_layernorm=f"self_attention.{linear}")
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=mixer, self_attn_bda=BIAS_DROPOUT_ADD, **norm
        ),
    )


def _layer_after_norm(modules: str, mixer: ModuleSpec) -> ModuleSpec:
    """Spec of a TransformerLayer with ``mixer`` (Kimi Delta Attention or latent
    attention). The norm before the mixer is a module of the layer, as in Megatron."""
    norm = TorchRMSNorm
    if modules == "te":
        norm = te.TENorm
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=mixer,
            self_attn_bda=BIAS_DROPOUT_ADD,
        ),
    )


def _mamba_layer(mixer: ModuleSpec, **norm: Any) -> ModuleSpec:
    """Spec of a MambaLayer; ``norm``: the arguments for a norm before the mixer, if
    any."""
    return ModuleSpec(
        module=MambaLayer,
        submodules=MambaLayerSubmodules(
            mixer=mixer, mamba_bda=BIAS_DROPOUT_ADD, **norm
        ),
    )


class KDAHybridStack(HybridStack):
    """Megatron's stack with 'K' layers; Megatron's own code gets the letter 'G' for
    each of them.

    ``kda_options`` are the options of 'K' layers in the last stack that this process
    built. :func:`megatron_gdn.models.stack.stack_of_arguments` counts FLOPs. It gets
    only the launch's arguments, so it reads the options here.
    """

    kda_options: ClassVar[dict[str, Any]] = {}

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *,
        layers: Mapping[str, ModuleSpec],
        layer_type_list: list[str],
        pp_layer_offset: int = 0,
        **others: Any,
    ) -> None:
        """Besides Megatron's arguments: ``layers``, the specs of 'K' and "gdn2"
        layers. ``layer_type_list``: the letters of this pipeline stage's layers."""
        KDAHybridStack.kda_options = cast(
            Any, layers[KDA_LETTER].submodules
        ).self_attention.params
        submodules, letters = _with_kda_and_gdn2(
            submodules, layers, config, layer_type_list, pp_layer_offset
        )
        super().__init__(
            config,
            submodules,
            layer_type_list=letters,
            pp_layer_offset=pp_layer_offset,
            **others,
        )


def _with_kda_and_gdn2(
    submodules: HybridStackSubmodules,
    layers: Mapping[str, ModuleSpec],
    config: TransformerConfig,
    letters: Iterable[str],
    layers_before: int,
) -> tuple[HybridStackSubmodules, list[str]]:
    """Return ``submodules`` whose ``gdn_layer`` builds 'G' and 'K' layers, and
    ``letters`` with 'G' for each 'K'.

    ``letters``: one per layer of this stage. ``layers_before``: the number of layers on
    earlier pipeline stages. ``layers``: the specs of 'K' layers and of "gdn2" layers.
    """
    letters = list(letters)
    numbers = {
        n for n, letter in enumerate(letters, layers_before + 1) if letter == KDA_LETTER
    }
    variant = config.experimental_attention_variant
    if variant == GDN2_VARIANT:
        gdn = layers[GDN2_VARIANT]
    else:
        gdn = submodules.gdn_layer
    params = {"gdn": gdn, "kda": layers[KDA_LETTER], "kda_numbers": numbers}
    # For "gdn2" Megatron's main branch sets the attribute submodules.self_attention of
    # the spec, so the spec has submodules that nobody reads.
    unread = SimpleNamespace(self_attention=SimpleNamespace())
    gdn_layer = ModuleSpec(module=_GDNOrKDALayer, params=params, submodules=unread)
    submodules = replace(submodules, gdn_layer=gdn_layer)
    return submodules, ["G" if letter == KDA_LETTER else letter for letter in letters]


class _GDNOrKDALayer:
    """A class whose constructor builds a layer of the spec ``kda`` or of ``gdn``.

    It takes ``kda`` if ``layer_number`` is in ``kda_numbers``; ``submodules`` are not
    read.
    """

    def __new__(
        cls,
        *,
        gdn: Any,
        kda: Any,
        kda_numbers: set[int],
        layer_number: int,
        submodules: Any,
        **others: Any,
    ) -> Any:
        """Build layer ``layer_number``; numbers count from 1 in the whole model, or in
        an MTP head."""
        if layer_number in kda_numbers:
            spec = kda
        else:
            spec = gdn
        return build_module(spec, layer_number=layer_number, **others)


class HybridMTPLayer(HasCpLayout, mtp.MultiTokenPredictionLayer):
    """Megatron's layer of multi-token prediction (MTP) with our mixers; it refuses
    documents whose labels Megatron would shift wrongly.

    For each MTP head Megatron shifts tokens, labels and loss masks by one, document by
    document. It assumes that each document begins at its offset in ``cu_seqlens_q`` and
    is cut in zigzag over context-parallel ranks. In other documents tokens would get
    the labels of other tokens.
    """

    def __init__(
        self,
        config: TransformerConfig,
        submodules: mtp.MultiTokenPredictionLayerSubmodules,
        *,
        pg_collection: ProcessGroupCollection,
        cp_layout: str | SequenceLayout = AUTO,
        layers: Mapping[str, ModuleSpec],
        mtp_layer_pattern: str,
        hybrid_submodules: HybridStackSubmodules,
        **others: Any,
    ) -> None:
        """Besides Megatron's arguments: ``layers``, the specs of 'K' and "gdn2"
        layers. ``mtp_layer_pattern``: the letters of the head's layers;
        ``hybrid_submodules``: the specs of the stack's layers.
        """
        loader_layout = LoaderLayout(cp_layout, config)
        if pg_collection.cp.size() > 1:
            _require_zigzag(loader_layout.of_packed(), pg_collection.cp)
        hybrid_submodules, letters = _with_kda_and_gdn2(
            hybrid_submodules, layers, config, mtp_layer_pattern, 0
        )
        super().__init__(
            config,
            submodules,
            pg_collection=pg_collection,
            mtp_layer_pattern="".join(letters),
            hybrid_submodules=hybrid_submodules,
            **others,
        )
        self.loader_layout = loader_layout

    def forward(
        self,
        *args: Any,
        packed_seq_params: PackedSeqParams | None = None,
        **others: Any,
    ):
        """Megatron's forward; raises an error for documents that Megatron would shift
        wrongly."""
        _require_shiftable(packed_seq_params, self.cp_group)
        if self.cp_group.size() > 1:
            _require_zigzag(self.loader_layout.of(packed_seq_params), self.cp_group)
        return super().forward(*args, packed_seq_params=packed_seq_params, **others)


def _require_zigzag(layout: SequenceLayout, cp_group: Any) -> None:
    """Raise a ValueError unless ``layout`` is zigzag, in which Megatron shifts
    labels."""
    if layout is not SequenceLayout.ZIGZAG:
        raise ValueError(
            "Megatron shifts the labels of multi-token prediction in the zigzag "
            f"layout. With cp_layout={layout.value!r} over {cp_group.size()} ranks "
            "labels would be those of other tokens. Cut every document in zigzag, use "
            "one context-parallel rank, or a layer pattern without '/'."
        )


def _require_shiftable(packed: PackedSeqParams | None, cp_group: Any) -> None:
    """Raise an error if Megatron would shift labels from one packed document to
    another.

    If ``cu_seqlens_q`` and ``cu_seqlens_q_padded`` are two tensors, the host compares
    their values. For tensors on a GPU the host waits.
    """
    if packed is None:
        return
    if packed.qkv_format == TREE_FORMAT:
        raise NotImplementedError(
            f"multi-token prediction with qkv_format={TREE_FORMAT!r}: Megatron shifts labels "
            "inside one document, and a prompt's responses are other documents. Pack "
            "every prompt with its response as one document (qkv_format='thd'), or use "
            "a layer pattern without '/'."
        )
    documents = packed.cu_seqlens_q
    padded = packed.cu_seqlens_q_padded
    offsets_differ = padded is not None and padded is not documents
    if offsets_differ and documents is not None:
        offsets_differ = padded.tolist() != documents.tolist()
    if offsets_differ:
        raise ValueError(
            "multi-token prediction with padded slots: Megatron would shift labels "
            "between the offsets without padding. Make the padding part of its "
            "document, or a document of its own, give only cu_seqlens_q, and mask the "
            "padding's loss."
        )
    if packed.cp_group is None:
        ranks = 1
    else:
        ranks = packed.cp_group.size()
    brings_group = packed.cp_group is not None or packed.local_cp_size is not None
    is_other_group = packed.cp_group is not cp_group
    # two groups of one rank are as good as equal
    if brings_group and is_other_group and (ranks, cp_group.size()) != (1, 1):
        raise NotImplementedError(
            f"multi-token prediction over a context-parallel group of {ranks} ranks "
            "that packed_seq_params brings: Megatron shifts labels over the model's "
            f"group of {cp_group.size()}. Leave cp_group and local_cp_size None, or "
            "use a layer pattern without '/'."
        )


def _local_mtp_spec() -> ModuleSpec:
    """Spec of multi-token prediction in torch, with the checkpoint keys of Transformer
    Engine's modules."""
    submodules = mtp.MultiTokenPredictionLayerSubmodules(
        enorm=TorchRMSNorm,
        hnorm=TorchRMSNorm,
        eh_proj=ColumnParallelLinear,
        mtp_model_layer=cast(Any, None),  # Megatron builds the layer from the pattern
        layer_norm=TorchRMSNorm,
    )
    layer = ModuleSpec(module=mtp.MultiTokenPredictionLayer, submodules=submodules)
    block = mtp.MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
    return ModuleSpec(module=mtp.MultiTokenPredictionBlock, submodules=block)


def checked_mtp_spec(block_spec: ModuleSpec, **options: Any) -> ModuleSpec:
    """``block_spec``, a spec of Megatron's MultiTokenPredictionBlock, with
    :class:`HybridMTPLayer` as its layers; ``options`` are arguments of that class."""
    layers = [
        replace(layer, module=HybridMTPLayer, params=layer.params | options)
        for layer in cast(Any, block_spec.submodules).layer_specs
    ]
    submodules = mtp.MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    return replace(block_spec, submodules=submodules)


# A later Megatron may have the letter 'K' already.
if KDA_LETTER not in Symbols.VALID_LAYERS:
    symbols: Any = Symbols
    symbols.KDA = KDA_LETTER
    symbols.VALID_LAYERS = set(Symbols.VALID_LAYERS) | {KDA_LETTER}
# Megatron's `--spec` finds the next specs by name and does not call them.
hybrid_stack_spec = _hybrid_stack_spec("auto")
gdn_hybrid_stack_spec = hybrid_stack_spec
gdn_hybrid_stack_spec_local = _hybrid_stack_spec("local")
# 'M' layers are Gated DeltaProducts. Megatron finds by this name how to count their
# FLOPs.
gdp_stack_spec = _hybrid_stack_spec("auto", gdp={})
# For models with --qk-layernorm, such as Qwen3-Next and Qwen3.5.
gdn_qk_norm_hybrid_stack_spec = _hybrid_stack_spec("auto", qk_layernorm=True)
# For Kimi Linear. The norms inside its latent attention have an epsilon of their own.
KIMI_LATENT_OPTIONS = {"norm_epsilon": 1e-6}
kimi_linear_stack_spec = _hybrid_stack_spec("auto", mla=KIMI_LATENT_OPTIONS)

"""Megatron ModuleSpecs of our mixers and of plain-torch layers, and the mixer options
that a launch gives in the environment.

``--spec`` takes no options, so a launch sets a variable:

    MEGATRON_GDN_OPTIONS="linear_cp_mode=chunkwise,recompute=light" torchrun ... \
        pretrain_hybrid.py --spec megatron_gdn.specs hybrid_stack_spec ...

An option applies to all 'G' and 'K' layers, and to all 'M' layers of
``gdp_stack_spec``, if their mixer has this option. A value in a Python call overrides
the variable, which must be equal in all processes.
"""

import ast
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from functools import cache, partial
from typing import Any, Literal, NoReturn, cast

from megatron.core.extensions import transformer_engine as te
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayerSubmodules,
)

from megatron_gdn.compat.observe import log_once
from megatron_gdn.compat.torch_linear import DuplicatedLinear
from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.gdn.layer import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron_gdn.gdn2.layer import GatedDeltaNet2
from megatron_gdn.gdp.layer import GatedDeltaProduct, GatedDeltaProductSubmodules
from megatron_gdn.kda.layer import KimiDeltaAttention, KimiDeltaAttentionSubmodules
from megatron_gdn.mamba2.layer import Mamba2Mixer, Mamba2MixerSubmodules
from megatron_gdn.mixers.attention import (
    TorchAttention,
    TorchSelfAttention,
    class_with_tree_attention,
)
from megatron_gdn.mixers.base import RecurrentMixer
from megatron_gdn.mixers.latent_attention import LatentAttention
from megatron_gdn.mixers.loader_layout import AUTO

LEGAL_MODULES = ("auto", "local", "te")
OPTIONS_VARIABLE = "MEGATRON_GDN_OPTIONS"
_MOST_CHARACTERS = 2000  # of MEGATRON_GDN_OPTIONS
# A value for fields of specs that Megatron annotates as a class. Megatron only calls
# the value, so a function is legal.
BIAS_DROPOUT_ADD = cast(type, get_bias_dropout_add)


def resolve_modules(modules: str) -> Literal["te", "local"]:
    """``modules``, where ``"auto"`` becomes "te" if Transformer Engine is installed,
    else "local".

    Raises:
        ValueError: unknown ``modules``.
        ImportError: ``"te"`` without Transformer Engine.
    """
    if modules not in LEGAL_MODULES:
        raise ValueError(
            f"unknown modules {modules!r}; use one of {', '.join(LEGAL_MODULES)}. (The "
            "delta rule is chosen by the keyword backend.)"
        )
    if modules == "auto":
        if te.HAVE_TE:
            return "te"
        return "local"
    if modules == "te" and not te.HAVE_TE:
        raise ImportError(
            'modules="te" needs Transformer Engine, which cannot be imported here. Install '
            '`transformer-engine[pytorch]`, or use modules="local" (plain torch modules).'
        )
    return modules


def gated_delta_net_spec(modules: str = "auto", **options: Any) -> ModuleSpec:
    """Spec of `megatron_gdn.GatedDeltaNet` for the ``self_attention`` place of a
    TransformerLayer.

    Args:
        modules: ``"te"`` fuses the norm before the mixer into ``in_proj``; ``"local"``
            uses Megatron's own linears and leaves the norm to the layer around the
            mixer; ``"auto"`` is ``"te"`` if Transformer Engine is installed.
        **options: keyword arguments of the GatedDeltaNet constructor, such as
            ``backend``.

    Raises:
        ValueError: unknown ``modules``.
        ImportError: ``"te"`` without Transformer Engine.
    """
    return _spec_of_mixer(GatedDeltaNet, GatedDeltaNetSubmodules, modules, options)


def gated_delta_net2_spec(modules: str = "auto", **options: Any) -> ModuleSpec:
    """Spec of `megatron_gdn.GatedDeltaNet2`; ``modules`` is as in
    `gated_delta_net_spec`."""
    return _spec_of_mixer(GatedDeltaNet2, GatedDeltaNetSubmodules, modules, options)


def kimi_delta_attention_spec(modules: str = "auto", **options: Any) -> ModuleSpec:
    """Spec of `megatron_gdn.KimiDeltaAttention`; ``modules`` is as in
    `gated_delta_net_spec`, but no norm is fused: the layer around the mixer has it."""
    # duplicated: every tensor-parallel rank has the whole weight
    if resolve_modules(modules) == "te":
        duplicated, column, row, norm = (
            te.TELinear,
            te.TEColumnParallelLinear,
            te.TERowParallelLinear,
            te.TENorm,
        )
    else:
        duplicated, column, row, norm = (
            DuplicatedLinear,
            ColumnParallelLinear,
            RowParallelLinear,
            TorchRMSNorm,
        )
    submodules = KimiDeltaAttentionSubmodules(
        in_proj=column,
        out_norm=norm,
        out_proj=row,
        beta_proj=duplicated,
        f_proj=column,
        f_a_proj=duplicated,
        f_b_proj=column,
        g_proj=column,
        g_a_proj=duplicated,
        g_b_proj=column,
    )
    return ModuleSpec(
        module=KimiDeltaAttention,
        params=options,
        submodules=submodules,
        # The norm stands before the layer, since all projections read its output.
        metainfo={"fuse_input_layernorm": False},
    )


def mamba2_spec(modules: str = "auto", **options: Any) -> ModuleSpec:
    """Spec of `megatron_gdn.Mamba2Mixer`, with its options, for the ``mixer`` of a
    MambaLayer.

    ``modules`` is as in `gated_delta_net_spec`. With ``"local"`` there is no norm
    before the mixer, so set the MambaLayer's ``norm``.
    """
    return _spec_of_mixer(Mamba2Mixer, Mamba2MixerSubmodules, modules, options)


def gated_delta_product_spec(modules: str = "auto", **options: Any) -> ModuleSpec:
    """Spec of `megatron_gdn.GatedDeltaProduct`, with its options, for the ``mixer`` of
    a MambaLayer; ``modules`` is as in `mamba2_spec`."""
    return _spec_of_mixer(
        GatedDeltaProduct, GatedDeltaProductSubmodules, modules, options
    )


def _spec_of_mixer(
    mixer: type, submodules_class: Any, modules: str, options: dict[str, Any]
) -> ModuleSpec:
    """The spec of ``mixer``; ``submodules_class``, a dataclass, has some of the fields
    in_proj, out_proj and out_norm."""
    fused = resolve_modules(modules) == "te"
    class_of: dict[str, type] = {
        "in_proj": ColumnParallelLinear,
        "out_proj": RowParallelLinear,
        "out_norm": TorchRMSNorm,
    }
    if fused:
        class_of = {
            "in_proj": te.TELayerNormColumnParallelLinear,
            "out_proj": te.TERowParallelLinear,
            "out_norm": te.TENorm,
        }
    names = [field.name for field in fields(submodules_class)]
    return ModuleSpec(
        module=mixer,
        params=options,
        submodules=submodules_class(**{name: class_of[name] for name in names}),
        # Megatron's GPT block spec adds a norm before the mixer if this entry is False.
        metainfo={"fuse_input_layernorm": fused},
    )


def norms_before(**linears: str) -> dict[str, Any]:
    """Arguments of a layer's submodules that give the layer plain-torch norms.

    ``linears`` maps the name of each norm in the layer to the name of the linear after
    the norm. Transformer Engine fuses such a norm into the linear, so the norm's keys
    in a checkpoint begin with the linear's name. The plain-torch norms get these keys.
    """
    keys = {f"{norm}.": f"{linear}.layer_norm_" for norm, linear in linears.items()}
    return {**dict.fromkeys(linears, TorchRMSNorm), "sharded_state_dict_keys_map": keys}


def local_mlp_builder():
    """Return a function that builds a dense MLP of Megatron's own linears; a layer
    calls the function with its config."""
    return partial(
        MLP.as_mlp_submodule,
        submodules=MLPSubmodules(
            linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
        ),
    )


def local_attention_spec(
    qk_layernorm: bool = False, cp_layout: str = AUTO
) -> ModuleSpec:
    """Spec of causal self-attention in torch, for batches, documents and context
    parallelism. ``qk_layernorm``: norms on query and key. ``cp_layout``: the sequence
    layout, by default that of the data loader."""
    if qk_layernorm:
        qk_norm = {"q_layernorm": TorchRMSNorm, "k_layernorm": TorchRMSNorm}
    else:
        qk_norm = {}
    return ModuleSpec(
        module=TorchSelfAttention,
        params={"attn_mask_type": AttnMaskType.causal, "cp_layout": cp_layout},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnParallelLinear,
            core_attention=partial(TorchAttention, cp_layout=cp_layout),
            linear_proj=RowParallelLinear,
            **qk_norm,
        ),
        metainfo={"fuse_input_layernorm": False},
    )


def latent_attention_spec(
    modules: str = "auto", cp_layout: str = AUTO, **options: Any
) -> ModuleSpec:
    """Spec of `LatentAttention`, for '+' layers without position embedding.

    ``modules`` is as in `gated_delta_net_spec`, but no norm is fused. ``cp_layout`` is as
    in `local_attention_spec`. ``options`` are keyword arguments of the constructor, such
    as ``norm_epsilon``.
    """
    if resolve_modules(modules) == "te":
        # Transformer Engine's attention refuses documents that continue others (trees).
        core = class_with_tree_attention(cast(type, te.TEDotProductAttention))
        down, column, row, norm = (
            te.TELinear,
            te.TEColumnParallelLinear,
            te.TERowParallelLinear,
            te.TENorm,
        )
    else:
        core = TorchAttention
        down, column, row, norm = (
            ColumnParallelLinear,
            ColumnParallelLinear,
            RowParallelLinear,
            TorchRMSNorm,
        )
    submodules = MLASelfAttentionSubmodules(
        linear_q_proj=column,
        linear_q_down_proj=down,
        linear_q_up_proj=column,
        q_layernorm=cast(Any, norm),
        linear_kv_down_proj=down,
        linear_kv_up_proj=column,
        kv_layernorm=cast(Any, norm),
        core_attention=ModuleSpec(module=core, params={"cp_layout": cp_layout}),
        linear_proj=cast(Any, row),
    )
    return ModuleSpec(
        module=LatentAttention,
        params={"attn_mask_type": AttnMaskType.causal, **options},
        submodules=submodules,
        metainfo={"fuse_input_layernorm": False},
    )


class LocalMoELayer(MoETransformerLayer):
    """A layer of experts in plain torch. Its constructor chooses the experts' spec,
    since their number is a field of ``config``."""

    def __init__(
        self,
        config: TransformerConfig,
        submodules: TransformerLayerSubmodules,
        **others: Any,
    ) -> None:
        """Megatron's arguments; ``submodules.mlp`` is replaced by the experts' spec."""
        if config.num_moe_experts is None:
            UnavailableLayer(symbol="E")  # raises
        mlp = get_moe_module_spec(use_te=False, num_experts=config.num_moe_experts)
        super().__init__(config, replace(submodules, mlp=mlp), **others)


class UnavailableLayer:
    """Stands in a spec for a layer that the local spec lacks; its constructor
    raises."""

    def __init__(self, *args: Any, symbol: str, **kwargs: Any) -> NoReturn:
        """Raise an error that names ``symbol``, the layer's letter in the pattern."""
        raise NotImplementedError(
            f"the local hybrid spec has no layer for {symbol!r}: it has 'G', 'K', 'M', "
            "'-' (MLP), '*' (attention) and, with num_moe_experts, 'E' (experts). Use "
            'hybrid_stack_spec("te"), which needs Transformer Engine, or change '
            "--hybrid-layer-pattern."
        )


def with_launch_options(
    mixer: type[RecurrentMixer], named: Mapping[str, Any]
) -> dict[str, Any]:
    """The options of ``mixer`` in the environment, overridden by ``named``, the options
    of a call."""
    legal = launch_options_of(mixer)
    from_environment = {
        name: value for name, value in _launch_options().items() if name in legal
    }
    return from_environment | dict(named)


@cache
def _launch_options() -> dict[str, Any]:
    """The options in the environment, parsed and logged once."""
    options = parse_options(os.environ.get(OPTIONS_VARIABLE, ""))
    if options:
        said = ", ".join(f"{name}={value!r}" for name, value in options.items())
        log_once(
            f"{OPTIONS_VARIABLE}: layers are built with {said}, each with the options "
            "that it has"
        )
    return options


def parse_options(text: str) -> dict[str, Any]:
    """The options in ``"name=value,name=value"``; a value is a Python literal, or else
    a word.

    Raises:
        ValueError: a part is no ``name=value``, no mixer has the option ``name``, or
            the text has too many characters.
    """
    mixers = KimiDeltaAttention, GatedDeltaNet, GatedDeltaProduct
    legal = frozenset[str]().union(*map(launch_options_of, mixers))
    if len(text) > _MOST_CHARACTERS:
        raise ValueError(
            f"{OPTIONS_VARIABLE} has {len(text)} characters, and at most "
            f"{_MOST_CHARACTERS} are legal."
        )
    options = {}
    # A comma splits only before the next "name=", so a value may be a tuple.
    for part in filter(None, re.split(r"[,\s]+(?=\w+\s*=)|^\s+|[,\s]+$", text)):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals or name not in legal:
            raise ValueError(
                f"{OPTIONS_VARIABLE}={text[:200]!r} has {part[:80]!r}; it must be "
                f"name=value,name=value with the names {', '.join(sorted(legal))}."
            )
        options[name] = value
        # A value that is no literal stays a word. For such a value Python raises one of
        # these errors.
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            options[name] = ast.literal_eval(value)
        if value.lower() in ("true", "false") and not isinstance(options[name], bool):
            raise ValueError(
                f"{OPTIONS_VARIABLE} has {name}={value[:80]!r}; it must be True or "
                "False."
            )
    return options


def launch_options_of(mixer: type[RecurrentMixer]) -> frozenset[str]:
    """The names of the options that ``OPTIONS_VARIABLE`` may set for this mixer."""
    return mixer.options_class.names() | set(mixer.launch_arguments)

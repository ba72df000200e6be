"""Describes transformers' linear-attention modules, so that mixers of this package can
run them.

Modules are found by the names of their classes, so transformers is not imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial, update_wrapper
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...gdn.front import gdn_table
from ...gdn.hf import PROJECTIONS, ba_rows, qkvz_rows
from ...gdn.rule import resolve_rule
from ...gdn.sizes import GDNDims
from ...kda.front import kda_table
from ...kda.rule import choose_kda
from ...kda.sizes import KDADims
from ...mixers.micro_batch import ChooseRule
from ...ops.delta_rule.sizes import LINEAR_SIZES
from ...ops.stages import MakeFront, front_maker
from ..config_fields import check_config
from .sources import CACHE_NAMES

# A linear-attention module of transformers, whose attributes depend on its family.
LinearAttention = Any


class DropInMixer(NamedTuple):
    """The sizes, rule and front with which this package runs one linear-attention module
    of transformers."""

    dims: Any  # the mixer's sizes, such as GDNDims
    choose_rule: ChooseRule
    make_front: MakeFront
    # keywords ``mixer`` and ``recurrence`` of MicroBatchPlanner, for the log
    names_in_log: dict[str, str]


def _gdn_mixer(module: LinearAttention, config: Any, options: Any) -> DropInMixer:
    """The mixer for ``module``, a Gated DeltaNet of transformers.

    ``config``: the model's text config; ``options``: `DropInOptions`.
    """
    dims = GDNDims.from_config(config)
    choose_rule = partial(
        resolve_rule, options.backend, sizes=dims.heads, operands=options.rule_operands
    )
    make_front = front_maker(
        gdn_table,
        allow_neg_eigval=getattr(module, "allow_neg_eigval", False),
        recompute_qkv=options.recompute_qkv,
    )
    return DropInMixer(dims, choose_rule, make_front, names_in_log={})


def _kda_mixer(module: LinearAttention, config: Any, options: Any) -> DropInMixer:
    """The mixer for ``module``, a Kimi Delta Attention of transformers; arguments as in
    `_gdn_mixer`."""
    if options.rule_operands != "fp16" or options.recompute_qkv:
        raise ValueError(
            f"rule_operands={options.rule_operands!r}, "
            f"recompute_qkv={options.recompute_qkv}: Kimi Delta Attention has neither "
            "option. Leave both out."
        )
    heads = config.linear_num_heads
    head_dim = config.linear_head_dim
    # Both gates have rank 0, which means full width: `project_rows` multiplies the two
    # matrices of a low-rank gate.
    dims = KDADims(
        hidden_size=config.hidden_size,
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=head_dim,
        value_head_dim=head_dim,
        conv_kernel_dim=config.linear_conv_kernel_dim,
        forget_rank=0,
        output_rank=0,
    )
    forget_gate = module.forget_gate
    # the lower bound of the log-decay; only GLM 5 next and Bailing Hybrid have one
    lower_bound = getattr(forget_gate, "safe_gate_lower_bound", None)
    if getattr(forget_gate, "safe_gate", False):
        lower_bound = forget_gate.lower_bound
    choose_rule = partial(choose_kda, options.backend, dims.state_shape, lower_bound)
    make_front = front_maker(kda_table, lower_bound=lower_bound)
    names = {"mixer": "KimiDeltaAttention", "recurrence": "KDA"}
    return DropInMixer(dims, choose_rule, make_front, names)


_GDN_CONFIG_FIELDS = (
    "hidden_size",
    "rms_norm_eps",
    *(f"linear_{name}" for name in LINEAR_SIZES),
)
_KDA_CONFIG_FIELDS = (
    "hidden_size",
    "rms_norm_eps",
    "linear_num_heads",
    "linear_head_dim",
    "linear_conv_kernel_dim",
)


class ModelFamily(NamedTuple):
    """The linear attention of one family of models in transformers, and the names of
    its submodules.

    ``projections`` names the submodules whose concatenated outputs are the projection
    rows of this package's mixer, section by section. "a > b" means that submodule b is
    called on the output of submodule a. If ``projections`` is empty, the module has
    Qwen3-Next's two projections:

        in_proj_qkvz: per key head [q | k | v of its value heads | z of its value heads]
        in_proj_ba:   per key head [b of its value heads | a of its value heads]
    """

    # package in transformers.models: the config's model_type without "_text"
    package: str
    projections: tuple[str, ...] = ()
    norm: str = "norm"  # the gated norm after the rule
    out_proj: str = "out_proj"
    gate_owner: str = ""  # submodule with A_log and dt_bias; "": the module itself
    # (module, config, options) -> the mixer
    make_mixer: Callable[..., DropInMixer] = _gdn_mixer
    # the config's fields that the layer reads
    config_fields: tuple[str, ...] = _GDN_CONFIG_FIELDS


_FLAT_PROJECTIONS = tuple(PROJECTIONS["flat"])
_SEPARATE_PROJECTIONS = tuple(PROJECTIONS["separate"])
# the fields of each `ModelFamily` with Kimi Delta Attention
_KDA_FAMILY_FIELDS: dict[str, Any] = {
    "norm": "o_norm",
    "out_proj": "o_proj",
    "gate_owner": "forget_gate",
    "make_mixer": _kda_mixer,
    "config_fields": _KDA_CONFIG_FIELDS,
}
_LOW_RANK_PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "forget_gate.f_a_proj > forget_gate.f_b_proj",
    "g_a_proj > g_b_proj",
    "b_proj",
)
_FULL_RANK_PROJECTIONS = (
    "q_proj",
    "k_proj",
    "v_proj",
    "forget_gate.f_proj",
    "g_proj",
    "b_proj",
)

FAMILIES = {  # keys are names of transformers' classes
    "Qwen3NextGatedDeltaNet": ModelFamily("qwen3_next"),
    "Qwen3_5GatedDeltaNet": ModelFamily("qwen3_5", _FLAT_PROJECTIONS),
    "Qwen3_5MoeGatedDeltaNet": ModelFamily("qwen3_5_moe", _FLAT_PROJECTIONS),
    "Qwen4ExpTextGatedDeltaNet": ModelFamily("qwen4_exp", _FLAT_PROJECTIONS),
    "OlmoHybridGatedDeltaNet": ModelFamily(
        "olmo_hybrid", _SEPARATE_PROJECTIONS, norm="o_norm", out_proj="o_proj"
    ),
    "KimiLinearDeltaAttention": ModelFamily(
        "kimi_linear", _LOW_RANK_PROJECTIONS, **_KDA_FAMILY_FIELDS
    ),
    "Glm5NextTextLinearAttention": ModelFamily(
        "glm5_next", _LOW_RANK_PROJECTIONS, **_KDA_FAMILY_FIELDS
    ),
    "BailingHybridDeltaAttention": ModelFamily(
        "bailing_hybrid", _FULL_RANK_PROJECTIONS, **_KDA_FAMILY_FIELDS
    ),
}
LEGAL_PACKAGES = ", ".join(repr(family.package) for family in FAMILIES.values())


def transformers_class(module: nn.Module) -> type | None:
    """The linear-attention class of transformers of which ``module`` is an instance;
    None for other modules."""
    return transformers_base(type(module))


def transformers_base(cls: type) -> type | None:
    """The linear-attention class of transformers that ``cls`` is or inherits from; None
    for other classes."""
    for base in cls.__mro__:
        if base.__name__ in FAMILIES and base.__module__.startswith("transformers."):
            return base
    return None


def family_of(module: nn.Module) -> ModelFamily:
    """The :class:`ModelFamily` of ``module``, a linear attention of transformers."""
    cls = transformers_class(module)
    assert cls is not None
    return FAMILIES[cls.__name__]


def linear_attentions(module: nn.Module) -> Iterator[LinearAttention]:
    """Yield all linear-attention modules of transformers in ``module``, patched or
    not."""
    return (
        found for found in module.modules() if transformers_class(found) is not None
    )


def class_for_config(config: object) -> type:
    """The linear-attention class of transformers for the text config ``config``; a
    ValueError if the family is unknown or a field is illegal."""
    model_type = str(getattr(config, "model_type", ""))
    for class_name, family in FAMILIES.items():
        package = family.package
        if package == model_type.removesuffix("_text"):
            check_config(config, family.config_fields)
            modeling = f"transformers.models.{package}.modeling_{package}"
            return getattr(import_module(modeling), class_name)
    raise ValueError(
        f"a config with model_type={model_type!r} has no linear attention that is known "
        f"here; legal are {LEGAL_PACKAGES}."
    )


@cache
def class_with_mixin(prefix: str, mixin: type, cls: type) -> type[Any]:
    """The class with the bases ``mixin`` and ``cls``; its name is ``prefix`` + the name
    of ``cls``.

    The same arguments give the same class object, so two patched modules of one class
    still have one class.
    """
    return type(f"{prefix}{cls.__name__}", (mixin, cls), {"__doc__": cls.__doc__})


@cache
def cache_parameter(function: Callable) -> str:
    """The name of the argument in which transformers' ``function`` takes the cache; it
    depends on transformers' version (:func:`.sources.find_cache`)."""
    known = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[-1])


def project_rows(module: LinearAttention, x_BSH: Tensor, dims: Any) -> Tensor:
    """The projection rows ``[B, S, P]``, with the sections of ``dims.layout``.

    ``x_BSH`` are the hidden states ``[B, S, H]``; H is here the hidden size.
    """
    sections = []
    projections = family_of(module).projections
    if projections:
        for names in projections:
            section = x_BSH
            for name in names.split(" > "):
                section = module.get_submodule(name)(section)
            sections.append(section)
    else:
        widths_of = {"in_proj_qkvz": qkvz_rows(dims), "in_proj_ba": ba_rows(dims)}
        for name, widths in widths_of.items():
            projected = module.get_submodule(name)(x_BSH)
            # [B, S, key heads, widths of one key head]
            by_head = projected.unflatten(-1, (dims.num_key_heads, -1))
            for section in by_head.split(widths, -1):
                sections.append(section.flatten(-2))
    return torch.cat(sections, dim=-1)


def refuse_unsupported_modules(config: Any, feature: str) -> None:
    """Raise a NotImplementedError if a module of the model does not support ``feature``,
    "packed documents" or "context parallelism". Linear attention supports both.
    ``config``: the model's text config."""
    indexed = "indexed_attention" in config.layer_types
    reason = ""
    if getattr(config, "ple_layer_ids", None):
        reason = (
            f"per-layer embeddings (ple_layer_ids={config.ple_layer_ids}), whose "
            "n-grams and convolution run over the whole row that a rank is given, "
            "across documents"
        )
    elif indexed and feature != "packed documents":
        reason = (
            "indexed attention: its indexer ranks the keys of the tokens that a rank "
            "holds, not those of the sequence"
        )
    elif indexed and config.model_type.startswith("glm5_next"):
        reason = "GLM 5's indexed attention, which takes a mask of padding only"
    if reason:
        raise NotImplementedError(
            f"{feature} in a model with {reason}. Give one document per row, on one rank; "
            f"a layer of its own (CPAwareGatedDeltaNet) takes {feature}."
        )


# Functions in transformers' modeling files that may be kernels of another package.
_KERNEL_FUNCTION_NAMES = (
    "causal_conv1d_fn",
    "causal_conv1d_update",
    "torch_chunk_gated_delta_rule",
    "torch_recurrent_gated_delta_rule",
    "chunk_kimi_delta_attention",
    "recurrent_kimi_delta_attention",
)


def plain_functions_on_cpu(model: nn.Module) -> None:
    """Let transformers' own linear attention run on CPU tensors, whatever packages are
    installed.

    Without this call CPU tensors fail with ``0 active drivers ([])`` if
    flash-linear-attention is installed; :func:`.patching.patch` calls this function too.
    The call replaces functions in transformers' modeling files in this process. Tensors
    on other devices run the same functions as before. Functions that the package
    ``kernels`` has replaced by modules stay unless ``USE_HUB_KERNELS=NO`` is set.
    """
    for module in model.modules():
        cls = transformers_class(module)
        if cls is None:
            continue
        modeling = sys.modules[cls.__module__]
        for name in _KERNEL_FUNCTION_NAMES:
            chosen = getattr(modeling, name, None)
            # A chosen kernel wraps transformers' function in plain torch. A partial was
            # set by an earlier call; it is no function, so it stays.
            if inspect.isfunction(chosen) and hasattr(chosen, "__wrapped__"):
                plain = inspect.unwrap(chosen)
                plain_arguments = frozenset(inspect.signature(plain).parameters)
                call_by_device = partial(
                    _call_by_device, chosen, plain, plain_arguments
                )
                setattr(modeling, name, update_wrapper(call_by_device, chosen))


def _call_by_device(
    chosen: Callable,
    plain: Callable,
    plain_arguments: frozenset[str],
    x: Tensor,
    *args: object,
    **kwargs: object,
) -> object:
    """Call ``plain``, transformers' function in plain torch, if ``x`` is on the CPU, else
    ``chosen``, the function that transformers chose.

    ``plain`` gets only those of the ``kwargs`` that are in ``plain_arguments``.
    """
    # ``plain`` would ignore boundaries of documents; ``chosen`` refuses them on a CPU.
    packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
    if packed or x.device.type != "cpu":
        return chosen(x, *args, **kwargs)
    known = {name: kwargs[name] for name in kwargs if name in plain_arguments}
    return plain(x, *args, **known)

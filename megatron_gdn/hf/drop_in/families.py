"""Describe transformers' linear-attention modules as mixers of this package.

Modules are found by the names of their classes, so transformers is not imported.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, partial, update_wrapper
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
from ...ops.stages import MakeFront, fronts_of
from ..config_fields import check_config
from .sources import CACHE_NAMES

# A linear-attention module of transformers, whose attributes depend on its family.
LinearAttention = Any


class Mixer(NamedTuple):
    """This package's mixer for one linear-attention module of transformers."""

    dims: Any
    rule: ChooseRule
    front: MakeFront
    # ``mixer`` and ``recurrence`` of MicroBatches, for error messages
    names: dict[str, str]


def _gdn_mixer(module: LinearAttention, config: Any, options: Any) -> Mixer:
    """The `Mixer` of a module of transformers that computes Gated DeltaNet."""
    dims = GDNDims.from_config(config)
    rule = partial(
        resolve_rule, options.backend, sizes=dims.heads, operands=options.rule_operands
    )
    negative = getattr(module, "allow_neg_eigval", False)
    settings = {"allow_neg_eigval": negative, "recompute_qkv": options.recompute_qkv}
    return Mixer(dims, rule, fronts_of(gdn_table, **settings), {})


def _kda_mixer(module: LinearAttention, config: Any, options: Any) -> Mixer:
    """The `Mixer` of a module of transformers that computes Kimi Delta Attention."""
    if options.rule_operands != "fp16" or options.recompute_qkv:
        raise ValueError(
            f"rule_operands={options.rule_operands!r}, "
            f"recompute_qkv={options.recompute_qkv}: Kimi Delta Attention has neither "
            "option. Leave both out."
        )
    heads = config.linear_num_heads
    width = config.linear_head_dim
    gate = module.forget_gate
    # The rows hold both gates in full width, because `project` applies both low-rank
    # factors.
    dims = KDADims(
        hidden_size=config.hidden_size,
        num_key_heads=heads,
        num_value_heads=heads,
        key_head_dim=width,
        value_head_dim=width,
        conv_kernel_dim=config.linear_conv_kernel_dim,
        forget_rank=0,
        output_rank=0,
    )
    bound = getattr(gate, "safe_gate_lower_bound", None)  # None, except in GLM 5 next
    if getattr(gate, "safe_gate", False):  # Bailing Hybrid
        bound = gate.lower_bound
    rule = partial(choose_kda, options.backend, dims.state, bound)
    names = {"mixer": "KimiDeltaAttention", "recurrence": "KDA"}
    return Mixer(dims, rule, fronts_of(kda_table, lower_bound=bound), names)


_GDN_FIELDS = (
    "hidden_size",
    "rms_norm_eps",
    *(f"linear_{name}" for name in LINEAR_SIZES),
)
_KDA_FIELDS = (
    "hidden_size",
    "rms_norm_eps",
    "linear_num_heads",
    "linear_head_dim",
    "linear_conv_kernel_dim",
)


class Family(NamedTuple):
    """A family of models in transformers, with the names of its linear attention's
    submodules.

    The concatenated outputs of ``projections`` are the mixer's rows; "a > b" calls
    module b on the output of a. If ``projections`` is empty, the module has
    Qwen3-Next's two projections:

        in_proj_qkvz: per key head [q | k | v of its value heads | z of its value heads]
        in_proj_ba:   per key head [b of its value heads | a of its value heads]
    """

    # package in transformers.models: the config's model_type without "_text"
    package: str
    projections: tuple[str, ...] = ()
    norm: str = "norm"
    out: str = "out_proj"
    gate: str = ""  # submodule with A_log and dt_bias; empty: the module itself
    # called with module, config, options
    mixer: Callable[..., Mixer] = _gdn_mixer
    fields: tuple[str, ...] = _GDN_FIELDS  # fields of the config that the layer reads


_FLAT = tuple(PROJECTIONS["flat"])
_SEPARATE = tuple(PROJECTIONS["separate"])
_KDA: dict[str, Any] = {
    "norm": "o_norm",
    "out": "o_proj",
    "gate": "forget_gate",
    "mixer": _kda_mixer,
    "fields": _KDA_FIELDS,
}
_LOW_RANK = (
    "q_proj",
    "k_proj",
    "v_proj",
    "forget_gate.f_a_proj > forget_gate.f_b_proj",
    "g_a_proj > g_b_proj",
    "b_proj",
)
_FULL_RANK = ("q_proj", "k_proj", "v_proj", "forget_gate.f_proj", "g_proj", "b_proj")

FAMILIES = {  # keys are names of transformers' classes
    "Qwen3NextGatedDeltaNet": Family("qwen3_next"),
    "Qwen3_5GatedDeltaNet": Family("qwen3_5", _FLAT),
    "Qwen3_5MoeGatedDeltaNet": Family("qwen3_5_moe", _FLAT),
    "Qwen4ExpTextGatedDeltaNet": Family("qwen4_exp", _FLAT),
    "OlmoHybridGatedDeltaNet": Family(
        "olmo_hybrid", _SEPARATE, norm="o_norm", out="o_proj"
    ),
    "KimiLinearDeltaAttention": Family("kimi_linear", _LOW_RANK, **_KDA),
    "Glm5NextTextLinearAttention": Family("glm5_next", _LOW_RANK, **_KDA),
    "BailingHybridDeltaAttention": Family("bailing_hybrid", _FULL_RANK, **_KDA),
}
LEGAL = ", ".join(repr(family.package) for family in FAMILIES.values())


def transformers_class(module: nn.Module) -> type | None:
    """The linear-attention class of transformers that ``module`` is an instance of, or
    None."""
    for cls in type(module).__mro__:
        if cls.__name__ in FAMILIES and cls.__module__.startswith("transformers."):
            return cls
    return None


def family_of(module: nn.Module) -> Family:
    """The :class:`Family` of ``module``, a linear attention of transformers."""
    cls = transformers_class(module)
    assert cls is not None
    return FAMILIES[cls.__name__]


def linear_attentions(module: nn.Module) -> Iterator[LinearAttention]:
    """All linear-attention modules of transformers in ``module``."""
    return (
        found for found in module.modules() if transformers_class(found) is not None
    )


def class_for_config(config: object) -> type:
    """The linear-attention class of transformers for a text config, whose fields are
    checked."""
    kind = str(getattr(config, "model_type", ""))
    for name, family in FAMILIES.items():
        if family.package == kind.removesuffix("_text"):
            check_config(config, family.fields)
            package = f"transformers.models.{family.package}"
            return getattr(import_module(f"{package}.modeling_{family.package}"), name)
    raise ValueError(
        f"a config with model_type={kind!r} has no linear attention that is known "
        f"here; legal are {LEGAL}."
    )


@lru_cache
def subclass(prefix: str, mixin: type, cls: type) -> type[Any]:
    """A class with the bases ``mixin`` and ``cls``, named ``prefix`` + the name of
    ``cls``."""
    return type(f"{prefix}{cls.__name__}", (mixin, cls), {"__doc__": cls.__doc__})


@lru_cache
def cache_parameter(function: Callable) -> str:
    """The name under which transformers' ``function`` takes the cache."""
    known = inspect.signature(function).parameters
    return next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[-1])


def project(module: LinearAttention, x_BSH: Tensor, dims: Any) -> Tensor:
    """Project ``x_BSH`` to rows ``[B, S, P]`` with the sections of ``dims.layout``."""
    sections = []
    if chains := family_of(module).projections:
        for chain in chains:
            y = x_BSH
            for name in chain.split(" > "):
                y = module.get_submodule(name)(y)
            sections.append(y)
    else:
        for name, rows in (
            ("in_proj_qkvz", qkvz_rows(dims)),
            ("in_proj_ba", ba_rows(dims)),
        ):
            y = module.get_submodule(name)(x_BSH).unflatten(
                -1, (dims.num_key_heads, -1)
            )
            sections += [section.flatten(-2) for section in y.split(rows, -1)]
    return torch.cat(sections, dim=-1)


def refuse_modules_that_mix(config: Any, feature: str) -> None:
    """Raise if one of the model's other modules does not support ``feature``, such as
    packing."""
    indexed = "indexed_attention" in config.layer_types
    why = ""
    if getattr(config, "ple_layer_ids", None):
        why = (
            f"per-layer embeddings (ple_layer_ids={config.ple_layer_ids}), whose "
            "n-grams and convolution run over the whole row that a rank is given, "
            "across documents"
        )
    elif indexed and feature != "packed documents":
        why = (
            "indexed attention: its indexer ranks the keys of the tokens that a rank "
            "holds, not those of the sequence"
        )
    elif indexed and config.model_type.startswith("glm5_next"):
        why = "GLM 5's indexed attention, which takes a mask of padding only"
    if why:
        raise NotImplementedError(
            f"{feature} in a model with {why}. Give one document per row, on one rank; "
            f"a layer of its own (CPAwareGatedDeltaNet) takes {feature}."
        )


_KERNELS = (
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
    flash-linear-attention is installed; :func:`.patching.patch` calls this too.
    Functions of transformers' modeling files are replaced in this process; tensors on
    other devices run the same functions as before. Functions that the package
    ``kernels`` has replaced by modules stay unless ``USE_HUB_KERNELS=NO`` is set.
    """
    for cls in filter(None, map(transformers_class, model.modules())):
        source = sys.modules[cls.__module__]
        for name in _KERNELS:
            chosen = getattr(source, name, None)
            if inspect.isfunction(chosen) and hasattr(chosen, "__wrapped__"):
                plain = inspect.unwrap(chosen)
                known = frozenset(inspect.signature(plain).parameters)
                call_by_device = partial(_call_by_device, chosen, plain, known)
                setattr(source, name, update_wrapper(call_by_device, chosen))


def _call_by_device(
    chosen: Callable,
    plain: Callable,
    known: frozenset[str],
    x: Tensor,
    *args: object,
    **kwargs: object,
) -> object:
    """Call ``plain``, whose arguments are ``known``, if ``x`` is on the CPU, else
    ``chosen``."""
    # ``plain`` would ignore boundaries of documents; ``chosen`` refuses them on a CPU.
    packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
    if packed or x.device.type != "cpu":
        return chosen(x, *args, **kwargs)
    return plain(
        x, *args, **{name: value for name, value in kwargs.items() if name in known}
    )

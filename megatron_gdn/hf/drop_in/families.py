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

from ...gdn.front import gdn_parts
from ...gdn.hf import PROJECTIONS, ba_rows, qkvz_rows
from ...gdn.rule import resolve_rule
from ...gdn.sizes import GDNDims
from ...kda.front import kda_parts
from ...kda.rule import choose_kda
from ...kda.sizes import KDADims
from ...mixers.hooks import has_hooks
from ...mixers.micro_batch import ChooseRule
from ...ops.parts import Parts
from ...ops.readout.base import ACTIVATIONS


class Mixer(NamedTuple):
    """The mixer of this package that computes what a module computes."""

    dims: Any
    rule: ChooseRule
    parts: Callable[..., Parts]  # called with opened rows, conv weight and bias, A_log, dt_bias
    names: dict[str, Any]  # of the mixer and its recurrence, for messages of MicroBatches


def _gdn_mixer(module: Any, config: Any, options: Any) -> Mixer:
    dims = GDNDims.from_config(config)
    rule = partial(resolve_rule, options.backend, sizes=dims.heads, operands=options.rule_operands)
    negative = getattr(module, "allow_neg_eigval", False)
    how = {"allow_neg_eigval": negative, "recompute_qkv": options.recompute_qkv}
    return Mixer(dims, rule, partial(gdn_parts, **how), {})


def _kda_mixer(module: Any, config: Any, options: Any) -> Mixer:
    if options.rule_operands != "fp16" or options.recompute_qkv:
        raise ValueError(
            f"rule_operands={options.rule_operands!r}, recompute_qkv={options.recompute_qkv}: "
            f"Kimi Delta Attention has neither option. Leave both out."
        )
    heads, width, gate = config.linear_num_heads, config.linear_head_dim, module.forget_gate
    # The rows hold both gates in full width: `project` multiplies the low-rank factors.
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
    bound = getattr(gate, "safe_gate_lower_bound", None)  # GLM 5 next; Kimi Linear has none
    if getattr(gate, "safe_gate", False):  # Bailing Hybrid
        bound = gate.lower_bound
    rule = partial(choose_kda, options.backend, dims.state, bound)
    names = {"mixer": "KimiDeltaAttention", "recurrence": "KDA"}
    return Mixer(dims, rule, partial(kda_parts, lower_bound=bound), names)


class Family(NamedTuple):
    """The names in transformers of one family's linear-attention submodules.

    The concatenated outputs of ``projections`` are the mixer's rows; "a > b" calls module b on the
    output of a. Empty ``projections`` stand for Qwen3-Next's two, interleaved by key heads:

        in_proj_qkvz: per key head [q | k | v of its value heads | z of them]
        in_proj_ba:   per key head [b of its value heads | a of them]
    """

    package: str  # the package in transformers.models that has the class
    kinds: tuple[str, ...]  # model_type of the text configs that describe it
    projections: tuple[str, ...] = ()
    norm: str = "norm"
    out: str = "out_proj"
    gate: str = ""  # the module that has A_log and dt_bias; empty: the module itself
    mixer: Callable[[Any, Any, Any], Mixer] = _gdn_mixer  # called with module, config, options


_FLAT, _SEPARATE = tuple(PROJECTIONS["flat"]), tuple(PROJECTIONS["separate"])
_KDA: dict[str, Any] = {
    "norm": "o_norm", "out": "o_proj", "gate": "forget_gate", "mixer": _kda_mixer,
}  # fmt: skip
_LOW_RANK = (
    "q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj > forget_gate.f_b_proj",
    "g_a_proj > g_b_proj", "b_proj",
)  # fmt: skip
_FULL_RANK = ("q_proj", "k_proj", "v_proj", "forget_gate.f_proj", "g_proj", "b_proj")

FAMILIES = {  # keys are names of transformers' classes
    "Qwen3NextGatedDeltaNet": Family("qwen3_next", ("qwen3_next",)),
    "Qwen3_5GatedDeltaNet": Family("qwen3_5", ("qwen3_5_text", "qwen3_5"), _FLAT),
    "Qwen3_5MoeGatedDeltaNet": Family("qwen3_5_moe", ("qwen3_5_moe_text", "qwen3_5_moe"), _FLAT),
    "Qwen4ExpTextGatedDeltaNet": Family("qwen4_exp", ("qwen4_exp_text",), _FLAT),
    "OlmoHybridGatedDeltaNet": Family(
        "olmo_hybrid", ("olmo_hybrid",), _SEPARATE, norm="o_norm", out="o_proj"
    ),
    "KimiLinearDeltaAttention": Family("kimi_linear", ("kimi_linear",), _LOW_RANK, **_KDA),
    "Glm5NextTextLinearAttention": Family("glm5_next", ("glm5_next_text",), _LOW_RANK, **_KDA),
    "BailingHybridDeltaAttention": Family(
        "bailing_hybrid", ("bailing_hybrid",), _FULL_RANK, **_KDA
    ),
}
MODELS = (
    "Qwen3-Next, Qwen3.5, Qwen3.5-MoE, Qwen4-Exp, OLMo Hybrid, Kimi Linear, GLM 5 next and Bailing "
    "Hybrid"
)


def transformers_class(module: nn.Module) -> type | None:
    """The linear-attention class of transformers that ``module`` is an instance of, or None."""
    for cls in type(module).__mro__:
        if cls.__name__ in FAMILIES and cls.__module__.startswith("transformers."):
            return cls
    return None


def family_of(module: nn.Module) -> Family:
    cls = transformers_class(module)
    assert cls is not None
    return FAMILIES[cls.__name__]


def linear_attention_of(layer: nn.Module) -> Any:
    """The linear attention of a decoder layer; None in a layer of another kind."""
    found = (child for child in layer.children() if transformers_class(child) is not None)
    return next(found, None)


def linear_attentions(text: Any) -> Iterator[Any]:
    return (found for layer in text.layers if (found := linear_attention_of(layer)) is not None)


def class_for_config(config: Any) -> type:
    """The linear-attention class of transformers for a text config."""
    kind = getattr(config, "model_type", None)
    for name, family in FAMILIES.items():
        if kind in family.kinds:
            package = family.package
            module = import_module(f"transformers.models.{package}.modeling_{package}")
            return getattr(module, name)
    legal = ", ".join(repr(kind) for family in FAMILIES.values() for kind in family.kinds)
    raise ValueError(
        f"a config with model_type={kind!r} has no linear attention that is known here; legal are "
        f"{legal}."
    )


@lru_cache
def subclass(prefix: str, mixin: type, cls: type) -> type[Any]:
    """A subclass of ``cls`` with ``mixin`` before it."""
    return type(f"{prefix}{cls.__name__}", (mixin, cls), {"__doc__": cls.__doc__})


def fusible_activation(norm: nn.Module) -> str | None:
    """``act`` if ``norm`` runs transformers' own ``RMSNorm(x) * weight * act(z)``, else None.

    A kernel, a subclass, a replaced ``forward`` or hooks give None: the mixer calls such a norm.
    """
    cls, activation = type(norm), getattr(norm, "activation", None)
    plain = (
        cls.__name__.endswith("RMSNormGated")
        and cls.__module__.startswith("transformers.")
        and cls.forward.__module__.startswith("transformers.")
        and "forward" not in vars(norm)
        and not has_hooks(norm)
    )
    return activation if plain and activation in ACTIVATIONS else None


def project(module: Any, x_BSH: Tensor, dims: Any) -> Tensor:
    """Call the projections; return rows ``[B, S, P]`` with the sections of ``dims.layout``."""
    sections = []
    if chains := family_of(module).projections:
        for chain in chains:
            y = x_BSH
            for name in chain.split(" > "):
                y = module.get_submodule(name)(y)
            sections.append(y)
    else:
        for name, rows in (("in_proj_qkvz", qkvz_rows(dims)), ("in_proj_ba", ba_rows(dims))):
            y = module.get_submodule(name)(x_BSH).unflatten(-1, (dims.num_key_heads, -1))
            sections += [section.flatten(-2) for section in y.split(rows, -1)]
    return torch.cat(sections, dim=-1)


def refuse_modules_that_mix(config: Any, what: str) -> None:
    """Refuse a model whose other modules read across documents or need other ranks' tokens."""
    if getattr(config, "ple_layer_ids", None):
        raise NotImplementedError(
            f"{what} in a model with per-layer embeddings (ple_layer_ids={config.ple_layer_ids}): "
            f"their n-grams and convolution run over the whole row that a rank is given, across "
            f"documents. Give one document per row, on one rank."
        )
    indexed, alone = "indexed_attention" in config.layer_types, what == "packed documents"
    if indexed and alone and config.model_type.startswith("glm5_next"):
        raise NotImplementedError(
            "packed documents in a model of GLM 5 next: its indexed attention takes a mask of "
            "padding only, and reads across documents. Give one document per row; a layer of its "
            "own (CPAwareGatedDeltaNet) takes packed documents."
        )
    if indexed and not alone:
        raise NotImplementedError(
            "context parallelism in a model with indexed attention: its indexer ranks the keys of "
            "the tokens that a rank holds, not those of the sequence. Run it on one rank; a layer "
            "of its own (CPAwareGatedDeltaNet) takes context parallelism."
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
    """Let transformers' own linear attention run on CPU tensors, with any packages installed.

    Otherwise CPU tensors fail with ``0 active drivers ([])`` if flash-linear-attention is
    installed. :func:`.patching.patch` calls this function too. Functions of transformers' modeling
    files are replaced in this process; tensors on other devices run the same function as before.
    Functions that the package ``kernels`` has turned into modules are not changed (set
    ``USE_HUB_KERNELS=NO``).
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
    chosen: Callable, plain: Callable, known: frozenset[str], x: Any, *args: Any, **kwargs: Any
) -> Any:
    """Call transformers' plain function for CPU tensors, else the one that it chose at import."""
    # No plain function reads boundaries of documents; the chosen function refuses them.
    packed = kwargs.get("cu_seqlens") is not None or kwargs.get("seq_idx") is not None
    if packed or x.device.type != "cpu":
        return chosen(x, *args, **kwargs)
    return plain(x, *args, **{name: value for name, value in kwargs.items() if name in known})

"""Which transformers modules can be replaced, found by name: transformers is not imported here.

The projections of a transformers linear-attention module, as the mixer's rows.

    side by side  the outputs of the family's projections, in the order of the rows' sections
    Qwen3-Next    in_proj_qkvz: per key head [q | k | v of its value heads | z of them]
                  in_proj_ba:   per key head [b of its value heads | a of them]

Legend: B batch, S tokens, H hidden size, P width of the mixer's rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ...gdn.hf import ba_rows, qkvz_rows
from ...mixers.hooks import has_hooks
from ...ops.readout.base import ACTIVATIONS

if TYPE_CHECKING:

    class LinearAttention(nn.Module):
        """The attributes of transformers' linear attention that every family has."""

        conv1d: nn.Conv1d
        activation: str
        _modules: dict[str, Any]
        _parameters: dict[str, Any]

        def __init__(self, config: Any, layer_idx: int) -> None: ...
        def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor: ...

    class TextModel(nn.Module):
        """The attributes of transformers' text models that are read."""

        config: Any
        layers: Iterable[Any]

        def get_input_embeddings(self) -> nn.Embedding: ...

else:
    LinearAttention = TextModel = nn.Module


class Family(NamedTuple):
    """What transformers calls the parts of one family's linear attention.

    Attributes:
        package: of ``transformers.models``, which has the class.
        kinds: ``model_type`` of the text configs that describe it.
        projections: their outputs side by side are the mixer's rows; "a > b" calls b on a's output.
            None: interleaved by key heads, see :mod:`.families`.
        norm, out: the gated norm and the last projection.
        gate: the module that has ``A_log`` and ``dt_bias``; empty: the module itself.
        kind: the recurrence: "gdn" or "kda" (Kimi Delta Attention).
    """

    package: str
    kinds: tuple[str, ...]
    projections: tuple[str, ...] = ()
    norm: str = "norm"
    out: str = "out_proj"
    gate: str = ""
    kind: str = "gdn"


_FLAT = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_SEPARATE = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")

_KDA = {"norm": "o_norm", "out": "o_proj", "gate": "forget_gate", "kind": "kda"}
_LOW_RANK = (
    "q_proj", "k_proj", "v_proj", "forget_gate.f_a_proj > forget_gate.f_b_proj",
    "g_a_proj > g_b_proj", "b_proj",
)  # fmt: skip
_FULL_RANK = ("q_proj", "k_proj", "v_proj", "forget_gate.f_proj", "g_proj", "b_proj")

FAMILIES = {  # by the name of transformers' class
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


def linear_attentions(text: TextModel) -> Iterator[Any]:
    """The linear attention of every layer that has one."""
    found = map(linear_attention_of, text.layers)
    return (module for module in found if module is not None)


def class_for_config(config: Any) -> type:
    """The linear-attention class of transformers for a text config.

    Raises:
        ValueError: a config of another family.
        ImportError: transformers is not installed.
    """
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


def plain_gate(norm: nn.Module) -> str | None:
    """``act`` if ``norm`` computes ``RMSNorm(x) * weight * act(z)`` by transformers' own forward.

    None for a kernel in its place, a subclass, a replaced ``forward``, another activation or hooks:
    such a norm is called as a module.
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


def project(module: LinearAttention, x_BSH: Tensor, dims: Any) -> Tensor:
    """``[B, S, P]``, rows with the sections of ``dims.layout``.

    The projections are called as modules, so adapters and hooks on them work.
    """
    names = family_of(module).projections
    if names:
        return torch.cat([_called(module, name, x_BSH) for name in names], dim=-1)
    heads = dims.num_key_heads
    qkvz, ba = (getattr(module, f"in_proj_{name}")(x_BSH) for name in ("qkvz", "ba"))
    qkvz = qkvz.unflatten(-1, (heads, -1)).split(qkvz_rows(dims), -1)
    ba = ba.unflatten(-1, (heads, -1)).split(ba_rows(dims), -1)
    return torch.cat([section.flatten(-2) for section in (*qkvz, *ba)], dim=-1)


def _called(module: LinearAttention, chain: str, x_BSH: Tensor) -> Tensor:
    for name in chain.split(" > "):
        x_BSH = module.get_submodule(name)(x_BSH)
    return x_BSH

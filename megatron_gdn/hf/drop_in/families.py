"""Which transformers modules can be replaced, found by name: transformers is not imported here."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:

    class LinearAttention(nn.Module):
        """The attributes of transformers' Gated DeltaNet that are read."""

        conv1d: nn.Conv1d
        norm: Any
        in_proj_qkvz: nn.Linear
        in_proj_ba: nn.Linear
        out_proj: nn.Linear
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

from ...mixers.hooks import has_hooks

# Class name -> the module that has it, and the text configs that describe it.
_FAMILIES = {
    "Qwen3NextGatedDeltaNet": ("qwen3_next", ("qwen3_next",)),
    "Qwen3_5GatedDeltaNet": ("qwen3_5", ("qwen3_5_text", "qwen3_5")),
    "Qwen3_5MoeGatedDeltaNet": ("qwen3_5_moe", ("qwen3_5_moe_text", "qwen3_5_moe")),
}


def transformers_class(module: nn.Module) -> type | None:
    """The linear-attention class of transformers that ``module`` is an instance of, or None."""
    for cls in type(module).__mro__:
        if cls.__name__ in _FAMILIES and cls.__module__.startswith("transformers."):
            return cls
    return None


def class_for_config(config: Any) -> type:
    """The linear-attention class of transformers for a text config.

    Raises:
        ValueError: a config of another family.
        ImportError: transformers is not installed.
    """
    kind = getattr(config, "model_type", None)
    for name, (package, kinds) in _FAMILIES.items():
        if kind in kinds:
            module = import_module(f"transformers.models.{package}.modeling_{package}")
            return getattr(module, name)
    legal = ", ".join(repr(kind) for _, kinds in _FAMILIES.values() for kind in kinds)
    raise ValueError(
        f"a config with model_type={kind!r} has no Gated DeltaNet that is known here; legal are "
        f"{legal}."
    )


def is_plain_gated_norm(norm: nn.Module) -> bool:
    """Whether ``norm`` computes ``RMSNorm(x) * weight * SiLU(z)`` by transformers' own forward.

    False for a kernel in its place, a subclass, a replaced ``forward``, or hooks: such a norm is
    called as a module.
    """
    cls = type(norm)
    return (
        cls.__name__.endswith("RMSNormGated")
        and cls.__module__.startswith("transformers.")
        and cls.forward.__module__.startswith("transformers.")
        and "forward" not in vars(norm)
        and getattr(norm, "activation", None) == "silu"
        and not has_hooks(norm)
    )

"""Types of the gated delta rule's inputs, gradients and head sizes, and checks of
shapes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ..documents import Documents, require_one_row
from ..layout import Layout, Section, SizeError
from ..state_maps.state_map import StateShape


class RuleInputs(NamedTuple):
    """Inputs of the gated delta rule. In a backward, an input that the rule does not
    read is None."""

    q: Tensor  # [B, S, G, K], of unit length along K
    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, H, V]
    g: Tensor  # [B, S, H] fp32 log-decay
    beta: Tensor  # [B, S, H] fp32


class RuleGrads(NamedTuple):
    """Gradients of the rule's inputs, for the front's backward.

    The gradients of q and k may have H heads; the front then sums over the value heads
    of each key head. If ``factor`` is not None, the gradients of a head must still be
    multiplied by ``factor[head]``. A factor is a power of two, and the value heads of
    one key head have equal factors.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    factor: Tensor | None = None  # [H] fp32


def check_rule_inputs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | Sequence[int] | Documents | None,
) -> Documents | None:
    """Raise a ValueError unless the shapes of `gated_delta_rule`'s inputs fit; return
    the documents of ``cu_seqlens``, or None."""
    if key.dim() != 4 or value.dim() != 4:
        raise ValueError(
            f"key and value must be [B, T, heads, dim], got {tuple(key.shape)} and "
            f"{tuple(value.shape)}."
        )
    B, T, key_heads, K = key.shape
    value_heads, V = value.shape[2:]
    require_multiple_of_key_heads(key_heads, value_heads)
    documents = None
    if cu_seqlens is not None:
        require_one_row(B, f"key of shape {tuple(key.shape)}")
        documents = Documents.from_cu_seqlens(cu_seqlens, T, device=key.device)
    if documents is None:
        sequences = B
    else:
        sequences = len(documents.lengths)
    shapes = {
        "query": (query, (B, T, key_heads, K)),
        "value": (value, (B, T, value_heads, V)),
        "g": (g, (B, T, value_heads)),
        "beta": (beta, (B, T, value_heads)),
        "initial_state": (initial_state, (sequences, value_heads, K, V)),
    }
    for name, (tensor, shape) in shapes.items():
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(
                f"{name} must have shape {shape} to fit key {tuple(key.shape)}, value "
                f"{tuple(value.shape)} and {sequences} sequences, got "
                f"{tuple(tensor.shape)}."
            )
    return documents


class HeadSizes(NamedTuple):
    """The numbers of key and value heads on one rank, and their head dims."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    @lru_cache(maxsize=64)
    def of(layout: Layout) -> HeadSizes:
        """The head sizes of a layout that has the sections query and value."""
        G, K = layout.shape_of("query")
        H, V = layout.shape_of("value")
        return HeadSizes(G, H, K, V)

    @property
    def state_shape(self) -> StateShape:
        return StateShape(self.value_heads, self.key_dim, self.value_dim)

    @property
    def layout(self) -> Layout:
        """The layout query | key | value | z | beta | alpha; the first three are
        convolved."""
        return _layout_of_heads(self)


def require_multiple_of_key_heads(key_heads: int, value_heads: int) -> None:
    """Raise a ValueError if ``value_heads`` is not a multiple of ``key_heads``."""
    if value_heads % key_heads:
        raise SizeError(
            f"num_value_heads={value_heads} is not a multiple of "
            f"num_key_heads={key_heads}; every key head must serve the same number of "
            "value heads. Set linear_num_value_heads to a multiple of "
            "linear_num_key_heads."
        )


def delta_layout(sizes: HeadSizes, *others: Section) -> Layout:
    """A layout with the sections query | key | value, which are convolved, and then
    ``others``."""
    G, H, K, V = sizes
    convolved = (
        Section("query", "key", K, conv=True),
        Section("key", "key", K, conv=True),
        Section("value", "value", V, conv=True),
    )
    return Layout(convolved + others, (("value", H), ("key", G)))


@lru_cache(maxsize=64)
def _layout_of_heads(sizes: HeadSizes) -> Layout:
    """Make :attr:`HeadSizes.layout`; cached, so that equal sizes share one layout."""
    return delta_layout(
        sizes,
        Section("z", "value", sizes.value_dim),
        Section("beta", "value", 1, gates=True),
        Section("alpha", "value", 1, gates=True),
    )

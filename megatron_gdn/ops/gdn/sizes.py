"""The heads of a Gated DeltaNet that one rank holds, as plain numbers for the kernels."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from torch import Tensor

from ..layout import Layout, Section
from ..size_error import SizeError
from ..state_maps.state_map import StateShape


class HeadSizes(NamedTuple):
    """Heads and head dims that one rank holds; :attr:`layout` is the row that follows from them.

    The convolved sections come first, so their column in a row is also their convolution channel.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @staticmethod
    @lru_cache(maxsize=64)
    def of(layout: Layout) -> HeadSizes:
        """The sizes of a layout made by :attr:`layout`."""
        key, value = layout.heads("key"), layout.heads("value")
        _, k, v, *_ = layout.widths
        return HeadSizes(key, value, k // key, v // value)

    @property
    def state(self) -> StateShape:
        return StateShape(self.value_heads, self.key_dim, self.value_dim)

    @property
    def layout(self) -> Layout:
        """query | key | value | z | beta | alpha."""
        return _layout(*self)

    @property
    def conv_width(self) -> int:
        return _layout(*self).conv_width

    @property
    def z_column(self) -> int:
        return _layout(*self).gate_columns.start

    @property
    def beta_column(self) -> int:
        return _layout(*self).columns("beta").start

    @property
    def alpha_column(self) -> int:
        return _layout(*self).columns("alpha").start

    @property
    def width(self) -> int:
        return _layout(*self).width

    def check_projection(self, proj: Tensor, gates: Tensor | None = None) -> None:
        """Refuse a projection whose rows do not hold these heads.

        Args:
            gates: ``[S, B, 2 H]`` if the rows hold no gates.

        Raises:
            ValueError: ``proj`` is not ``[S, B, P]`` with P this layout's width, its rows are not
                contiguous, or the value heads are not a multiple of the key heads.
        """
        if self.value_heads % self.key_heads:
            require_even_groups(self.key_heads, self.value_heads)
        width = self.width if gates is None else self.beta_column
        if proj.dim() != 3 or proj.shape[2] != width:
            raise ValueError(
                f"the projection must be [S, B, {width}] for {self.key_heads} key heads of "
                f"{self.key_dim} and {self.value_heads} value heads of {self.value_dim}, got "
                f"{tuple(proj.shape)}."
            )
        if proj.stride(2) != 1:
            raise ValueError(
                f"the columns of the projection must be adjacent in memory, got strides "
                f"{proj.stride()}; call .contiguous() on it first."
            )
        if gates is not None and gates.shape != (*proj.shape[:2], 2 * self.value_heads):
            raise ValueError(
                f"the gates must be {[*proj.shape[:2], 2 * self.value_heads]} beside rows "
                f"{tuple(proj.shape)}, got {tuple(gates.shape)}."
            )


def require_even_groups(key_heads: int, value_heads: int) -> None:
    """Refuse value heads that are not a multiple of the key heads.

    Raises:
        ValueError: names both numbers.
    """
    if value_heads % key_heads:
        raise SizeError(
            f"{value_heads} value heads cannot share {key_heads} key heads evenly; the value heads "
            f"must be a multiple of the key heads."
        )


@lru_cache(maxsize=64)
def _layout(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Layout:
    return Layout(
        sections=(
            Section("query", "key", key_dim, conv=True),
            Section("key", "key", key_dim, conv=True),
            Section("value", "value", value_dim, conv=True),
            Section("z", "value", value_dim),
            Section("beta", "value", 1, gates=True),
            Section("alpha", "value", 1, gates=True),
        ),
        counts=(("value", value_heads), ("key", key_heads)),
    )

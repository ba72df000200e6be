"""Where the heads of one rank lie in a projection row, as plain numbers for the kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class HeadSizes(NamedTuple):
    """Heads and head dims that one rank holds; the row layout follows from them.

    A row is query | key | value | z | beta | alpha, the heads of each section contiguous and
    ascending. Only the first three go through the convolution, so their column in the row is also
    their convolution channel.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    @property
    def conv_width(self) -> int:
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def z_column(self) -> int:
        return self.conv_width

    @property
    def beta_column(self) -> int:
        return self.conv_width + self.value_heads * self.value_dim

    @property
    def alpha_column(self) -> int:
        return self.beta_column + self.value_heads

    @property
    def width(self) -> int:
        return self.alpha_column + self.value_heads

    @property
    def sections(self) -> tuple[int, int, int, int, int, int]:
        """Widths of the six sections, for ``Tensor.split``."""
        qk, v = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return qk, qk, v, v, self.value_heads, self.value_heads

    def check_projection(self, proj: Tensor) -> None:
        """Refuse a projection whose rows are not these heads.

        Raises:
            ValueError: ``proj`` is not ``[S, B, P]`` with P this layout's width, its rows are not
                contiguous, or the value heads are not a multiple of the key heads.
        """
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"{self.value_heads} value heads cannot share {self.key_heads} key heads evenly; "
                f"the value heads must be a multiple of the key heads."
            )
        if proj.dim() != 3 or proj.shape[2] != self.width:
            raise ValueError(
                f"the projection must be [S, B, {self.width}] for {self.key_heads} key heads of "
                f"{self.key_dim} and {self.value_heads} value heads of {self.value_dim}, got "
                f"{tuple(proj.shape)}."
            )
        if proj.stride(2) != 1:
            raise ValueError(
                f"the columns of the projection must be adjacent in memory, got strides "
                f"{proj.stride()}; call .contiguous() on it first."
            )

"""The readout per head over strided rows, as one launch each way (Triton).

:class:`.per_head.PerHead` is the plain twin.

Legend: S seq, B batch, P projection width, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import triton
from torch import Tensor

from ..kernels.launch import MOST_PLANS, Launch
from ..kernels.reduce import sum_rows
from ..kernels.tiles import Block, block_dim, norm_backward_tile, norm_forward_tile
from .per_head import PerHead
from .per_head_kernels import gated_norm_backward_kernel, gated_norm_forward_kernel


@dataclass(frozen=True)
class TritonPerHead(PerHead):
    """The readout per head in Triton.

    Attributes:
        by_row: the bits of a row do not depend on other rows: one tile for any number of them.
    """

    by_row: ClassVar[bool] = True

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        S, B, _ = rows.shape
        H, V = o.shape[2:]
        assert o.is_contiguous() and o.shape[:2] == (B, S)
        assert self.gate.stop - self.gate.start == H * V
        out = rows.new_empty(S, B, H * V) if out is None else out
        launch = _forward_launch(
            S * H, B, H, V, self.gate.start, rows.stride(), out.stride(), self.eps,
            self.zero_centered, self.activation == "sigmoid",
        )  # fmt: skip
        if launch is not None:
            launch(o, rows, gamma, out)
        return out

    def backward(
        self, d_out: Tensor, o: Tensor, rows: Tensor, gamma: Tensor, d_rows: Tensor,
        *, tile: Block | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``tile`` overrides the table of :mod:`..kernels.tiles`, for tuning and tests."""
        S, B, _ = rows.shape
        H, V = o.shape[2:]
        if d_out.stride(2) != 1:
            d_out = d_out.contiguous()
        programs, launch = _backward_launch(
            S * H, B, H, V, self.gate.start, rows.stride(), d_rows.stride(), d_out.stride(),
            self.eps, self.zero_centered, self.activation == "sigmoid", tile,
        )  # fmt: skip
        d_o = torch.empty_like(o, dtype=rows.dtype)
        partial = torch.empty(B * programs, V, dtype=torch.float32, device=o.device)
        if launch is not None:
            launch(o, rows, gamma, d_out, d_o, d_rows, partial)
        d_gamma = torch.empty_like(gamma)
        sum_rows(partial, d_gamma)
        return d_o, d_gamma


@lru_cache(maxsize=MOST_PLANS)
def _forward_launch(
    rows: int, B: int, H: int, V: int, z: int, strides: tuple[int, ...],
    out_strides: tuple[int, ...], eps: float, zero_centered: bool, sigmoid: bool,
) -> Launch | None:  # fmt: skip
    """None if there are no rows."""
    if not rows * B:
        return None
    tile = norm_forward_tile(V)
    return Launch(
        gated_norm_forward_kernel,
        (triton.cdiv(rows, tile.rows), B),
        rows, z, *strides[:2], *out_strides[:2], eps,
        H=H, V=V, ROWS=tile.rows, BLOCK_V=block_dim(V), ZERO_CENTERED=zero_centered,
        SIGMOID=sigmoid, num_warps=tile.warps,
    )  # fmt: skip


@lru_cache(maxsize=MOST_PLANS)
def _backward_launch(
    rows: int, B: int, H: int, V: int, z: int, strides: tuple[int, ...],
    d_strides: tuple[int, ...], out_strides: tuple[int, ...], eps: float, zero_centered: bool,
    sigmoid: bool, tile: Block | None,
) -> tuple[int, Launch | None]:  # fmt: skip
    """The number of programs per batch row, and the launch; None if there are no rows."""
    tile = norm_backward_tile(rows * B, V) if tile is None else tile
    programs = triton.cdiv(rows, tile.rows * tile.repeats)
    if not rows * B:
        return programs, None
    return programs, Launch(
        gated_norm_backward_kernel,
        (programs, B),
        rows, z, *strides[:2], *d_strides[:2], *out_strides[:2], eps,
        H=H, V=V, ROWS=tile.rows, REPEATS=tile.repeats, BLOCK_V=block_dim(V),
        ZERO_CENTERED=zero_centered, SIGMOID=sigmoid, num_warps=tile.warps,
    )  # fmt: skip

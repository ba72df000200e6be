"""The norm and the gate of a rule's output in Triton: one launch forward, one launch
backward.

Arithmetic is fp32. A program computes tiles of rows; a row is one head of one token. If
the norm is per group, each of the G groups counts as one head of V columns; otherwise G
is 1.

Legend: R rows of a tile. All columns of a tile belong to one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.elementwise import gate_activation, gate_activation_slope, sigmoid
from ..kernels.launch import LAUNCH_CACHE_SIZE, Launch
from ..kernels.reduce import sum_rows
from ..kernels.tiles import (
    RowTile,
    block_dim,
    norm_backward_tile,
    norm_forward_tile,
    require_rows_within_grid,
    rows_need_64_bits,
)
from .base import PlainReadout


@dataclass(frozen=True)
class TritonReadout(PlainReadout):
    """A :class:`.base.PlainReadout` in Triton; gamma must not be None."""

    # A row's bits depend on that row alone, since the tile shape is the same for all
    # batches.
    is_rowwise: ClassVar[bool] = True

    def forward(
        self,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply the norm and the gate in ``rows [S, B, P]`` to ``o [B, S, H, V]`` in
        one launch. The result is ``[S, B, H V]``, written to ``out`` if given."""
        assert gamma is not None
        S, B, _ = rows.shape
        H, V = o.shape[2:]
        assert o.is_contiguous() and o.shape[:2] == (B, S)
        assert self.gate_columns.stop - self.gate_columns.start == H * V
        if out is None:
            out = rows.new_empty(S, B, H * V)
        launch = _forward_launch(self, S, B, H, V, rows.stride()[:2], out.stride()[:2])
        launch(o, rows, gamma, out)
        return out

    def backward(
        self,
        d_out: Tensor,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        d_rows: Tensor,
        *,
        tile: RowTile | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Gradients of o and gamma from ``d_out [S, B, H V]``.

        One launch writes d_o, the gate's gradient to its columns of ``d_rows``, and
        partial sums of d_gamma; :func:`sum_rows` adds the partial sums. ``tile``
        replaces the tile of :mod:`..kernels.tiles` in tuning and tests.
        """
        assert gamma is not None
        S, B, _ = rows.shape
        if d_out.stride(2) != 1:
            d_out = d_out.contiguous()
        strides = rows.stride()[:2] + d_rows.stride()[:2] + d_out.stride()[:2]
        tiles, launch = _backward_launch(
            self, S, B, o.shape[2], o.shape[3], strides, tile
        )
        d_o = torch.empty_like(o, dtype=rows.dtype)
        partial = torch.empty(
            B * tiles, len(gamma), dtype=torch.float32, device=o.device
        )
        launch(o, rows, gamma, d_out, d_o, d_rows, partial)
        d_gamma = torch.empty_like(gamma)
        sum_rows(partial, d_gamma)
        return d_o, d_gamma


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _forward_launch(
    readout: TritonReadout,
    S: int,
    B: int,
    H: int,
    V: int,
    strides: tuple[int, int],
    out_strides: tuple[int, int],
) -> Launch:
    """The forward's launch. ``strides``: the strides of S and B in the projection rows;
    ``out_strides``: the same in the output."""
    require_rows_within_grid(B)
    G, H, V = _groups_heads_columns(readout, H, V)
    tile = norm_forward_tile(V)
    int64 = rows_need_64_bits(tile.rows, S * H, H, (strides[0], out_strides[0]), G * V)
    return Launch(
        gated_norm_forward_kernel,
        (triton.cdiv(S * H, tile.rows) * G, B),
        S * H,
        readout.gate_columns.start,
        strides[0],
        strides[1],
        out_strides[0],
        out_strides[1],
        readout.eps,
        num_warps=tile.warps,
        **_constants(readout, G, H, V, tile, int64),
    )


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _backward_launch(
    readout: TritonReadout,
    S: int,
    B: int,
    H: int,
    V: int,
    strides: tuple[int, ...],
    tile: RowTile | None,
) -> tuple[int, Launch]:
    """The number of rows of partial sums of d_gamma per batch row, and the launch of
    the backward.

    ``strides``: of S and B in the rows, in their gradient and in the output's gradient.
    ``tile``: None for the tile of :mod:`..kernels.tiles`.
    """
    require_rows_within_grid(B)
    G, H, V = _groups_heads_columns(readout, H, V)
    if tile is None:
        tile = norm_backward_tile(S * H * G * B, V)
    tiles = triton.cdiv(S * H, tile.rows * tile.repeats)
    int64 = rows_need_64_bits(tile.rows * tile.repeats, S * H, H, strides[::2], G * V)
    return tiles, Launch(
        gated_norm_backward_kernel,
        (tiles * G, B),
        S * H,
        readout.gate_columns.start,
        *strides,
        readout.eps,
        REPEATS=tile.repeats,
        num_warps=tile.warps,
        **_constants(readout, G, H, V, tile, int64),
    )


def _groups_heads_columns(
    readout: TritonReadout, H: int, V: int
) -> tuple[int, int, int]:
    """The kernels' G, H and V, for a rule's output that has ``H`` heads of ``V``
    columns.

    If the norm is per group, G is the number of groups, and each group counts as one
    wide head.
    """
    if readout.groups is None:
        return (1, H, V)
    return (readout.groups, 1, H * V // readout.groups)


def _constants(
    readout: TritonReadout, G: int, H: int, V: int, tile: RowTile, int64: bool
) -> dict[str, object]:
    """Constexpr arguments and compile options of both kernels; G, H, V are those of
    :func:`_groups_heads_columns`."""
    return {
        "G": G,
        "H": H,
        "V": V,
        "ROWS": tile.rows,
        "BLOCK_V": block_dim(V),
        "INT64": int64,
        "GATE_BEFORE_NORM": readout.groups is not None,
        "ZERO_CENTERED": readout.zero_centered,
        "SIGMOID": readout.activation == "sigmoid",
    }


@triton.jit
def _first_row_and_places(
    tile, ROWS: tl.constexpr, ROWS_OF_TILE: tl.constexpr, INT64: tl.constexpr
):
    """The first row of ``tile``, and the numbers 0 to ROWS - 1, the places of rows in
    the tile. A tile has ROWS_OF_TILE rows and is computed ROWS rows at a time.

    If INT64, both have 64 bits, and so has every offset that is computed from them.
    """
    row_R = tl.arange(0, ROWS)
    if INT64:
        tile = tl.cast(tile, tl.int64)
        row_R = tl.cast(row_R, tl.int64)
    return tile * ROWS_OF_TILE, row_R


@triton.jit
def _row_offsets(row_R, first_row, H: tl.constexpr, V: tl.constexpr, stride_s):
    """Offsets, in elements, of the rows ``first_row + row_R``; row s H + h is head h of
    token s.

    Tokens are ``stride_s`` elements apart. Offsets count from the token of row
    ``first_row``, so they do not grow with the length of the sequence. If they need 64
    bits, ``first_row`` and ``row_R`` have 64 bits.
    """
    return ((first_row + row_R) // H - first_row // H) * stride_s + (
        first_row + row_R
    ) % H * V


@triton.jit
def _pointer_to_token(ptr, first_row, stride_s, stride_b, H: tl.constexpr):
    """Move ``ptr`` from token 0 of batch row 0 to the token of row ``first_row`` in
    this program's batch row.

    Row s H + h is head h of token s. The offset has 64 bits.
    """
    b = tl.cast(tl.program_id(1), tl.int64)
    return ptr + b * stride_b + tl.cast(first_row // H, tl.int64) * stride_s


# one variant for all lengths
@triton.jit(do_not_specialize=["rows"])
def gated_norm_forward_kernel(
    o_ptr,
    proj_ptr,
    gamma_ptr,
    out_ptr,
    rows,
    gate_column,
    stride_s,
    stride_b,
    out_stride_s,
    out_stride_b,
    eps,
    G: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INT64: tl.constexpr,
    GATE_BEFORE_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Norm and gate of ROWS rows in one group; grid (tiles * G, B), with ``rows`` = S
    H.

    ``o_ptr``: the rule's output [B, S, H, V]; for a norm per group [B, S, G V].
    ``proj_ptr``: the projection rows. ``gate_column``: the gate's first column in a
    projection row. ``gamma_ptr``: [G V]. ``*stride_s``, ``*stride_b``: elements from
    token to token and from batch row to batch row. GATE_BEFORE_NORM: the gate comes
    before the norm. ZERO_CENTERED: the norm is scaled by 1 + gamma. SIGMOID: the
    activation is sigmoid, otherwise SiLU. INT64: offsets inside a tile need 64 bits.
    """
    column = tl.program_id(0) % G * V
    first_row, row_R = _first_row_and_places(tl.program_id(0) // G, ROWS, ROWS, INT64)
    d_V = tl.arange(0, BLOCK_V)
    real_V = d_V < V
    real_RV = (first_row + row_R < rows)[:, None] & real_V[None, :]
    o_ptr += (tl.cast(tl.program_id(1), tl.int64) * rows + first_row) * (G * V) + column
    z_ptr = _pointer_to_token(
        proj_ptr + gate_column + column, first_row, stride_s, stride_b, H
    )
    out_ptr = _pointer_to_token(
        out_ptr + column, first_row, out_stride_s, out_stride_b, H
    )
    z_R = _row_offsets(row_R, first_row, H, V, stride_s)
    out_R = _row_offsets(row_R, first_row, H, V, out_stride_s)
    o_RV = tl.load(
        o_ptr + row_R[:, None] * (G * V) + d_V[None, :], mask=real_RV, other=0.0
    )
    z_RV = tl.load(z_ptr + z_R[:, None] + d_V[None, :], mask=real_RV, other=0.0)
    gamma_V = tl.load(gamma_ptr + column + d_V, mask=real_V).to(tl.float32)
    if ZERO_CENTERED:
        gamma_V += 1.0
    o_RV = o_RV.to(tl.float32)
    z_RV = z_RV.to(tl.float32)
    act_RV = gate_activation(z_RV, sigmoid(z_RV), SIGMOID)
    if GATE_BEFORE_NORM:
        o_RV = o_RV * act_RV
    r_R = tl.rsqrt(tl.sum(o_RV * o_RV, axis=1) * (1.0 / V) + eps)
    y_RV = o_RV * r_R[:, None] * gamma_V[None, :]
    if not GATE_BEFORE_NORM:
        y_RV = y_RV * act_RV
    out_at_RV = out_ptr + out_R[:, None] + d_V[None, :]
    tl.store(out_at_RV, y_RV.to(out_ptr.dtype.element_ty), mask=real_RV)


# one variant for all lengths
@triton.jit(do_not_specialize=["rows"])
def gated_norm_backward_kernel(
    o_ptr,
    proj_ptr,
    gamma_ptr,
    dy_ptr,
    do_ptr,
    d_proj_ptr,
    partial_ptr,
    rows,
    gate_column,
    stride_s,
    stride_b,
    d_stride_s,
    d_stride_b,
    dy_stride_s,
    dy_stride_b,
    eps,
    G: tl.constexpr,
    H: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    INT64: tl.constexpr,
    GATE_BEFORE_NORM: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    """Gradients of ROWS * REPEATS rows in one of G norm groups; grid (tiles * G, B),
    rows = S H.

    ``dy_ptr`` is the output's gradient; ``do_ptr`` gets the gradient of o,
    ``d_proj_ptr`` that of the gate's columns, ``partial_ptr`` a row of partial sums of
    d_gamma for each tile. The other arguments are as in the forward. Below, s = act(z),
    the norm n = u r, r = rsqrt(mean(u^2) + eps), and du = r (dn - n mean(dn n)). Line 1
    is for the norm before the gate, line 2 for GATE_BEFORE_NORM:

        u = o   d_gamma = sum dy n s  dn = dy gamma s  do = du   dz = dy n gamma act'(z)
        u = o s d_gamma = sum dy n    dn = dy gamma    do = du s dz = du o act'(z)
    """
    column = tl.program_id(0) % G * V
    tile = tl.program_id(0) // G
    d_V = tl.arange(0, BLOCK_V)
    real_V = d_V < V
    gamma_V = tl.load(gamma_ptr + column + d_V, mask=real_V, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gamma_V += 1.0
    d_gamma_RV = tl.zeros((ROWS, BLOCK_V), tl.float32)
    first_row, row_R = _first_row_and_places(tile, ROWS, ROWS * REPEATS, INT64)
    b = tl.cast(tl.program_id(1), tl.int64)
    base = (b * rows + first_row) * (G * V) + column
    o_ptr += base
    do_ptr += base
    z_ptr = _pointer_to_token(
        proj_ptr + gate_column + column, first_row, stride_s, stride_b, H
    )
    dz_ptr = _pointer_to_token(
        d_proj_ptr + gate_column + column, first_row, d_stride_s, d_stride_b, H
    )
    dy_ptr = _pointer_to_token(dy_ptr + column, first_row, dy_stride_s, dy_stride_b, H)

    real_RV = (first_row + row_R < rows)[:, None] & real_V[None, :]
    z_at_RV = _row_offsets(row_R, first_row, H, V, stride_s)[:, None] + d_V[None, :]
    dy_at_RV = _row_offsets(row_R, first_row, H, V, dy_stride_s)[:, None] + d_V[None, :]
    o_RV = tl.load(
        o_ptr + row_R[:, None] * (G * V) + d_V[None, :], mask=real_RV, other=0.0
    )
    z_RV = tl.load(z_ptr + z_at_RV, mask=real_RV, other=0.0)
    dy_RV = tl.load(dy_ptr + dy_at_RV, mask=real_RV, other=0.0)
    for _repeat in tl.range(0, REPEATS):
        # Load the next rows before computing with the current rows.
        next_R = row_R + ROWS
        inside_R = (first_row + next_R < rows) & (next_R < ROWS * REPEATS)
        real_next_RV = inside_R[:, None] & real_V[None, :]
        z_at_RV = (
            _row_offsets(next_R, first_row, H, V, stride_s)[:, None] + d_V[None, :]
        )
        dy_at_RV = (
            _row_offsets(next_R, first_row, H, V, dy_stride_s)[:, None] + d_V[None, :]
        )
        o_next_RV = tl.load(
            o_ptr + next_R[:, None] * (G * V) + d_V[None, :],
            mask=real_next_RV,
            other=0.0,
        )
        z_next_RV = tl.load(z_ptr + z_at_RV, mask=real_next_RV, other=0.0)
        dy_next_RV = tl.load(dy_ptr + dy_at_RV, mask=real_next_RV, other=0.0)

        o_RV = o_RV.to(tl.float32)
        z_RV = z_RV.to(tl.float32)
        dy_RV = dy_RV.to(tl.float32)
        sig_RV = sigmoid(z_RV)
        act_RV = gate_activation(z_RV, sig_RV, SIGMOID)
        u_RV = o_RV * act_RV if GATE_BEFORE_NORM else o_RV
        r_R = tl.rsqrt(tl.sum(u_RV * u_RV, axis=1) * (1.0 / V) + eps)
        n_RV = u_RV * r_R[:, None]
        dyn_RV = dy_RV * n_RV
        if GATE_BEFORE_NORM:
            d_gamma_RV += dyn_RV
            dn_RV = dy_RV * gamma_V[None, :]
        else:
            d_gamma_RV += dyn_RV * act_RV
            dn_RV = dy_RV * gamma_V[None, :] * act_RV
        mean_R = tl.sum(dn_RV * n_RV, axis=1) * (1.0 / V)
        do_RV = r_R[:, None] * (dn_RV - n_RV * mean_R[:, None])
        if GATE_BEFORE_NORM:
            dz_RV = do_RV * o_RV * gate_activation_slope(act_RV, sig_RV, SIGMOID)
            do_RV = do_RV * act_RV
        else:
            dz_RV = (
                dyn_RV
                * gamma_V[None, :]
                * gate_activation_slope(act_RV, sig_RV, SIGMOID)
            )
        tl.store(
            do_ptr + row_R[:, None] * (G * V) + d_V[None, :],
            do_RV.to(do_ptr.dtype.element_ty),
            mask=real_RV,
        )
        dz_at_RV = (
            _row_offsets(row_R, first_row, H, V, d_stride_s)[:, None] + d_V[None, :]
        )
        tl.store(dz_ptr + dz_at_RV, dz_RV.to(dz_ptr.dtype.element_ty), mask=real_RV)
        row_R = next_R
        real_RV = real_next_RV
        o_RV = o_next_RV
        z_RV = z_next_RV
        dy_RV = dy_next_RV
    partial_ptr += (b * (tl.num_programs(0) // G) + tile) * (G * V) + column
    tl.store(partial_ptr + d_V, tl.sum(d_gamma_RV, axis=0), mask=real_V)

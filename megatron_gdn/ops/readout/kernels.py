"""The norm and the gate of a rule's output as one Triton launch per direction; fp32 arithmetic.

:mod:`.base` has the equations. A program of a norm per head computes tiles of (token, head) rows;
a program of a norm per group computes one group of a few tokens.

Legend: R rows of a tile, one per (token, head), in the order of ``o [B, S, H, V]``; G groups, C
channels of a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.elementwise import activated, activated_slope, sigmoid
from ..kernels.launch import MOST_PLANS, Launch
from ..kernels.reduce import sum_rows
from ..kernels.tiles import (
    MOST_PROGRAMS,
    Block,
    block_dim,
    norm_backward_tile,
    norm_forward_tile,
)
from .base import PlainReadout


@dataclass(frozen=True)
class TritonReadout(PlainReadout):
    """A :class:`.base.PlainReadout` in Triton; needs a gamma."""

    @property
    def by_row(self) -> bool:
        """Whether a row's bits depend on that row alone, since all batches have one tile shape."""
        return self.groups is None

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        S, B, _ = rows.shape
        H, V = o.shape[2:]
        assert o.is_contiguous() and o.shape[:2] == (B, S)
        assert self.gate.stop - self.gate.start == H * V
        out = rows.new_empty(S, B, H * V) if out is None else out
        launch = _forward_launch(self, S, B, H, V, rows.stride()[:2], out.stride()[:2])
        if launch is not None:
            launch(o, self._at_gate(rows), gamma, out)
        return out

    def backward(
        self, d_out: Tensor, o: Tensor, rows: Tensor, gamma: Tensor, d_rows: Tensor,
        *, tile: Block | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """``tile`` replaces the tile of a norm per head in tuning and tests."""
        S, B, _ = rows.shape
        if d_out.stride(2) != 1:
            d_out = d_out.contiguous()
        strides = *rows.stride()[:2], *d_rows.stride()[:2], *d_out.stride()[:2]
        programs, launch = _backward_launch(self, S, B, *o.shape[2:], strides, tile)
        d_o = torch.empty_like(o, dtype=rows.dtype)
        partial = torch.empty(B * programs, len(gamma), dtype=torch.float32, device=o.device)
        if launch is not None:
            launch(o, self._at_gate(rows), gamma, d_out, d_o, self._at_gate(d_rows), partial)
        d_gamma = torch.empty_like(gamma)
        sum_rows(partial, d_gamma)
        return d_o, d_gamma

    def _at_gate(self, rows: Tensor) -> Tensor:
        return rows if self.groups is None else rows[..., self.gate.start :]


@lru_cache(maxsize=MOST_PLANS)
def _forward_launch(
    norm: TritonReadout, S: int, B: int, H: int, V: int, strides: tuple[int, ...],
    out_strides: tuple[int, ...],
) -> Launch | None:  # fmt: skip
    """The launch, or None if there are no rows."""
    if not S * B:
        return None
    sigmoid, numbers = norm.activation == "sigmoid", (*strides, *out_strides, norm.eps)
    if norm.groups is not None:
        tokens, sizes = _tokens_per_program(S, B), _group_sizes(norm.groups, H * V)
        return Launch(
            grouped_norm_forward_kernel, (norm.groups, triton.cdiv(S, tokens), B), S, *numbers,
            **sizes, TOKENS=tokens, SIGMOID=sigmoid, num_warps=4,
        )  # fmt: skip
    tile = norm_forward_tile(V)
    return Launch(
        gated_norm_forward_kernel, (triton.cdiv(S * H, tile.rows), B),
        S * H, norm.gate.start, *numbers,
        H=H, V=V, ROWS=tile.rows, BLOCK_V=block_dim(V), ZERO_CENTERED=norm.zero_centered,
        SIGMOID=sigmoid, num_warps=tile.warps,
    )  # fmt: skip


@lru_cache(maxsize=MOST_PLANS)
def _backward_launch(
    norm: TritonReadout, S: int, B: int, H: int, V: int, strides: tuple[int, ...],
    tile: Block | None,
) -> tuple[int, Launch | None]:  # fmt: skip
    """The number of partial rows per batch row, and the launch (None if there are no rows)."""
    if not S * B:
        return 0, None
    sigmoid, numbers = norm.activation == "sigmoid", (*strides, norm.eps)
    if norm.groups is not None:
        tokens, sizes = _tokens_per_program(S, B), _group_sizes(norm.groups, H * V)
        programs = triton.cdiv(S, tokens)
        return programs, Launch(
            grouped_norm_backward_kernel, (norm.groups, programs, B), S, *numbers,
            **sizes, TOKENS=tokens, SIGMOID=sigmoid, num_warps=4,
        )  # fmt: skip
    tile = norm_backward_tile(S * H * B, V) if tile is None else tile
    programs = triton.cdiv(S * H, tile.rows * tile.repeats)
    return programs, Launch(
        gated_norm_backward_kernel, (programs, B), S * H, norm.gate.start, *numbers,
        H=H, V=V, ROWS=tile.rows, REPEATS=tile.repeats, BLOCK_V=block_dim(V),
        ZERO_CENTERED=norm.zero_centered, SIGMOID=sigmoid, num_warps=tile.warps,
    )  # fmt: skip


def _tokens_per_program(S: int, B: int) -> int:
    """Tokens per program, by shape alone: more tokens make fewer partial rows and programs."""
    tokens = 16 if S * B >= 4096 else 4
    while triton.cdiv(S, tokens) > MOST_PROGRAMS:
        tokens *= 2
    return tokens


def _group_sizes(groups: int, channels: int) -> dict[str, int]:
    C = channels // groups
    return {"G": groups, "C": C, "BLOCK_C": block_dim(C)}


@triton.jit
def _places(row_R, first, H: tl.constexpr, V: tl.constexpr, stride_s):
    """Offsets of rows (s, h), numbered from ``first``, in strided token rows.

    Relative to the token of row ``first``, so that they fit 32 bits at any sequence length.
    """
    return ((first + row_R) // H - first // H) * stride_s + (first + row_R) % H * V


@triton.jit
def _at_token(ptr, first, stride_s, stride_b, H: tl.constexpr):
    """``ptr`` moved to the token of row ``first`` of this program's batch row."""
    b = tl.cast(tl.program_id(1), tl.int64)
    return ptr + b * stride_b + tl.cast(first // H, tl.int64) * stride_s


@triton.jit
def gated_norm_forward_kernel(
    o_ptr, proj_ptr, gamma_ptr, out_ptr,
    rows, z, stride_s, stride_b, out_stride_s, out_stride_b, eps,
    H: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, BLOCK_V: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """grid (tiles of ROWS, B); ``rows`` = S H; ``z``: the gate's first column."""
    first = tl.program_id(0) * ROWS
    row_R = tl.arange(0, ROWS)
    d_V = tl.arange(0, BLOCK_V)
    real_V = d_V < V
    real_RV = (first + row_R < rows)[:, None] & real_V[None, :]
    o_ptr += (tl.cast(tl.program_id(1), tl.int64) * rows + first) * V
    z_ptr = _at_token(proj_ptr + z, first, stride_s, stride_b, H)
    out_ptr = _at_token(out_ptr, first, out_stride_s, out_stride_b, H)
    z_R = _places(row_R, first, H, V, stride_s)
    out_R = _places(row_R, first, H, V, out_stride_s)
    o_RV = tl.load(o_ptr + row_R[:, None] * V + d_V[None, :], mask=real_RV, other=0.0)
    z_RV = tl.load(z_ptr + z_R[:, None] + d_V[None, :], mask=real_RV, other=0.0)
    gamma_V = tl.load(gamma_ptr + d_V, mask=real_V, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gamma_V += 1.0
    o_RV = o_RV.to(tl.float32)
    z_RV = z_RV.to(tl.float32)
    r_R = tl.rsqrt(tl.sum(o_RV * o_RV, axis=1) * (1.0 / V) + eps)
    y_RV = o_RV * r_R[:, None] * gamma_V[None, :] * activated(z_RV, sigmoid(z_RV), SIGMOID)
    out_at_RV = out_ptr + out_R[:, None] + d_V[None, :]
    tl.store(out_at_RV, y_RV.to(out_ptr.dtype.element_ty), mask=real_RV)


@triton.jit
def gated_norm_backward_kernel(
    o_ptr, proj_ptr, gamma_ptr, dy_ptr, do_ptr, d_proj_ptr, partial_ptr,
    rows, z, stride_s, stride_b, d_stride_s, d_stride_b, dy_stride_s, dy_stride_b, eps,
    H: tl.constexpr, V: tl.constexpr, ROWS: tl.constexpr, REPEATS: tl.constexpr,
    BLOCK_V: tl.constexpr, ZERO_CENTERED: tl.constexpr, SIGMOID: tl.constexpr,
):  # fmt: skip
    """With n = o * r and s = act(z):  d_gamma = sum dy n s;  dz = dy n gamma act'(z);
    dn = dy gamma s;  do = r (dn - n mean(dn n)).  grid (tiles of ROWS * REPEATS, B); rows = S H;
    ``z``: the gate's first column.
    """
    d_V = tl.arange(0, BLOCK_V)
    real_V = d_V < V
    gamma_V = tl.load(gamma_ptr + d_V, mask=real_V, other=0.0).to(tl.float32)
    if ZERO_CENTERED:
        gamma_V += 1.0
    d_gamma_RV = tl.zeros((ROWS, BLOCK_V), tl.float32)
    first = tl.program_id(0) * (ROWS * REPEATS)
    base = (tl.cast(tl.program_id(1), tl.int64) * rows + first) * V
    o_ptr += base
    do_ptr += base
    z_ptr = _at_token(proj_ptr + z, first, stride_s, stride_b, H)
    dz_ptr = _at_token(d_proj_ptr + z, first, d_stride_s, d_stride_b, H)
    dy_ptr = _at_token(dy_ptr, first, dy_stride_s, dy_stride_b, H)

    row_R = tl.arange(0, ROWS)
    real_RV = (first + row_R < rows)[:, None] & real_V[None, :]
    z_at_RV = _places(row_R, first, H, V, stride_s)[:, None] + d_V[None, :]
    dy_at_RV = _places(row_R, first, H, V, dy_stride_s)[:, None] + d_V[None, :]
    o_RV = tl.load(o_ptr + row_R[:, None] * V + d_V[None, :], mask=real_RV, other=0.0)
    z_RV = tl.load(z_ptr + z_at_RV, mask=real_RV, other=0.0)
    dy_RV = tl.load(dy_ptr + dy_at_RV, mask=real_RV, other=0.0)
    for _repeat in tl.range(0, REPEATS):
        # Load the next rows before computing with these.
        next_R = row_R + ROWS
        inside_R = (first + next_R < rows) & (next_R < ROWS * REPEATS)
        real_next_RV = inside_R[:, None] & real_V[None, :]
        z_at_RV = _places(next_R, first, H, V, stride_s)[:, None] + d_V[None, :]
        dy_at_RV = _places(next_R, first, H, V, dy_stride_s)[:, None] + d_V[None, :]
        o_next_RV = tl.load(
            o_ptr + next_R[:, None] * V + d_V[None, :], mask=real_next_RV, other=0.0
        )
        z_next_RV = tl.load(z_ptr + z_at_RV, mask=real_next_RV, other=0.0)
        dy_next_RV = tl.load(dy_ptr + dy_at_RV, mask=real_next_RV, other=0.0)

        o_RV = o_RV.to(tl.float32)
        z_RV = z_RV.to(tl.float32)
        dy_RV = dy_RV.to(tl.float32)
        r_R = tl.rsqrt(tl.sum(o_RV * o_RV, axis=1) * (1.0 / V) + eps)
        n_RV = o_RV * r_R[:, None]
        sig_RV = sigmoid(z_RV)
        act_RV = activated(z_RV, sig_RV, SIGMOID)
        dyn_RV = dy_RV * n_RV
        d_gamma_RV += dyn_RV * act_RV
        dz_RV = dyn_RV * gamma_V[None, :] * activated_slope(act_RV, sig_RV, SIGMOID)
        dn_RV = dy_RV * gamma_V[None, :] * act_RV
        mean_R = tl.sum(dn_RV * n_RV, axis=1) * (1.0 / V)
        do_RV = r_R[:, None] * (dn_RV - n_RV * mean_R[:, None])
        tl.store(
            do_ptr + row_R[:, None] * V + d_V[None, :],
            do_RV.to(do_ptr.dtype.element_ty),
            mask=real_RV,
        )
        dz_at_RV = _places(row_R, first, H, V, d_stride_s)[:, None] + d_V[None, :]
        tl.store(dz_ptr + dz_at_RV, dz_RV.to(dz_ptr.dtype.element_ty), mask=real_RV)
        row_R = next_R
        real_RV = real_next_RV
        o_RV = o_next_RV
        z_RV = z_next_RV
        dy_RV = dy_next_RV
    partial_ptr += (tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)) * V
    tl.store(partial_ptr + d_V, tl.sum(d_gamma_RV, axis=0), mask=real_V)


@triton.jit(do_not_specialize=["S"])
def grouped_norm_forward_kernel(
    o_ptr, z_ptr, gamma_ptr, out_ptr, S, stride_s, stride_b, out_stride_s, out_stride_b, eps,
    G: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, TOKENS: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """grid (G, token tiles, B); ``o`` is ``[B, S, G C]``, z strided rows."""
    group = tl.program_id(0)
    b = tl.cast(tl.program_id(2), tl.int64)
    c_C = tl.arange(0, BLOCK_C)
    real_C = c_C < C
    column_C = group * C + c_C
    gamma_C = tl.load(gamma_ptr + column_C, mask=real_C, other=0.0).to(tl.float32)
    first = tl.program_id(1) * TOKENS
    for step in tl.range(0, TOKENS):
        t = tl.cast(first + step, tl.int64)
        real = real_C & (t < S)
        o_C = tl.load(o_ptr + (b * S + t) * (G * C) + column_C, mask=real, other=0.0)
        z_C = tl.load(z_ptr + t * stride_s + b * stride_b + column_C, mask=real, other=0.0)
        z_C = z_C.to(tl.float32)
        u_C = o_C.to(tl.float32) * activated(z_C, sigmoid(z_C), SIGMOID)
        r = tl.rsqrt(tl.sum(u_C * u_C, axis=0) * (1.0 / C) + eps)
        y_C = u_C * r * gamma_C
        at_C = out_ptr + t * out_stride_s + b * out_stride_b + column_C
        tl.store(at_C, y_C.to(out_ptr.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["S"])
def grouped_norm_backward_kernel(
    o_ptr, z_ptr, gamma_ptr, dy_ptr, do_ptr, dz_ptr, partial_ptr,
    S, stride_s, stride_b, d_stride_s, d_stride_b, dy_stride_s, dy_stride_b, eps,
    G: tl.constexpr, C: tl.constexpr, BLOCK_C: tl.constexpr, TOKENS: tl.constexpr,
    SIGMOID: tl.constexpr,
):  # fmt: skip
    """d_gamma = sum dy n;  du = r (dy gamma - n mean(dy gamma n));  do = du act(z);
    dz = du o act'(z).  grid (G, token tiles, B); each program writes its stretch of a partial row.
    """
    group = tl.program_id(0)
    b = tl.cast(tl.program_id(2), tl.int64)
    c_C = tl.arange(0, BLOCK_C)
    real_C = c_C < C
    column_C = group * C + c_C
    gamma_C = tl.load(gamma_ptr + column_C, mask=real_C, other=0.0).to(tl.float32)
    d_gamma_C = tl.zeros((BLOCK_C,), tl.float32)
    first = tl.program_id(1) * TOKENS
    for step in tl.range(0, TOKENS):
        t = tl.cast(first + step, tl.int64)
        real = real_C & (t < S)
        at_o = (b * S + t) * (G * C) + column_C
        o_C = tl.load(o_ptr + at_o, mask=real, other=0.0).to(tl.float32)
        z_C = tl.load(z_ptr + t * stride_s + b * stride_b + column_C, mask=real, other=0.0)
        at_dy = dy_ptr + t * dy_stride_s + b * dy_stride_b + column_C
        dy_C = tl.load(at_dy, mask=real, other=0.0).to(tl.float32)
        z_C = z_C.to(tl.float32)
        sig_C = sigmoid(z_C)
        act_C = activated(z_C, sig_C, SIGMOID)
        u_C = o_C * act_C
        r = tl.rsqrt(tl.sum(u_C * u_C, axis=0) * (1.0 / C) + eps)
        n_C = u_C * r
        d_gamma_C += dy_C * n_C
        dn_C = dy_C * gamma_C
        mean = tl.sum(dn_C * n_C, axis=0) * (1.0 / C)
        du_C = r * (dn_C - n_C * mean)
        tl.store(do_ptr + at_o, (du_C * act_C).to(do_ptr.dtype.element_ty), mask=real)
        dz_C = du_C * o_C * activated_slope(act_C, sig_C, SIGMOID)
        at_dz = dz_ptr + t * d_stride_s + b * d_stride_b + column_C
        tl.store(at_dz, dz_C.to(dz_ptr.dtype.element_ty), mask=real)
    partial_ptr += (b * tl.num_programs(1) + tl.program_id(1)) * (G * C)
    tl.store(partial_ptr + column_C, d_gamma_C, mask=real_C)

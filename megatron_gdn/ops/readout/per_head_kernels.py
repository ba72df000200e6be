"""Triton kernels of the readout per head: RMSNorm(o) * act(z), forward and backward.

Legend: S seq, B batch, H value heads, V value dim; R rows of a tile, one per (token, head).

Rows are numbered as ``o [B, S, H, V]`` stores them. z stays where the projection put it, and its
gradient goes to the same columns of the projection's gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.elementwise import activated, activated_slope, sigmoid


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

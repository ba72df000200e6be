"""Triton kernels of the readout per group: the gate, then RMSNorm over a group's channels.

    u = o act(z)        n = u r,  r = rsqrt(mean(u^2) + eps)        y = n gamma

Legend: S seq, B batch, G groups, C channels of a group; one program handles one group of a few
tokens, one after another.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.elementwise import activated, activated_slope, sigmoid


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

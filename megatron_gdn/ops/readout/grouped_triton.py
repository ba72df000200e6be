"""The readout per group as one launch each way (Triton); :class:`.plain.Grouped` is its twin.

Legend: S seq, B batch, P projection width, H heads, V head dim.

Triton kernels of the readout per group: the gate, then RMSNorm over a group's channels.

    u = o act(z)        n = u r,  r = rsqrt(mean(u^2) + eps)        y = n gamma

Legend: S seq, B batch, G groups, C channels of a group; one program handles one group of a few
tokens, one after another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.elementwise import activated, activated_slope, sigmoid
from ..kernels.reduce import sum_rows
from ..kernels.tiles import MOST_PROGRAMS, block_dim
from .plain import Grouped


def _tokens(S: int, B: int) -> int:
    """Tokens per program, by shape alone: a balance of few partial rows and many programs."""
    tokens = 16 if S * B >= 4096 else 4
    while triton.cdiv(S, tokens) > MOST_PROGRAMS:
        tokens *= 2
    return tokens


@dataclass(frozen=True)
class TritonGrouped(Grouped):
    """The readout per group in Triton; fp32 inside."""

    def _shape(self, o: Tensor) -> dict[str, Any]:
        channels = (self.gate.stop - self.gate.start) // self.groups
        assert o.is_contiguous() and o.shape[2] * o.shape[3] == channels * self.groups
        return {
            "G": self.groups, "C": channels, "BLOCK_C": block_dim(channels),
            "SIGMOID": self.activation == "sigmoid",
        }  # fmt: skip

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor, *, out: Tensor | None = None
    ) -> Tensor:
        S, B, _ = rows.shape
        out = rows.new_empty(S, B, self.gate.stop - self.gate.start) if out is None else out
        tokens = _tokens(S, B)
        grouped_norm_forward_kernel[(self.groups, triton.cdiv(S, tokens), B)](
            o, rows[..., self.gate.start :], gamma, out, S,
            rows.stride(0), rows.stride(1), out.stride(0), out.stride(1), self.eps,
            TOKENS=tokens, num_warps=4, **self._shape(o),
        )  # fmt: skip
        return out

    def backward(
        self, d_out: Tensor, o: Tensor, rows: Tensor, gamma: Tensor, d_rows: Tensor
    ) -> tuple[Tensor, Tensor]:
        S, B, _ = rows.shape
        if d_out.stride(2) != 1:
            d_out = d_out.contiguous()
        z, tokens = self.gate, _tokens(S, B)
        tiles = triton.cdiv(S, tokens)
        d_o = torch.empty_like(o, dtype=rows.dtype)
        partial = torch.empty(B * tiles, z.stop - z.start, dtype=torch.float32, device=rows.device)
        grouped_norm_backward_kernel[(self.groups, tiles, B)](
            o, rows[..., z.start :], gamma, d_out, d_o, d_rows[..., z.start :], partial, S,
            rows.stride(0), rows.stride(1), d_rows.stride(0), d_rows.stride(1),
            d_out.stride(0), d_out.stride(1), self.eps,
            TOKENS=tokens, num_warps=4, **self._shape(o),
        )  # fmt: skip
        d_gamma = torch.empty_like(gamma)
        sum_rows(partial, d_gamma)
        return d_o, d_gamma


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

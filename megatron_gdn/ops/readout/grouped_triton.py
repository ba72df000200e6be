"""The grouped output norm as one launch each way (Triton); :mod:`.grouped` is its plain twin.

Legend: S seq, B batch, P projection width, H heads, V head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from ..kernels.reduce import sum_rows
from ..kernels.tiles import MOST_PROGRAMS, block_dim
from .grouped_kernels import grouped_norm_backward_kernel, grouped_norm_forward_kernel


def _tokens(S: int, B: int) -> int:
    """Tokens of a program: few partial rows, many programs; by shape alone."""
    tokens = 16 if S * B >= 4096 else 4
    while triton.cdiv(S, tokens) > MOST_PROGRAMS:
        tokens *= 2
    return tokens


@dataclass(frozen=True)
class TritonGateThenNorm:
    """The calls of :class:`.grouped.GateThenNorm`, over ``groups`` groups; fp32 inside."""

    groups: int

    def _shape(self, o: Tensor, z: slice) -> dict[str, int]:
        channels = (z.stop - z.start) // self.groups
        assert o.is_contiguous() and o.shape[2] * o.shape[3] == channels * self.groups
        return {"G": self.groups, "C": channels, "BLOCK_C": block_dim(channels)}

    def gated_norm_forward(
        self,
        o: Tensor,
        proj: Tensor,
        gamma: Tensor,
        z: slice,
        *,
        eps: float = 1e-5,
        zero_centered: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        assert not zero_centered
        S, B, _ = proj.shape
        out = proj.new_empty(S, B, z.stop - z.start) if out is None else out
        tokens = _tokens(S, B)
        grouped_norm_forward_kernel[(self.groups, triton.cdiv(S, tokens), B)](
            o, proj[..., z.start :], gamma, out, S,
            proj.stride(0), proj.stride(1), out.stride(0), out.stride(1), eps,
            TOKENS=tokens, num_warps=4, **self._shape(o, z),
        )  # fmt: skip
        return out

    def gated_norm_backward(
        self,
        d_out: Tensor,
        o: Tensor,
        proj: Tensor,
        gamma: Tensor,
        z: slice,
        d_proj: Tensor,
        *,
        eps: float = 1e-5,
        zero_centered: bool = False,
    ) -> tuple[Tensor, Tensor]:
        S, B, _ = proj.shape
        if d_out.stride(2) != 1:
            d_out = d_out.contiguous()
        tokens = _tokens(S, B)
        tiles = triton.cdiv(S, tokens)
        d_o = torch.empty_like(o, dtype=proj.dtype)
        partial = torch.empty(B * tiles, z.stop - z.start, dtype=torch.float32, device=proj.device)
        grouped_norm_backward_kernel[(self.groups, tiles, B)](
            o, proj[..., z.start :], gamma, d_out, d_o, d_proj[..., z.start :], partial, S,
            proj.stride(0), proj.stride(1), d_proj.stride(0), d_proj.stride(1),
            d_out.stride(0), d_out.stride(1), eps,
            TOKENS=tokens, num_warps=4, **self._shape(o, z),
        )  # fmt: skip
        d_gamma = torch.empty_like(gamma)
        sum_rows(partial, d_gamma)
        return d_o, d_gamma

"""The readout per group as one launch each way (Triton); :class:`.grouped.Grouped` is its twin.

Legend: S seq, B batch, P projection width, H heads, V head dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from ..kernels.reduce import sum_rows
from ..kernels.tiles import MOST_PROGRAMS, block_dim
from .grouped import Grouped
from .grouped_kernels import grouped_norm_backward_kernel, grouped_norm_forward_kernel


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

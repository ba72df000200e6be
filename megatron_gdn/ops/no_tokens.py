"""The mixer of a batch without tokens, so that kernels and rules never get an empty batch.

Legend: S seq, B batch, P projection width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .first_derivative import first_derivative_only


class _Nothing(torch.autograd.Function):
    """A tensor without elements, and zero gradients for its inputs."""

    @staticmethod
    def forward(ctx, shape: tuple[int, ...], proj: Tensor, *parameters: Tensor | None):
        ctx.save_for_backward(proj, *parameters)
        return proj.new_empty(shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_out: Tensor):
        return None, *(None if x is None else torch.zeros_like(x) for x in ctx.saved_tensors)


def mix_no_tokens(rows: Tensor, *parameters: Tensor | None, width: int) -> Tensor:
    """``[S, B, width]`` for rows with S or B zero.

    The parameters are inputs, so that they get gradients on this rank as on any other.
    """
    return _Nothing.apply((*rows.shape[:2], width), rows, *parameters)

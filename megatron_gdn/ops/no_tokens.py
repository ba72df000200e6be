"""The mixer of a batch without tokens, so that kernels and rules never get an empty batch.

Legend: S seq, B batch, P projection width, H value heads, V value dim.
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


def mix_no_tokens(
    proj: Tensor, *parameters: Tensor | None, z: slice, heads: int, with_norm: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """What :func:`.mixer.mix` returns for a ``proj`` with S or B zero.

    ``z`` are the gate's columns, of ``heads`` heads.

    The parameters are inputs, so that they get gradients on this rank as on any other.
    """
    S, B, _ = proj.shape
    width = z.stop - z.start
    if with_norm:
        return _Nothing.apply((S, B, width), proj, *parameters)
    o = _Nothing.apply((B, S, heads, width // heads), proj, *parameters)
    return o, proj[..., z].unflatten(-1, (heads, -1)).transpose(0, 1)

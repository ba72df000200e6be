"""The mixer of a batch without tokens, which no kernel and no core needs to know of.

Legend: S seq, B batch, P projection width, H value heads, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .head_sizes import HeadSizes


class _Nothing(torch.autograd.Function):
    """A tensor without elements, and a zero gradient for all that it would be made of."""

    @staticmethod
    def forward(ctx, shape: tuple[int, ...], proj: Tensor, *parameters: Tensor | None):
        ctx.save_for_backward(proj, *parameters)
        return proj.new_empty(shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_out: Tensor):
        return None, *(None if x is None else torch.zeros_like(x) for x in ctx.saved_tensors)


def mix_no_tokens(
    proj: Tensor, *parameters: Tensor | None, sizes: HeadSizes, with_norm: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """What :func:`.mixer.gated_delta_mixer` returns for a ``proj`` with S or B zero.

    The parameters take part, so that they have gradients on this rank as on any other.
    """
    S, B, _ = proj.shape
    H, V = sizes.value_heads, sizes.value_dim
    if with_norm:
        return _Nothing.apply((S, B, H * V), proj, *parameters)
    z = proj[..., sizes.z_column : sizes.beta_column]
    o = _Nothing.apply((B, S, H, V), proj, *parameters)
    return o, z.unflatten(-1, (H, V)).transpose(0, 1)

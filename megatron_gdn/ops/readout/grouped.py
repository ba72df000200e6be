"""The readout of Mamba2: the gate first, then RMSNorm over the channels of each group.

    u = o * act(gate)        y = u * rsqrt(mean_group(u^2) + eps) * gamma

(``RMSNormGated`` with ``norm_before_gate=False``.) A group is ``heads / groups`` neighbouring
heads, and the norm needs all of them on one rank. If they are not, :class:`GateOnly` runs with the
recurrence, and :func:`grouped_rms_norm` runs after the heads are together again.

Legend: S seq, B batch, H heads with a state, V columns of a state, C = H V channels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..first_derivative import first_derivative_only
from .base import ACTIVATIONS
from .plain import PlainReadout


def _normalised(u: Tensor, gamma: Tensor, groups: int, eps: float) -> Tensor:
    """``[..., C]`` in fp32, differentiable."""
    u = u.unflatten(-1, (groups, -1))
    u = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + eps)
    return u.flatten(-2) * gamma


class _GroupedRMSNorm(torch.autograd.Function):
    """Saves its inputs only."""

    @staticmethod
    def forward(ctx, x: Tensor, gamma: Tensor, groups: int, eps: float) -> Tensor:
        ctx.save_for_backward(x, gamma)
        ctx.groups, ctx.eps = groups, eps
        wide = torch.promote_types(x.dtype, torch.float32)
        return _normalised(x.to(wide), gamma.to(wide), groups, eps).to(x.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_y: Tensor):
        x, gamma = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.enable_grad():
            leaves = [t.detach().to(wide).requires_grad_() for t in (x, gamma)]
            y = _normalised(leaves[0], leaves[1], ctx.groups, ctx.eps)
        d_x, d_gamma = torch.autograd.grad(y, leaves, d_y.to(wide))
        return d_x.to(x.dtype), d_gamma.to(gamma.dtype), None, None


def grouped_rms_norm(x: Tensor, gamma: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    """``x * rsqrt(mean_group(x^2) + eps) * gamma``.

    Args:
        x: ``[..., C]``.
        gamma: ``[C]``.
        groups: number of equal stretches of channels. Each is normalised by itself.

    Returns:
        ``[..., C]`` in ``x.dtype``.

    Raises:
        ValueError: the channels do not divide into the groups, or gamma has another size.
    """
    channels = x.shape[-1]
    if groups < 1 or channels % groups or tuple(gamma.shape) != (channels,):
        raise ValueError(
            f"grouped_rms_norm: {channels} channels, gamma of shape {tuple(gamma.shape)} and "
            f"{groups} groups; gamma must be [{channels}], and the groups must divide the channels."
        )
    return _GroupedRMSNorm.apply(x, gamma, groups, eps)


@dataclass(frozen=True)
class GateOnly(PlainReadout):
    """``o * act(gate)`` without a norm; gamma is None."""

    def _of(self, o: Tensor, gate: Tensor, gamma: Tensor | None) -> Tensor:
        return o.flatten(2).transpose(0, 1) * ACTIVATIONS[self.activation](gate)


@dataclass(frozen=True)
class Grouped(GateOnly):
    """In plain torch; gamma is ``[C]``.

    Attributes:
        groups: number of equal stretches of neighbouring heads.
        eps: added to the mean square.
    """

    groups: int = 1
    eps: float = 1e-5

    def _of(self, o: Tensor, gate: Tensor, gamma: Tensor | None) -> Tensor:
        assert gamma is not None
        return _normalised(super()._of(o, gate, None), gamma, self.groups, self.eps)

"""Readouts in plain torch, from one differentiable function: any device, fp64 for fp64.

Legend: S seq, B batch, P projection width, H heads with a state, V columns of a state.

The readout of a Gated DeltaNet: RMSNorm over each head, then the gate.

    y = o * rsqrt(mean(o^2) + eps) * gamma * act(gate)

:mod:`.per_head_triton` has the kernels; :class:`PerHead` is their plain twin.

Legend: S seq, B batch, H heads with a state, V columns of a state.

The readout of Mamba2: the gate first, then RMSNorm over the channels of each group.

    u = o * act(gate)        y = u * rsqrt(mean_group(u^2) + eps) * gamma

(``RMSNormGated`` with ``norm_before_gate=False``.) A group is ``heads / groups`` neighbouring
heads, and the norm needs all of them on one rank. If they are not, :class:`GateOnly` runs with the
recurrence, and :func:`grouped_rms_norm` runs after the heads are together again.

Legend: S seq, B batch, H heads with a state, V columns of a state, C = H V channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..autograd import first_derivative_only
from ..elementwise import rms_norm
from .base import ACTIVATIONS


@dataclass(frozen=True)
class PlainReadout:
    """A :class:`.base.Readout` whose backward is autograd of its forward.

    Attributes:
        gate: columns of a row, H * V of them.
        activation: ``"silu"`` or ``"sigmoid"``, of the gate.
    """

    gate: slice
    activation: str = "silu"
    reads_o: ClassVar[bool] = True

    def _of(self, o: Tensor, gate: Tensor, gamma: Tensor | None) -> Tensor:
        """``[B, S, H, V]`` and ``[S, B, H V]`` to ``[S, B, H V]``, all in fp32 or wider."""
        raise NotImplementedError

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        of_norm = None if gamma is None else gamma.to(wide)
        y = self._of(o.to(wide), rows[..., self.gate].to(wide), of_norm)
        return y.to(rows.dtype).contiguous() if out is None else out.copy_(y)

    def backward(
        self, d_out: Tensor, o: Tensor, rows: Tensor, gamma: Tensor | None, d_rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        given = (o, rows[..., self.gate]) if gamma is None else (o, rows[..., self.gate], gamma)
        leaves = [x.detach().to(wide).requires_grad_() for x in given]
        with torch.enable_grad():
            y = self._of(leaves[0], leaves[1], None if gamma is None else leaves[2])
        d_o, d_gate, *d_gamma = torch.autograd.grad(y, leaves, d_out.to(wide))
        d_rows[..., self.gate] = d_gate
        of_norm = None if gamma is None else d_gamma[0].to(gamma.dtype)
        return d_o.to(rows.dtype).contiguous(), of_norm


@dataclass(frozen=True)
class PerHead(PlainReadout):
    """In plain torch; gamma is ``[V]``.

    Attributes:
        eps: added to the mean square.
        zero_centered: scale by ``1 + gamma``.
    """

    eps: float = 1e-6
    zero_centered: bool = False

    def _of(self, o: Tensor, gate: Tensor, gamma: Tensor | None) -> Tensor:
        normed = rms_norm(o, gamma, self.eps, self.zero_centered)
        gate = gate.unflatten(-1, o.shape[2:]).transpose(0, 1)
        y = normed * ACTIVATIONS[self.activation](gate)
        return y.transpose(0, 1).flatten(2)


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

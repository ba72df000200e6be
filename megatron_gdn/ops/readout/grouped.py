"""The output norm of Mamba2: the gate first, then RMSNorm over the channels of each group.

    u = o * silu(z)        y = u * rsqrt(mean_group(u^2) + eps) * gamma

(``RMSNormGated`` with ``norm_before_gate=False``.) A group is ``heads / groups`` neighbours, so the
norm needs them all on one rank. Where they are not, :class:`GateOnly` runs in the mixer and
:func:`grouped_rms_norm` after the heads are back together.

Objects here stand where a mixer takes the functions of :mod:`.norm`. Arithmetic is fp32 (fp64 for
fp64), rounded once.

Legend: S seq, B batch, P projection width, H heads, V head dim, C = H V channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..elementwise import silu
from ..first_derivative import first_derivative_only


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


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
        return _normalised(x.to(_wide(x)), gamma.to(_wide(x)), groups, eps).to(x.dtype)

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_y: Tensor):
        x, gamma = ctx.saved_tensors
        wide = _wide(x)
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
        groups: equal stretches of channels that are normalised each by themselves.

    Returns:
        ``[..., C]`` in ``x.dtype``.

    Raises:
        ValueError: the channels do not divide into the groups, or gamma has another size.
    """
    channels = x.shape[-1]
    if groups < 1 or channels % groups or tuple(gamma.shape) != (channels,):
        raise ValueError(
            f"grouped_rms_norm: {channels} channels, gamma of shape {tuple(gamma.shape)} and "
            f"{groups} groups; gamma must be [{channels}], and the channels a multiple."
        )
    return _GroupedRMSNorm.apply(x, gamma, groups, eps)


def gated(o: Tensor, z_rows: Tensor) -> Tensor:
    """``o * silu(z)`` as ``[S, B, C]`` in fp32, from ``[B, S, H, V]`` and ``[S, B, C]``."""
    wide = _wide(z_rows)
    return o.to(wide).flatten(2).transpose(0, 1) * silu(z_rows.to(wide))


@dataclass(frozen=True)
class GateThenNorm:
    """The functions of :mod:`.norm_torch` for a gate before a norm over ``groups`` groups."""

    groups: int

    def gated_norm_forward(
        self,
        o: Tensor,
        proj: Tensor,
        gamma: Tensor | None,
        z: slice,
        *,
        eps: float = 1e-5,
        zero_centered: bool = False,
        out: Tensor | None = None,
    ) -> Tensor:
        """``[B, S, H, V]`` and the gate's columns of ``[S, B, P]`` to ``[S, B, H V]``."""
        assert not zero_centered
        y = self._of(o, proj[..., z], None if gamma is None else gamma.to(_wide(proj)), eps)
        return y.to(proj.dtype).contiguous() if out is None else out.copy_(y)

    def _of(self, o: Tensor, z_rows: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        assert gamma is not None
        return _normalised(gated(o, z_rows), gamma, self.groups, eps)

    def gated_norm_backward(
        self,
        d_out: Tensor,
        o: Tensor,
        proj: Tensor,
        gamma: Tensor | None,
        z: slice,
        d_proj: Tensor,
        *,
        eps: float = 1e-5,
        zero_centered: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of o (in ``proj``'s dtype) and gamma; writes z's columns of ``d_proj``."""
        wide = _wide(proj)
        tensors = (o, proj[..., z]) if gamma is None else (o, proj[..., z], gamma)
        with torch.enable_grad():
            leaves = [x.detach().to(wide).requires_grad_() for x in tensors]
            y = self._of(leaves[0], leaves[1], None if gamma is None else leaves[2], eps)
        d_o, d_z, *d_gamma = torch.autograd.grad(y, leaves, d_out.to(wide))
        d_proj[..., z] = d_z
        of_gamma = None if gamma is None else d_gamma[0].to(gamma.dtype)
        return d_o.to(proj.dtype).contiguous(), of_gamma


class GateOnly(GateThenNorm):
    """The same without the norm: ``o * silu(z)``; gamma is None."""

    def __init__(self) -> None:
        super().__init__(1)

    def _of(self, o: Tensor, z_rows: Tensor, gamma: Tensor | None, eps: float) -> Tensor:
        assert gamma is None
        return gated(o, z_rows)


def gate_then_norm(groups: int | None, triton: bool) -> Any:
    """The functions over ``groups`` groups, plain or in Triton; None: the gate alone."""
    if groups is None:
        return GateOnly()
    if triton:
        from .grouped_triton import TritonGateThenNorm

        return TritonGateThenNorm(groups)
    return GateThenNorm(groups)

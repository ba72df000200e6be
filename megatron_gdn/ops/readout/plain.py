"""The readout of norm and gate in plain torch; :mod:`.kernels` has the same in Triton.

    groups is None    y = o * rsqrt(mean_head(o^2) + eps) * gamma * act(gate)          gamma [V]
    groups            y = u * rsqrt(mean_group(u^2) + eps) * gamma                     gamma [H V]
                      u = o * act(gate), which is y if gamma is None

A group is ``H / groups`` neighbouring heads, and its norm needs all of them on one rank. If they
are on several ranks, the gate alone runs with the recurrence, and :func:`grouped_rms_norm` runs
after the heads are together again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..autograd import gradients, saving_inputs
from ..elementwise import rms_norm
from .base import ACTIVATIONS


@dataclass(frozen=True)
class PlainReadout:
    """A :class:`.base.Readout` on any device, fp64 for fp64."""

    gate: slice  # columns of a row, H * V of them
    activation: str = "silu"  # of the gate, or "sigmoid"
    eps: float = 1e-6  # added to the mean square
    zero_centered: bool = False  # scale by ``1 + gamma``, in a norm per head
    groups: int | None = None  # normalised behind the gate; None: a norm per head, before it

    reads_o: ClassVar[bool] = True

    def _of(self, o: Tensor, gate: Tensor, gamma: Tensor | None = None) -> Tensor:
        """``[B, S, H, V]`` and ``[S, B, H V]`` to ``[S, B, H V]``, all in fp32 or wider."""
        act = ACTIVATIONS[self.activation]
        if self.groups is None and gamma is not None:
            normed = rms_norm(o, gamma, self.eps, self.zero_centered)
            y = normed * act(gate.unflatten(-1, o.shape[2:]).transpose(0, 1))
            return y.transpose(0, 1).flatten(2)
        u = o.flatten(2).transpose(0, 1) * act(gate)
        return u if gamma is None else _normalised(u, gamma, self.groups or 1, self.eps)

    def _given(self, o: Tensor, rows: Tensor, gamma: Tensor | None) -> list[Tensor]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        return [x.to(wide) for x in (o, rows[..., self.gate], gamma) if x is not None]

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        y = self._of(*self._given(o, rows, gamma))
        return y.to(rows.dtype).contiguous() if out is None else out.copy_(y)

    def backward(
        self, d_out: Tensor, o: Tensor, rows: Tensor, gamma: Tensor | None, d_rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        given = self._given(o, rows, gamma)
        d_o, d_gate, *d_gamma = gradients(self._of, given, d_out.to(given[0].dtype))
        d_rows[..., self.gate] = d_gate
        of_norm = None if gamma is None else d_gamma[0].to(gamma.dtype)
        return d_o.to(rows.dtype).contiguous(), of_norm


def _normalised(u: Tensor, gamma: Tensor, groups: int, eps: float) -> Tensor:
    """``[..., C]`` in fp32, differentiable."""
    return rms_norm(u.unflatten(-1, (groups, -1)), None, eps).flatten(-2) * gamma


def grouped_rms_norm(x: Tensor, gamma: Tensor, groups: int, eps: float = 1e-5) -> Tensor:
    """``x * rsqrt(mean_group(x^2) + eps) * gamma``, ``[..., C]`` in ``x.dtype``.

    Raises:
        ValueError: the channels do not divide into the groups, or gamma is not ``[C]``.
    """
    channels = x.shape[-1]
    if groups < 1 or channels % groups or tuple(gamma.shape) != (channels,):
        raise ValueError(
            f"grouped_rms_norm: {channels} channels, gamma of shape {tuple(gamma.shape)} and "
            f"{groups} groups; gamma must be [{channels}], and the groups must divide the channels."
        )
    wide = torch.promote_types(x.dtype, torch.float32)

    def normed(x: Tensor, gamma: Tensor) -> Tensor:
        return _normalised(x.to(wide), gamma.to(wide), groups, eps).to(x.dtype)

    return saving_inputs(normed, x, gamma)

"""Readouts compute the rows for out_proj from the output o of a rule.

    norm per head    y = o * rsqrt(mean_head(o^2) + eps) * gamma * act(z)    gamma [V]
    norm per group   y = u * rsqrt(mean_group(u^2) + eps) * gamma            gamma [H V]
    gate alone       u = o * act(z)
    a module         y = norm(o, z)                             :class:`SplitReadout`

The output gate z is a section of the projection rows. Arithmetic is fp32 (fp64 for fp64
tensors), and the result is rounded once. :mod:`.kernels` has the norms per head and per
group in Triton.

A group is ``H / groups`` adjacent heads, and a norm per group needs all heads of the
group on one rank. If a head exchange puts a group's heads on several ranks, these ranks
apply only the gate. :func:`grouped_rms_norm` runs later, after the exchange that brings
the heads together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from ..autograd import gradients, run_saving_inputs
from ..elementwise import rms_norm, sigmoid, silu

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": silu, "sigmoid": sigmoid}


class Readout(Protocol):
    """The norm and the gate of a rule's output; callers, not autograd, run
    `backward`."""

    reads_o: ClassVar[bool]  # whether the backward reads o

    @property
    def gate_columns(self) -> slice:
        """The H * V columns of a projection row that hold the output gate."""
        ...

    def forward(
        self,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """The rows for out_proj, contiguous ``[S, B, H * V]``; written to ``out`` if
        given.

        ``o`` is ``[B, S, H, V]``, contiguous, in any dtype; ``rows`` is ``[S, B, P]``
        with any strides of S and B, in the dtype of the result; ``gamma`` is None
        without a norm.
        """
        ...

    def backward(
        self,
        d_out: Tensor,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        d_rows: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of o ``[B, S, H, V]``, in the dtype of ``rows``, and of gamma.

        ``d_out [S, B, H * V]`` is the gradient of the forward's result; ``o``, ``rows``
        and ``gamma`` are the forward's arguments. Writes the gate's gradient to the
        gate's columns of ``d_rows [S, B, P]``, and no other columns.
        """
        ...


def view_heads(mixed: Tensor, heads: int) -> Tensor:
    """View rows ``mixed`` ``[S, B, H * V]`` as ``[B, S, H, V]``; ``heads`` is H."""
    return mixed.unflatten(-1, (heads, -1)).transpose(0, 1)


@dataclass(frozen=True)
class PlainReadout:
    """A :class:`Readout` in plain torch on any device; fp64 tensors are computed in
    fp64."""

    gate_columns: slice  # the H * V columns of a projection row that hold the gate
    # the gate's activation; the other legal value is "sigmoid"
    activation: str = "silu"
    eps: float = 1e-6  # added to the mean square
    zero_centered: bool = False  # whether a norm per head scales by ``1 + gamma``
    # None: a norm per head, then the gate. A number: the gate, then a norm over each of
    # so many groups of heads.
    groups: int | None = None

    reads_o: ClassVar[bool] = True

    def _norm_and_gate(
        self, o: Tensor, gate: Tensor, gamma: Tensor | None = None
    ) -> Tensor:
        """Apply the norm and the gate ``act(gate)`` to ``o [B, S, H, V]``. ``gate`` and
        the result are ``[S, B, H V]``."""
        act = ACTIVATIONS[self.activation]
        if self.groups is None and gamma is not None:
            normed = rms_norm(o, gamma, self.eps, self.zero_centered)
            gate_BSHV = gate.unflatten(-1, o.shape[2:]).transpose(0, 1)
            y = normed * act(gate_BSHV)
            return y.transpose(0, 1).flatten(2)
        u = o.flatten(2).transpose(0, 1) * act(gate)
        if gamma is None:
            return u
        assert self.groups is not None
        return _norm_per_group(u, gamma, self.groups, self.eps)

    def _wide_inputs(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None
    ) -> list[Tensor]:
        """``o``, the gate's columns of ``rows``, and ``gamma`` unless None, in fp32 or
        fp64."""
        wide = torch.promote_types(rows.dtype, torch.float32)
        return [
            x.to(wide)
            for x in (o, rows[..., self.gate_columns], gamma)
            if x is not None
        ]

    def forward(
        self,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Apply the norm and the gate in ``rows [S, B, P]`` to ``o [B, S, H, V]``.

        The result is ``[S, B, H V]``, written to ``out`` if given. If gamma is None,
        only the gate is applied.
        """
        y = self._norm_and_gate(*self._wide_inputs(o, rows, gamma))
        if out is None:
            return y.to(rows.dtype).contiguous()
        return out.copy_(y)

    def backward(
        self,
        d_out: Tensor,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        d_rows: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of o and gamma from ``d_out [S, B, H V]``; the forward runs again
        under autograd. The gate's gradient is written to its columns of
        ``d_rows [S, B, P]``."""
        inputs = self._wide_inputs(o, rows, gamma)
        # the gradients of o, of the gate and, if there is a norm, of gamma
        found = gradients(self._norm_and_gate, inputs, d_out.to(inputs[0].dtype))
        d_o = found[0].to(rows.dtype).contiguous()
        d_rows[..., self.gate_columns] = found[1]
        if gamma is None:
            return d_o, None
        return d_o, found[2].to(gamma.dtype)


def _norm_per_group(u: Tensor, gamma: Tensor, groups: int, eps: float) -> Tensor:
    """RMS norm over each of the ``groups`` of ``u [..., C]``, times ``gamma [C]``;
    differentiable."""
    return rms_norm(u.unflatten(-1, (groups, -1)), None, eps).flatten(-2) * gamma


def grouped_rms_norm(x: Tensor, gamma: Tensor, groups: int, eps: float) -> Tensor:
    """``x * rsqrt(mean_group(x^2) + eps) * gamma``, ``[..., C]`` in ``x.dtype``.

    Raises:
        ValueError: ``groups`` does not divide C, or gamma is not ``[C]``.
    """
    channels = x.shape[-1]
    if groups < 1 or channels % groups or tuple(gamma.shape) != (channels,):
        raise ValueError(
            f"grouped_rms_norm: {channels} channels, gamma of shape "
            f"{tuple(gamma.shape)} and {groups} groups; gamma must be [{channels}], "
            "and the groups must divide the channels."
        )
    wide = torch.promote_types(x.dtype, torch.float32)

    def normed(x: Tensor, gamma: Tensor) -> Tensor:
        """The norm of ``x`` per group, times ``gamma``; computed in fp32 or fp64."""
        return _norm_per_group(x.to(wide), gamma.to(wide), groups, eps).to(x.dtype)

    return run_saving_inputs(normed, x, gamma)


@dataclass(frozen=True)
class PassThroughReadout:
    """A readout that only reshapes ``o`` to rows; the gradient of the gate's columns is
    zero.

    It is the first step of a :class:`SplitReadout` whose second step has norm and gate.
    """

    gate_columns: slice
    heads: int

    reads_o: ClassVar[bool] = False

    def forward(
        self,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """``o [B, S, H, V]`` as contiguous rows ``[S, B, H V]`` in the dtype of
        ``rows``, or copied to ``out``; ``gamma`` is ignored."""
        y = o.to(rows.dtype).flatten(2).transpose(0, 1)
        if out is None:
            return y.contiguous()
        return out.copy_(y)

    def backward(
        self,
        d_out: Tensor,
        o: Tensor | None,
        rows: Tensor,
        gamma: Tensor | None,
        d_rows: Tensor,
    ) -> tuple[Tensor, None]:
        """``d_out [S, B, H V]`` as ``[B, S, H, V]``, and None for gamma.

        Sets the gate's columns of ``d_rows`` to zero, since `Readout.backward` must
        write them.
        """
        d_rows[..., self.gate_columns].zero_()
        return view_heads(d_out, self.heads).contiguous(), None


@dataclass(frozen=True, eq=False)
class SplitReadout:
    """A readout in two steps: the first runs in the mixer's autograd function, the
    second after this function.

    Autograd differentiates the second step.
    """

    first_step: Readout
    # (mixed [S, B, H V], rows [S, B, P]) -> [S, B, H V]; a step that does not read the
    # rows may get None
    second_step: Callable[[Tensor, Any], Tensor]
    # Whether the second step runs after an exchange of heads, which gives this rank all
    # heads of its tokens.
    second_step_after_exchange: bool = False

    @property
    def gate_columns(self) -> slice:
        return self.first_step.gate_columns

    def forward(
        self,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
    ) -> Tensor:
        """Run both steps on ``o [B, S, H, V]``; the result is ``[S, B, H V]``. All heads
        must be on this rank, as in generation."""
        return self.second_step(self.first_step.forward(o, rows, gamma), rows)


def readout_by_module(
    gate_columns: slice, heads: int, norm: Callable[[Tensor, Tensor], Tensor]
) -> SplitReadout:
    """The readout that calls a module ``norm(o, z)`` with tensors ``[B, S, H, V]``.

    ``gate_columns``: the columns of z in a projection row. ``heads`` is H.
    """

    def call_norm(mixed: Tensor, rows: Tensor) -> Tensor:
        """The second step: from ``mixed [S, B, H V]``, the reshaped o, and
        ``rows [S, B, P]`` to ``[S, B, H V]``."""
        o = view_heads(mixed, heads)
        z = view_heads(rows[..., gate_columns], heads)
        return norm(o, z).flatten(2).transpose(0, 1).contiguous()

    return SplitReadout(PassThroughReadout(gate_columns, heads), call_norm)

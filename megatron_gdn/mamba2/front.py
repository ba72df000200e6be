"""The front of a Mamba2 mixer: conv + SiLU, time steps and decays.

    x, B, C = SiLU(conv(x, B, C))
    dt      = clamp(softplus(dt + dt_bias), *dt_limit);    g = -exp(A_log) dt

Nothing is saved between forward and backward: the backward computes again from the rows.

Legend: S seq, Bt batch, P projection width, C conv channels, W taps, H heads, G groups, V head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial
from typing import Any, cast

import torch
from torch import Tensor

from ..ops.autograd import gradients
from ..ops.conv import convolve_rows
from ..ops.documents import Documents
from ..ops.elementwise import largest_A_log, least_log_decay, softplus
from ..ops.front import conv_package
from ..ops.front.base import Parameters, StepForm
from ..ops.front.conv_package import why_not_conv_package
from ..ops.front.history import History
from ..ops.layout import Layout
from ..ops.obstacles import why_not_triton
from ..ops.parts import GatedNorm, Parts, readout_of
from ..ops.readout.base import Apart
from ..ops.rules.base import Rule
from ..ops.state_maps.state_map import StateShape
from .plain import UNLIMITED, SSDInputs


def time_steps(
    dt_H: Tensor, A_log_H: Tensor, dt_bias_H: Tensor, limit: tuple[float, float] = UNLIMITED
) -> tuple[Tensor, Tensor]:
    """Raw columns to time steps ``dt >= 0`` and log-decays ``g = -exp(A_log) dt <= 0``, in fp32.

    g and ``A_log`` are clamped as in :func:`..ops.elementwise.decay_and_write_gates`; ``limit`` is
    the least and greatest time step.
    """
    wide = torch.promote_types(A_log_H.dtype, torch.float32)
    dt_H = softplus(dt_H.to(wide) + dt_bias_H.to(wide))
    if tuple(limit) != UNLIMITED:
        dt_H = dt_H.clamp(*limit)
    rate_H = A_log_H.to(wide).clamp(max=largest_A_log(wide)).exp()
    return dt_H, (-rate_H * dt_H).clamp(min=least_log_decay(wide))


@dataclass(frozen=True, eq=False)
class Mamba2Front:
    """A :class:`~..ops.front.base.Front` of projection rows z | x | B | C | dt.

    Parameters: conv weight ``[C, 1, W]``, conv bias ``[C]`` or None, A_log ``[H]``, dt_bias
    ``[H]``, D ``[H]`` or ``[H V]``; and dt ``[S, Bt, H]`` if the rows do not hold it. The rule gets
    D for every token, as a view of the parameter.

    Attributes:
        triton: convolve with the kernels of :mod:`.kernels`, not by ``convolve``.
        batch_invariant: the bits of a packed document do not depend on where it lies.
    """

    layout: Layout
    dt_limit: tuple[float, float] = UNLIMITED
    triton: bool = False
    batch_invariant: bool = False
    convolve: Callable[..., Tensor] = convolve_rows

    names = SSDInputs._fields
    convolved = ("x", "B", "C")
    again = cast(tuple[str, ...], ())

    @property
    def state(self) -> StateShape:
        widths = {section.name: section.width for section in self.layout.sections}
        return StateShape(self.layout.heads("head"), widths["B"], widths["x"], diagonal=True)

    @cached_property
    def step(self) -> StepForm:
        def gates(rows: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
            dt, g = time_steps(self._dt_rows(rows), A_log, dt_bias, self.dt_limit)
            return g, dt

        kernel = self._kernel_gates if self.triton else None
        return StepForm(("C", "B", "x"), gates, kernel, erases=False)

    def _kernel_gates(self) -> tuple[Any, tuple[int, int], tuple[float, float]]:
        from .kernels import step_gates

        return step_gates, (self.layout.columns("dt").start, 0), self.dt_limit

    def _cut(self, rows: Tensor) -> tuple[Tensor, ...]:
        """``[Bt, S, C]`` to x, B and C with heads."""
        heads = map(self.layout.heads, ("head", "group", "group"))
        sections = rows.split(self.layout.conv_widths, dim=-1)
        return tuple(x.unflatten(-1, (n, -1)) for x, n in zip(sections, heads, strict=True))

    def _conv_rows(self, proj: Tensor) -> Tensor:
        return proj.transpose(0, 1)[..., self.layout.conv_columns]

    def _dt_rows(self, proj: Tensor) -> Tensor:
        return proj.transpose(0, 1)[..., self.layout.columns("dt")]

    @torch.no_grad()
    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
        history: History | None = None,
    ) -> SSDInputs:
        weight, bias, A_log, dt_bias, D, *apart = parameters
        wanted = self.names if only is None else only
        made: dict[str, Any] = dict.fromkeys(self.names)
        if any(name in wanted for name in self.convolved):
            convolved = self._convolve(proj, weight, bias, documents, history)
            made.update(zip(self.convolved, convolved, strict=True))
        if "dt" in wanted or "g" in wanted:
            raw = apart[0].transpose(0, 1) if apart else self._dt_rows(proj)
            dt, g = time_steps(raw, A_log, dt_bias, self.dt_limit)
            made.update(dt=dt.contiguous(), g=g.contiguous())
        if "D" in wanted:
            wide = torch.promote_types(D.dtype, torch.float32)
            D = D.to(wide).view(self.layout.state_heads, -1)
            made["D"] = D.expand(proj.shape[1], proj.shape[0], -1, -1)
        kept: dict[str, Any] = {n: x if n in wanted else None for n, x in made.items()}
        return SSDInputs(**kept)

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: SSDInputs,
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None = None,
    ) -> tuple[Tensor | None, ...]:
        weight, bias, A_log, dt_bias, D, *apart = parameters
        d_apart = [torch.empty_like(x) for x in apart]
        raw, d_raw = self._dt_rows(proj), self._dt_rows(d_proj)
        if apart:
            raw, d_raw = apart[0].transpose(0, 1), d_apart[0].transpose(0, 1)
        gates = partial(time_steps, limit=self.dt_limit)
        d_dt, d_A_log, d_dt_bias = gradients(gates, (raw, A_log, dt_bias), (grads.dt, grads.g))
        d_raw.copy_(d_dt)
        d_weight, d_bias = self._convolve_backward(
            proj, weight, bias, grads[:3], d_proj, documents, history
        )
        d_D = grads.D.sum((0, 1)).to(D.dtype).view(D.shape)
        return d_weight, d_bias, d_A_log, d_dt_bias, d_D, *d_apart

    def _convolve(
        self,
        proj: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        documents: Documents | None,
        history: History | None,
    ) -> tuple[Tensor, ...]:
        """x, B and C."""
        if self.triton:
            from .kernels import conv_forward

            return conv_forward(
                proj, weight, bias, self.layout, documents, self.batch_invariant, history
            )
        rows = self.convolve(self._conv_rows(proj), weight.flatten(1), bias, documents, history)
        return tuple(x.contiguous() for x in self._cut(rows))

    def _convolve_backward(
        self,
        proj: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        grads: tuple[Tensor, Tensor, Tensor],
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of weight and bias; writes the convolved columns of ``d_proj``."""
        if self.triton:
            from .kernels import conv_backward

            return conv_backward(
                proj, weight, bias, self.layout, grads, d_proj, documents, self.batch_invariant,
                history,
            )  # fmt: skip
        wide = torch.promote_types(proj.dtype, torch.float32)
        before = None if history is None else history.rows.to(wide)  # its gradient travels in this
        given = (self._conv_rows(proj), weight.flatten(1), bias, before)

        def run(rows: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None) -> Tensor:
            past = history and history._replace(rows=before)
            return self.convolve(rows, weight, bias, documents, past)

        d_rows = torch.cat([x.flatten(2) for x in grads], dim=-1).to(proj.dtype)
        d_conv, d_weight, d_bias, d_before = gradients(run, given, d_rows)
        if history is not None and history.d_rows is not None:
            history.d_rows.copy_(d_before)
        self._conv_rows(d_proj).copy_(d_conv)
        return d_weight.view(weight.shape), d_bias


def mamba2_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | Apart | None,
    dt_limit: tuple[float, float] = UNLIMITED,
    kernels: str = "auto",
    gates: Tensor | None = None,
) -> Parts:
    """The :class:`Parts` of a Mamba2 mixer.

    Args:
        rows: ``[S, B, P]``; their device and dtype choose the kernels.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        D: ``[H]`` or ``[H V]``, fp32.
        layout: rows z | x | B | C | dt.
        rule: from :func:`.rule.choose_ssd`.
        norm: gamma ``[H V]`` and eps of the norm over each group, or a readout that calls the norm;
            None: the gate alone.
        dt_limit: least and greatest time step.
        kernels: ``"triton"``, ``"torch"`` or ``"auto"``: Triton where it runs, else causal-conv1d
            for the convolution where that runs, else plain torch.
        gates: dt ``[S, B, H]``, if ``rows`` end before it; not for generation.

    Raises:
        ValueError: rows of other heads; unknown ``kernels``.
    """
    width = layout.width if gates is None else layout.main_width
    if rows.shape[-1] != width:
        raise ValueError(
            f"projection rows of {rows.shape[-1]} columns, but z, x, B, C and dt of these heads "
            f"have {width}: {dict(zip(layout.names, layout.widths, strict=True))}."
        )
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown kernels {kernels!r}; use 'auto', 'triton' or 'torch'.")
    triton, convolve = kernels == "triton", convolve_rows
    if kernels == "auto":
        kind = rows.device.type, rows.dtype, conv_weight.shape[-1]
        triton = why_not_triton(*kind) is None
        widths = (sum(layout.conv_widths),)
        aligned = getattr(rule, "aligned", False)
        if not triton and why_not_conv_package(*kind, widths, aligned) is None:
            convolve = conv_package.convolve_rows
    readout, gamma = readout_of(norm, layout.gate_columns, triton, layout.heads("group"))
    front = _front(layout, tuple(dt_limit), triton, rule.batch_invariant, convolve)
    apart = () if gates is None else (gates,)
    return Parts(front, rule, readout, (conv_weight, conv_bias, A_log, dt_bias, D, *apart, gamma))


_front = lru_cache(maxsize=64)(Mamba2Front)

"""The front of Kimi Delta Attention: that of a Gated DeltaNet, with gates per channel.

    q, k    = l2norm(silu(conv(x)));  v = silu(conv(x))
    g, beta as in :func:`channel_gates`

Legend: S seq, B batch, P projection width, C conv channels, W taps, H heads, K key dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ..ops.autograd import gradients
from ..ops.delta_rule.base import RuleGrads, RuleInputs
from ..ops.delta_rule.front_choice import is_triton, kernels_for
from ..ops.documents import Documents
from ..ops.elementwise import largest_A_log, least_log_decay, sigmoid, softplus
from ..ops.front.base import Parameters
from ..ops.front.history import History
from ..ops.layout import Layout
from ..ops.parts import GatedNorm, Parts, readout_of
from ..ops.readout.base import Apart
from ..ops.rules.base import Rule
from ..ops.state_maps.state_map import StateShape
from .rule import RecurrentKDA
from .sizes import sizes_of


@dataclass(frozen=True, eq=False)
class KDAFront:
    """A :class:`~..ops.front.base.Front` of rows query | key | value | f | z | beta.

    Parameters: conv weight ``[C, 1, W]``, conv bias ``[C]`` or None, A_log ``[H]``, dt_bias
    ``[H K]``. Attributes are as of :class:`..gdn.front.GDNFront`; ``lower_bound`` is g's.
    """

    layout: Layout
    kernels: Any
    lower_bound: float | None = None
    dtype: torch.dtype | None = None
    batch_invariant: bool = False
    again: tuple[str, ...] = ("g",)

    names = RuleInputs._fields
    convolved = ("q", "k", "v")

    step_rule = RecurrentKDA()

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        device: str,
        dtype: torch.dtype,
        taps: int,
        layout: Layout,
        lower_bound: float | None = None,
        batch_invariant: bool = False,
        again: tuple[str, ...] = ("g",),
        kernels: str = "auto",
        aligned: bool = False,
    ) -> KDAFront:
        """The front of rows in ``dtype``, as :meth:`..gdn.front.GDNFront.of`."""
        module = kernels_for(device, dtype, taps, sizes_of(layout), kernels, aligned)
        return KDAFront(layout, module, lower_bound, None, batch_invariant, again)

    @property
    def state(self) -> StateShape:
        return sizes_of(self.layout).state

    def for_step(self, dtype: torch.dtype) -> KDAFront:
        wide = torch.promote_types(dtype, torch.float32)
        return KDAFront(self.layout, self.kernels, self.lower_bound, wide)

    def _gate_rows(self, proj: Tensor) -> tuple[Tensor, Tensor]:
        rows = proj.transpose(0, 1)
        return rows[..., self.layout.columns("f")], rows[..., self.layout.columns("beta")]

    def _conv_rows(self, proj: Tensor) -> Tensor:
        return proj[..., self.layout.conv_columns]

    @torch.no_grad()
    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
        history: History | None = None,
    ) -> RuleInputs:
        wanted = self.names if only is None else only
        parts = "".join(name for name in self.convolved if name in wanted)
        made: dict[str, Any] = dict.fromkeys(self.names)
        if parts:
            convolved = self.kernels.prepare_forward(
                self._conv_rows(proj), *parameters, sizes_of(self.layout),
                documents=documents, dtype=self.dtype, batch_invariant=self.batch_invariant,
                parts=parts, history=history,
            )  # fmt: skip
            made.update(convolved._asdict())
        if "g" in wanted or "beta" in wanted:
            _, _, A_log, dt_bias = parameters
            g, beta = self._gates(proj, A_log, dt_bias)
            gates = {"g": g, "beta": beta}
            made.update({name: x for name, x in gates.items() if name in wanted})
        return RuleInputs(**made)

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: RuleGrads,
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None = None,
    ) -> tuple[Tensor | None, ...]:
        dq, dk, dv, dg, dbeta, _ = grads
        _, _, A_log, dt_bias = parameters
        d_A_log, d_dt_bias = self._gates_backward(proj, A_log, dt_bias, dg, dbeta, d_proj)
        d_weight, d_bias, *_ = self.kernels.prepare_backward(
            self._conv_rows(proj), *parameters, sizes_of(self.layout), dq, dk, dv, None, None,
            self._conv_rows(d_proj), documents=documents, batch_invariant=self.batch_invariant,
            history=history,
        )  # fmt: skip
        return d_weight, d_bias, d_A_log, d_dt_bias

    def _gates(self, proj: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
        if is_triton(self.kernels):
            from .kernels import gates_forward

            return gates_forward(proj, A_log, dt_bias, self.layout, self.lower_bound)
        g, beta = channel_gates(*self._gate_rows(proj), A_log, dt_bias, self.lower_bound)
        return g.contiguous(), beta.contiguous()

    def _gates_backward(
        self, proj: Tensor, A_log: Tensor, dt_bias: Tensor, dg: Tensor, dbeta: Tensor,
        d_proj: Tensor,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Gradients of A_log and dt_bias; writes the gates' columns of ``d_proj``."""
        if is_triton(self.kernels):
            from .kernels import gates_backward

            given = (A_log, dt_bias, self.layout, self.lower_bound)
            return gates_backward(proj, *given, dg, dbeta, d_proj)
        gates = partial(channel_gates, lower_bound=self.lower_bound)
        given = (*self._gate_rows(proj), A_log, dt_bias)
        *d_rows, d_A_log, d_dt_bias = gradients(gates, given, (dg, dbeta))
        for columns, gradient in zip(self._gate_rows(d_proj), d_rows, strict=True):
            columns.copy_(gradient)
        return d_A_log, d_dt_bias


def channel_gates(
    f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """Log-decays ``g <= 0`` ``[..., H, K]`` and write strength ``beta`` in (0, 1), like b.

        g    = -exp(A_log) softplus(f + dt_bias)
        g    = lower_bound sigmoid(exp(A_log) (f + dt_bias))          with a lower bound
        beta = sigmoid(b)

    in fp32 (fp64 for fp64 parameters), of f ``[..., H K]`` and b ``[..., H]``. ``A_log`` and an
    unbounded g are clamped as in :func:`..ops.elementwise.decay_and_write_gates`.
    """
    wide = torch.promote_types(A_log.dtype, torch.float32)
    rate = A_log.to(wide).clamp(max=largest_A_log(wide)).exp()[:, None]
    x = (f.to(wide) + dt_bias.to(wide)).unflatten(-1, (len(A_log), -1))
    if lower_bound is None:
        g = (-rate * softplus(x)).clamp(min=least_log_decay(wide))
    else:
        g = lower_bound * sigmoid(rate * x)
    return g, sigmoid(b.to(wide))


def kda_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | Apart,
    lower_bound: float | None = None,
    run_again: bool = False,
    kernels: str = "auto",
) -> Parts:
    """The :class:`Parts` of a Kimi Delta Attention.

    Args:
        rows: ``[S, B, P]``; their device and dtype choose the kernels.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, ``[H K]``, fp32.
        layout: rows query | key | value | f | z | beta.
        rule: from :func:`.rule.choose_kda`.
        norm: the gated output norm: gamma and its settings, or a readout that calls the norm.
        lower_bound: of the log-decay, below 0; None: unbounded.
        run_again: see :class:`Parts`.
        kernels: see :func:`..ops.delta_rule.front_choice.kernels_for`.

    Raises:
        ValueError: rows of other heads; unknown ``kernels``.
    """
    if rows.shape[-1] != layout.width:
        raise ValueError(
            f"rows of {rows.shape[-1]} columns, but query, key, value, f, z and beta of these "
            f"heads have {layout.width}: {dict(zip(layout.names, layout.widths, strict=True))}."
        )
    taps, device = conv_weight.shape[-1], rows.device.type
    again = tuple(name for name in ("g",) if name in rule.reads_again)
    front = KDAFront.of(
        device, rows.dtype, taps, layout, lower_bound, rule.batch_invariant, again, kernels,
        getattr(rule, "aligned", False),
    )  # fmt: skip
    readout, gamma = readout_of(norm, layout.gate_columns, is_triton(front.kernels))
    parameters = conv_weight, conv_bias, A_log, dt_bias, gamma
    return Parts(front, rule, readout, parameters, run_again)

"""The front of Gated DeltaNet-2: that of a Gated DeltaNet, with three gates per channel.

    q, k    = l2norm(silu(conv(x)));  v = silu(conv(x))
    g, b, w as in :func:`channel_gates`

Legend: S seq, B batch, P projection width, C conv channels, G key heads, H value heads, K key dim,
V value dim.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ops.autograd import gradients
from ..ops.delta_rule.base import HeadSizes
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
from .rule import GDN2Inputs

GATES = ("g", "b", "w")


@dataclass(frozen=True, eq=False)
class GDN2Front:
    """A :class:`~..ops.front.base.Front` of rows query | key | value | z | f | b | w.

    Parameters: conv weight ``[C, 1, W]``, conv bias ``[C]`` or None, A_log ``[G]``, dt_bias
    ``[G K]``.
    """

    layout: Layout
    kernels: Any  # of the convolution, see :func:`..ops.delta_rule.front_choice.kernels_for`
    normalise_qk: bool = True
    batch_invariant: bool = False
    again: tuple[str, ...] = GATES  # computed again in the backward

    names = GDN2Inputs._fields
    convolved = ("q", "k", "v")

    @staticmethod
    @lru_cache(maxsize=64)
    def of(
        device: str,
        dtype: torch.dtype,
        taps: int,
        layout: Layout,
        normalise_qk: bool = True,
        batch_invariant: bool = False,
        recompute_qkv: bool = False,
        kernels: str = "auto",
        aligned: bool = False,
    ) -> GDN2Front:
        module = kernels_for(device, dtype, taps, HeadSizes.of(layout), kernels, aligned)
        again = GDN2Inputs._fields if recompute_qkv else GATES
        return GDN2Front(layout, module, normalise_qk, batch_invariant, again)

    @property
    def state(self) -> StateShape:
        return HeadSizes.of(self.layout).state

    @property
    def _gate_heads(self) -> tuple[int, int, int]:
        G, H, *_ = HeadSizes.of(self.layout)
        return G, G, H

    def _gate_rows(self, proj: Tensor) -> list[Tensor]:
        rows = proj.transpose(0, 1)
        return [rows[..., self.layout.columns(name)] for name in "fbw"]

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
    ) -> GDN2Inputs:
        wanted = self.names if only is None else only
        parts = "".join(name for name in self.convolved if name in wanted)
        made: dict[str, Any] = dict.fromkeys(self.names)
        if parts:
            convolved = self.kernels.prepare_forward(
                self._conv_rows(proj), *parameters, HeadSizes.of(self.layout),
                documents=documents, batch_invariant=self.batch_invariant,
                normalise_qk=self.normalise_qk, parts=parts, history=history,
            )  # fmt: skip
            made.update({name: getattr(convolved, name) for name in self.convolved})
        if any(name in wanted for name in GATES):
            _, _, A_log, dt_bias = parameters
            g, b, w = channel_gates(*self._gate_rows(proj), A_log, dt_bias)
            flat = g, b.to(proj.dtype), w.to(proj.dtype)
            for name, x, heads in zip(GATES, flat, self._gate_heads, strict=True):
                if name in wanted:
                    made[name] = x.contiguous().unflatten(-1, (heads, -1))
        return GDN2Inputs(**made)

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: GDN2Inputs,
        d_proj: Tensor,
        documents: Documents | None,
        history: History | None = None,
    ) -> tuple[Tensor | None, ...]:
        dq, dk, dv, *d_gates = grads
        _, _, A_log, dt_bias = parameters
        given = (*self._gate_rows(proj), A_log, dt_bias)
        wide = torch.promote_types(A_log.dtype, torch.float32)
        d_made = [x.to(wide).flatten(2) for x in d_gates]
        *d_rows, d_A_log, d_dt_bias = gradients(channel_gates, given, d_made)
        for columns, gradient in zip(self._gate_rows(d_proj), d_rows, strict=True):
            columns.copy_(gradient)
        d_weight, d_bias, *_ = self.kernels.prepare_backward(
            self._conv_rows(proj), *parameters, HeadSizes.of(self.layout), dq, dk, dv, None, None,
            self._conv_rows(d_proj), documents=documents, batch_invariant=self.batch_invariant,
            normalise_qk=self.normalise_qk, history=history,
        )  # fmt: skip
        return d_weight, d_bias, d_A_log, d_dt_bias


def channel_gates(
    f: Tensor, b: Tensor, w: Tensor, A_log: Tensor, dt_bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-decay g, erase gate b and write gate w, one number per channel, in the inputs' shapes.

        g = -exp(A_log) softplus(f + dt_bias);  b = sigmoid(b);  w = sigmoid(w)

    in fp32 (fp64 for fp64 parameters), of f and b ``[..., G K]`` and w ``[..., H V]``. ``A_log``
    and g are clamped as in :func:`..ops.elementwise.decay_and_write_gates`.
    """
    wide = torch.promote_types(A_log.dtype, torch.float32)
    rate = A_log.to(wide).clamp(max=largest_A_log(wide)).exp()
    x = f.to(wide) + dt_bias.to(wide)
    g = -rate.repeat_interleave(x.shape[-1] // len(rate)) * softplus(x)
    return g.clamp(min=least_log_decay(wide)), sigmoid(b.to(wide)), sigmoid(w.to(wide))


def gdn2_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | Apart,
    normalise_qk: bool = True,
    recompute_qkv: bool = False,
    run_again: bool = False,
    kernels: str = "auto",
) -> Parts:
    """The :class:`Parts` of a Gated DeltaNet-2.

    Args:
        rows: ``[S, B, P]``; their device and dtype choose the kernels.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[G]``, ``[G K]``, fp32.
        layout: rows query | key | value | z | f | b | w.
        rule: from :func:`.rule.choose_gdn2`.
        norm: the gated output norm: gamma and its settings, or a readout that calls the norm.
        normalise_qk: scale q and k to unit length.
        recompute_qkv: compute q, k and v too again in the backward instead of saving them.
        run_again: see :class:`Parts`.
        kernels: see :func:`..ops.delta_rule.front_choice.kernels_for`.

    Raises:
        ValueError: rows of other heads; unknown ``kernels``.
    """
    if rows.shape[-1] != layout.width:
        raise ValueError(
            f"rows of {rows.shape[-1]} columns, but query, key, value, z, f, b and w of these "
            f"heads have {layout.width}: {dict(zip(layout.names, layout.widths, strict=True))}."
        )
    front = GDN2Front.of(
        rows.device.type, rows.dtype, conv_weight.shape[-1], layout, normalise_qk,
        rule.batch_invariant, recompute_qkv, kernels, getattr(rule, "aligned", False),
    )  # fmt: skip
    readout, gamma = readout_of(norm, layout.gate_columns, is_triton(front.kernels))
    parameters = conv_weight, conv_bias, A_log, dt_bias, gamma
    return Parts(front, rule, readout, parameters, run_again)

"""Mamba2 as a :class:`.step.RowMixer`.

Legend: P projection width, C conv channels, W conv taps, H heads, G groups, V head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..ops.aligned import AlignedNorm
from ..ops.documents import Documents
from ..ops.front.base import FrontAround, Parameters
from ..ops.front.gdn_front import why_not_triton
from ..ops.front.mamba2 import UNLIMITED, Mamba2Front
from ..ops.gated_norm.grouped import gate_then_norm
from ..ops.layout import Layout
from ..ops.mixer import GatedNorm
from ..ops.rule import Rule
from ..ops.ssd.base import SSDInputs
from ..ops.ssd.step import RecurrentSSD
from ..ops.state_maps.state_map import StateShape
from .carry import Carry
from .step import RowMixer


def mamba2_rows(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | Callable[[Tensor, Tensor], Tensor] | None,
    dt_limit: tuple[float, float] = UNLIMITED,
    kernels: str = "auto",
) -> RowMixer:
    """The :class:`RowMixer` of a Mamba2 mixer.

    Args:
        proj: rows as they will come; device and dtype are read from it, and its width is checked.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        D: ``[H]`` or ``[H V]``, fp32.
        layout: rows z | x | B | C | dt.
        rule: of prefill, from :func:`megatron_gdn.ops.ssd.resolve.resolve_ssd`.
        norm: gamma ``[H V]`` and eps of the norm over each group; or a function of o and the
            projection rows, ``[s, B, H V]`` and ``[s, B, P]``, gate included; None: the gate alone.
        dt_limit: least and greatest time step.
        kernels: ``"triton"``, ``"torch"`` or ``"auto"``, Triton where it runs.

    Raises:
        ValueError: a projection whose rows are not these heads; unknown ``kernels``.
    """
    if proj.shape[-1] != layout.width:
        raise ValueError(
            f"projection rows of {proj.shape[-1]} columns, but z, x, B, C and dt of these heads "
            f"have {layout.width}: {dict(zip(layout.names, layout.widths, strict=True))}."
        )
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown kernels {kernels!r}; use 'auto', 'triton' or 'torch'.")
    triton = kernels == "triton"
    if kernels == "auto":
        triton = why_not_triton(proj, conv_weight.shape[-1]) is None
    widths = {section.name: section.width for section in layout.sections}
    aligned = getattr(rule, "in_steps", False)
    front = Mamba2Front(layout, dt_limit, triton, rule.batch_invariant)
    if norm is None or isinstance(norm, GatedNorm):
        functions = gate_then_norm(None if norm is None else layout.heads("group"), triton)
        gamma, eps = (None, 0.0) if norm is None else norm[:2]
        finish = partial(
            _finish, AlignedNorm(functions) if aligned else functions, gamma, eps,
            layout.columns("z"),
        )  # fmt: skip
    else:
        finish = partial(_call, norm)
    parameters = conv_weight, conv_bias, A_log, dt_bias, D
    return RowMixer(
        front=front,
        rule=rule,
        parameters=parameters,
        state=StateShape(layout.heads("head"), widths["B"], widths["x"], diagonal=True),
        finish=finish,
        step_rule=RecurrentSSD(),
        step_front=_WideFront(front),
        aligned=aligned,
        in_slots=partial(_in_slots, parameters, layout, dt_limit) if triton else None,
    )  # fmt: skip


def _in_slots(
    parameters: tuple[Tensor, Tensor | None, Tensor, Tensor, Tensor],
    layout: Layout,
    dt_limit: tuple[float, float],
    rows: Tensor,
    memory: Carry,
    slots: Tensor,
) -> Tensor:
    from ..ops.front.mamba2_step import mamba2_step_slots

    return mamba2_step_slots(rows, *parameters, *memory, slots, layout, dt_limit=dt_limit)


def _finish(
    functions: Any, gamma: Tensor | None, eps: float, z: slice, o: Tensor, proj: Tensor
) -> Tensor:
    return functions.gated_norm_forward(o, proj, gamma, z, eps=eps)


def _call(norm: Callable[[Tensor, Tensor], Tensor], o: Tensor, proj: Tensor) -> Tensor:
    return norm(o.to(proj.dtype).flatten(2).transpose(0, 1).contiguous(), proj)


class _WideFront(FrontAround):
    """Mamba2's front whose x, B and C are as wide as the state: of a token they are few."""

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
    ) -> SSDInputs:
        wide = torch.promote_types(proj.dtype, torch.float32)
        return self._front.forward(proj.to(wide), parameters, documents, only)

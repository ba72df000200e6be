"""The front of a Mamba2 mixer, as a table: conv + SiLU, time steps and decays.

    x, B, C = SiLU(conv(x, B, C))
    dt      = clamp(softplus(dt + dt_bias), *dt_limit);    g = -exp(A_log) dt

Bt is the batch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..ops.front.gates import time_step
from ..ops.front.plain import front_of
from ..ops.front.table import Convolved, FrontTable, Gate, TableFront
from ..ops.layout import Layout
from ..ops.parts import GatedNorm, Parts, parts_of
from ..ops.readout.base import Apart
from ..ops.rules.base import Bits, Rule
from ..ops.state_maps.state_map import StateShape
from .rule import UNLIMITED, SSDInputs


@lru_cache(maxsize=64)
def mamba2_front(
    device: str,
    dtype: torch.dtype,
    taps: int,
    layout: Layout,
    dt_limit: tuple[float, float] = UNLIMITED,
    bits: Bits = Bits.FREE,
    kernels: str = "auto",
) -> TableFront:
    """The front of rows in ``dtype``, z | x | B | C | dt. All its inputs are saved."""
    (heads, columns), (_, rows) = layout.shape_of("x"), layout.shape_of("B")
    low, high = dt_limit
    table = FrontTable(
        layout,
        SSDInputs,
        StateShape(heads, rows, columns, diagonal=True),
        (Convolved("x", "x"), Convolved("B", "B"), Convolved("C", "C")),
        (Gate("dt", ("g", "dt"), time_step, rated=True, low=low, high=high),),
        shared="D",
        step_sections=("C", "B", "x"),
        erases=False,
    )
    return front_of(table, device, dtype, taps, kernels, bits)


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
        rows: ``[S, Bt, P]``; their device and dtype choose the kernels.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        D: ``[H]`` or ``[H V]``, fp32. The rule gets it for every token, as a view.
        layout: rows z | x | B | C | dt.
        rule: from :func:`.rule.choose_ssd`.
        norm: gamma ``[H V]`` and eps of the norm over each group, or a readout that calls the norm;
            None: the gate alone.
        dt_limit: least and greatest time step.
        kernels: see :func:`..ops.front.plain.front_of`.
        gates: dt ``[S, Bt, H]``, if ``rows`` end before it; not for generation.

    Raises:
        ValueError: what :func:`..ops.parts.parts_of` refuses; unknown ``kernels``.
    """
    front = mamba2_front(
        rows.device.type, rows.dtype, conv_weight.shape[-1], layout, tuple(dt_limit),
        rule.bits, kernels,
    )  # fmt: skip
    parameters, groups = (conv_weight, conv_bias, A_log, dt_bias, D), layout.heads("group")
    return parts_of(front, rows, parameters, rule, norm, groups, gates=gates)

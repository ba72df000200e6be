"""The front table of a Mamba2 mixer.

    x, B, C = SiLU(conv(x, B, C))
    dt      = clamp(softplus(dt + dt_bias), *dt_limit);    g = -exp(A_log) dt

Bt is the number of batch rows, since B is an input of the rule.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from ..ops.front.gates import time_step
from ..ops.front.table import Convolved, FrontTable, Gate
from ..ops.layout import Layout
from ..ops.parts import Parts, parts_of
from ..ops.state_maps.state_map import StateShape
from .rule import UNLIMITED, SSDInputs


@lru_cache(maxsize=64)
def mamba2_table(layout: Layout, dt_limit: tuple[float, float] = UNLIMITED) -> FrontTable:
    """The front table for rows of this layout; ``dt_limit`` bounds the time step dt."""
    (heads, columns), (_, rows) = layout.shape_of("x"), layout.shape_of("B")
    low, high = dt_limit
    return FrontTable(
        layout,
        SSDInputs,
        StateShape(heads, rows, columns, diagonal=True),
        (Convolved("x", "x"), Convolved("B", "B"), Convolved("C", "C")),
        (Gate("dt", ("g", "dt"), time_step, rated=True, low=low, high=high),),
        shared="D",
        step_sections=("C", "B", "x"),
        erases=False,
    )


def mamba2_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    layout: Layout,
    *,
    dt_limit: tuple[float, float] = UNLIMITED,
    **others: Any,
) -> Parts:
    """The :class:`Parts` of a Mamba2 mixer, with all inputs of the rule saved for the backward.

    The arguments up to ``dt_bias`` are those of :func:`..gdn.front.gdn_parts`.

    Args:
        D: ``[H]`` or ``[H V]``, fp32; the rule gets a view that repeats D for every token.
        layout: the sections of a row, z | x | B | C | dt.
        dt_limit: the least and the greatest value to which the time step dt is clamped.
        others: for :func:`..ops.parts.parts_of`, which lists the errors. ``rule`` must come from
            :func:`.rule.choose_ssd`; ``gamma`` is ``[H V]`` if the norm runs over each group.
    """
    parameters, table = (conv_weight, conv_bias, A_log, dt_bias, D), mamba2_table(layout, dt_limit)
    return parts_of(table, rows, parameters, groups=layout.heads("group"), **others)

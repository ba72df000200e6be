"""The front table of a Mamba2 mixer.

    x, B, C = SiLU(conv(x, B, C))
    dt      = clamp(softplus(dt + dt_bias), *dt_limit);    g = -exp(A_log) dt

Bt is the number of batch rows, since B is an input of the rule.
"""

from __future__ import annotations

from functools import lru_cache

from ..ops.front.gates import time_step
from ..ops.front.table import Convolved, FrontTable, Gate
from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape
from .rule import UNLIMITED, SSDInputs


@lru_cache(maxsize=64)
def mamba2_table(
    layout: Layout, dt_limit: tuple[float, float] = UNLIMITED
) -> FrontTable:
    """The front table for rows of this layout; ``dt_limit`` bounds the time step dt."""
    heads, columns = layout.shape_of("x")
    _, rows = layout.shape_of("B")
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

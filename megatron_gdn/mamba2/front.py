"""The front table of a Mamba2 mixer.

    x, B, C = SiLU(conv(x, B, C))
    dt      = clamp(softplus(dt + dt_bias), *dt_limit);    g = -exp(A_log) dt

B, C and dt are sections of a projection row. D is the parameter of the skip
connection, an input of the rule that all tokens share.
"""

from __future__ import annotations

from functools import lru_cache

from ..ops.front.gates import time_step
from ..ops.front.table import ConvolvedSection, FrontTable, GateSection
from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape
from .rule import UNLIMITED_TIME_STEPS, SSDInputs


@lru_cache(maxsize=64)
def mamba2_table(
    layout: Layout, dt_limit: tuple[float, float] = UNLIMITED_TIME_STEPS
) -> FrontTable:
    """The front table for rows of :attr:`.sizes.Mamba2Dims.layout`; ``dt_limit`` is
    the least and the greatest time step dt."""
    heads, head_dim = layout.shape_of("x")
    _, state_dim = layout.shape_of("B")
    low, high = dt_limit
    dt = GateSection("dt", ("g", "dt"), time_step, has_A_log=True, low=low, high=high)
    return FrontTable(
        layout,
        inputs_class=SSDInputs,
        state_shape=StateShape(heads, state_dim, head_dim, diagonal=True),
        convolved_sections=(
            ConvolvedSection("x", "x"),
            ConvolvedSection("B", "B"),
            ConvolvedSection("C", "C"),
        ),
        gate_sections=(dt,),
        shared_input="D",
        qkv_sections=("C", "B", "x"),
        erases=False,
    )

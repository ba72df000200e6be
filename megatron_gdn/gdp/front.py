"""The front table of a Gated DeltaProduct, a Gated DeltaNet with several updates per
token.

q, k_j = l2norm(silu(conv(x)));  v_j = silu(conv(x))          for each update j
g      = -exp(A_log) softplus(a + dt_bias);  beta_j = sigmoid(b_j)
"""

from __future__ import annotations

from functools import lru_cache

from ..ops.delta_rule.base import RuleInputs
from ..ops.front.gates import decay, strength
from ..ops.front.table import Convolved, FrontTable, Gate
from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape


@lru_cache(maxsize=64)
def gdp_table(layout: Layout, recompute_qkv: bool = False) -> FrontTable:
    """The front table for rows of :func:`.sizes.gdp_layout`.

    ``recompute_qkv``: as in :func:`..gdn.front.gdn_table`.
    """
    _, rows = layout.shape_of("Q")
    heads_of_steps, columns = layout.shape_of("V")
    return FrontTable(
        layout,
        RuleInputs,
        StateShape(layout.state_heads, rows, columns),
        (Convolved("V", "v"), Convolved("K", "k", True), Convolved("Q", "q", True)),
        (Gate("a", ("g",), decay, rated=True), Gate("b", ("beta",), strength)),
        step_sections=("Q", "K", "V"),
        scale=rows**-0.5,
        steps=heads_of_steps // layout.state_heads,
        recomputed=("q", "k", "v") if recompute_qkv else ("q",),
    )

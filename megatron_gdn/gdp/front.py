"""The front table of a Gated DeltaProduct, a Gated DeltaNet with several updates per
token.

q, k_j = l2norm(silu(conv(x)));  v_j = silu(conv(x))          for each update j
g      = -exp(A_log) softplus(a + dt_bias);  beta_j = sigmoid(b_j)
"""

from __future__ import annotations

from functools import lru_cache

from ..ops.delta_rule.base import RuleInputs
from ..ops.front.gates import decay, strength
from ..ops.front.table import ConvolvedSection, FrontTable, GateSection
from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape


@lru_cache(maxsize=64)
def gdp_table(layout: Layout, recompute_qkv: bool = False) -> FrontTable:
    """The front table for rows of :func:`.sizes.gdp_layout`.

    The backward always computes q again, with ``recompute_qkv`` also k and v.
    """
    _, key_dim = layout.shape_of("Q")
    # the run V has the heads of all updates
    heads_of_updates, value_dim = layout.shape_of("V")
    return FrontTable(
        layout,
        inputs_class=RuleInputs,
        state_shape=StateShape(layout.state_heads, key_dim, value_dim),
        convolved_sections=(
            ConvolvedSection("V", "v"),
            ConvolvedSection("K", "k", has_unit_length=True),
            ConvolvedSection("Q", "q", has_unit_length=True),
        ),
        gate_sections=(
            GateSection("a", ("g",), decay, has_A_log=True),
            GateSection("b", ("beta",), strength),
        ),
        qkv_sections=("Q", "K", "V"),
        scale=key_dim**-0.5,
        steps=heads_of_updates // layout.state_heads,
        recomputed=("q", "k", "v") if recompute_qkv else ("q",),
    )

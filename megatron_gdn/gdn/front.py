"""The front table of a Gated DeltaNet.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) * softplus(a + dt_bias)
beta = sigmoid(b), or 2 sigmoid(b) with ``allow_neg_eigval``

a is the section "alpha" of a projection row, b the section "beta".
"""

from __future__ import annotations

from functools import lru_cache

from ..ops.delta_rule.base import HeadSizes, RuleInputs, require_multiple_of_key_heads
from ..ops.elementwise import largest_beta
from ..ops.front.gates import decay, strength
from ..ops.front.table import FrontTable, GateSection, delta_sections
from ..ops.layout import Layout


@lru_cache(maxsize=64)
def gdn_table(
    layout: Layout,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    recompute_qkv: bool = False,
) -> FrontTable:
    """The front table for rows query | key | value | z | beta | alpha.

    Args:
        normalise_qk: scale q and k to unit length.
        allow_neg_eigval: write strengths in (0, 2) instead of (0, 1).
        recompute_qkv: compute q, k and v again in the backward instead of saving them.
            This saves ``2 (G K + H V)`` bytes per token in bf16 and costs one more pass
            over the projection.
    """
    sizes = HeadSizes.of(layout)
    require_multiple_of_key_heads(sizes.key_heads, sizes.value_heads)
    g = GateSection("alpha", ("g",), decay, has_A_log=True)
    beta = GateSection("beta", ("beta",), strength, high=largest_beta(allow_neg_eigval))
    return FrontTable(
        layout,
        inputs_class=RuleInputs,
        state_shape=sizes.state_shape,
        convolved_sections=delta_sections(normalise_qk),
        gate_sections=(g, beta),
        scale=sizes.key_dim**-0.5,
        # q costs least to recompute
        recomputed=("q", "k", "v") if recompute_qkv else ("q",),
    )

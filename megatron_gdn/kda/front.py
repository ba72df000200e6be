"""The front table of Kimi Delta Attention, a Gated DeltaNet with a log-decay g per
channel.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) softplus(f + dt_bias)
g    = lower_bound sigmoid(exp(A_log) (f + dt_bias))          with a lower bound
beta = sigmoid(b)

f is the section "g" of a projection row, b the section "beta".
"""

from __future__ import annotations

from functools import lru_cache

from ..ops.delta_rule.base import HeadSizes, RuleInputs
from ..ops.front.gates import bounded_decay, decay, strength
from ..ops.front.table import FrontTable, GateSection, delta_sections
from ..ops.layout import Layout


@lru_cache(maxsize=64)
def kda_table(
    layout: Layout, lower_bound: float | None = None, normalise_qk: bool = True
) -> FrontTable:
    """The front table for rows of :func:`.sizes.kda_layout`.

    ``lower_bound`` is the lower bound of g, or None. ``normalise_qk`` is as in
    :func:`..gdn.front.gdn_table`. The backward computes g again, since g in fp32 takes
    twice the memory of k in bf16.
    """
    sizes = HeadSizes.of(layout)
    g = GateSection("g", ("g",), decay, has_A_log=True, per_channel=True)
    if lower_bound is not None:
        g = g._replace(function=bounded_decay, low=lower_bound)
    return FrontTable(
        layout,
        inputs_class=RuleInputs,
        state_shape=sizes.state_shape,
        convolved_sections=delta_sections(normalise_qk),
        gate_sections=(g, GateSection("beta", ("beta",), strength)),
        scale=sizes.key_dim**-0.5,
        recomputed=("g",),
    )

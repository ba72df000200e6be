"""The front table of Kimi Delta Attention, a Gated DeltaNet with a log-decay g per channel.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) softplus(f + dt_bias)
g    = lower_bound sigmoid(exp(A_log) (f + dt_bias))          with a lower bound
beta = sigmoid(b)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from ..ops.delta_rule.base import HeadSizes, RuleInputs
from ..ops.front.gates import bounded_decay, decay, strength
from ..ops.front.table import FrontTable, Gate, delta_sections
from ..ops.layout import Layout
from ..ops.parts import Parts, parts_of
from ..ops.rules.base import Rule


@lru_cache(maxsize=64)
def kda_table(layout: Layout, lower_bound: float | None = None) -> FrontTable:
    """The front table for rows of this layout; ``lower_bound`` is a lower bound of g, or None."""
    sizes, g = HeadSizes.of(layout), Gate("f", ("g",), decay, rated=True, channels=True)
    if lower_bound is not None:
        g = g._replace(function=bounded_decay, low=lower_bound)
    gates, scale = (g, Gate("beta", ("beta",), strength)), sizes.key_dim**-0.5
    return FrontTable(layout, RuleInputs, sizes.state, delta_sections(), gates, scale=scale)


def kda_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    lower_bound: float | None = None,
    **others: Any,
) -> Parts:
    """The :class:`Parts` of Kimi Delta Attention; the backward computes g again.

    The arguments are those of :func:`..gdn.front.gdn_parts`, with ``dt_bias`` ``[H K]`` and
    ``rule`` from :func:`.rule.choose_kda`. The log-decay is above ``lower_bound``; None: no bound.
    """
    again = tuple(name for name in ("g",) if name in rule.reads_again)
    table, parameters = kda_table(layout, lower_bound), (conv_weight, conv_bias, A_log, dt_bias)
    return parts_of(table, rows, parameters, rule=rule, again=again, **others)

"""The front table of Gated DeltaNet-2, a Gated DeltaNet with three gates per channel.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) softplus(f + dt_bias);  b = sigmoid(b);  w = sigmoid(w)
"""

from __future__ import annotations

from functools import lru_cache

from ..ops.delta_rule.base import HeadSizes
from ..ops.front.gates import decay, strength
from ..ops.front.table import FrontTable, GateSection, delta_sections
from ..ops.layout import Layout
from .rule import GDN2Inputs

GATE_INPUTS = ("g", "b", "w")  # the rule's inputs that are gates


@lru_cache(maxsize=64)
def gdn2_table(
    layout: Layout, normalise_qk: bool = True, recompute_qkv: bool = False
) -> FrontTable:
    """The front table for rows of :func:`.sizes.gdn2_layout`.

    ``normalise_qk``: scale q and k to unit length. The backward always computes the
    gates again, with ``recompute_qkv`` also q, k and v.
    """
    sizes = HeadSizes.of(layout)
    g = GateSection("f", ("g",), decay, has_A_log=True, per_channel=True)
    b = GateSection("b", ("b",), strength, per_channel=True)
    w = GateSection("w", ("w",), strength, per_channel=True)
    return FrontTable(
        layout,
        inputs_class=GDN2Inputs,
        state_shape=sizes.state_shape,
        convolved_sections=delta_sections(normalise_qk),
        gate_sections=(g, b, w),
        scale=sizes.key_dim**-0.5,
        recomputed=GDN2Inputs._fields if recompute_qkv else GATE_INPUTS,
    )

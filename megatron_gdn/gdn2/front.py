"""The front table of Gated DeltaNet-2, a Gated DeltaNet with three gates per channel.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) softplus(f + dt_bias);  b = sigmoid(b);  w = sigmoid(w)
"""

from __future__ import annotations

from functools import lru_cache

from ..ops.delta_rule.base import HeadSizes
from ..ops.front.gates import decay, strength
from ..ops.front.table import FrontTable, Gate, delta_sections
from ..ops.layout import Layout
from .rule import GDN2Inputs

GATES = ("g", "b", "w")


@lru_cache(maxsize=64)
def gdn2_table(
    layout: Layout, normalise_qk: bool = True, recompute_qkv: bool = False
) -> FrontTable:
    """The front table for rows of this layout; the backward always computes the gates
    again.

    ``normalise_qk`` and ``recompute_qkv`` are as in :func:`..gdn.front.gdn_table`.
    """
    sizes = HeadSizes.of(layout)
    g = Gate("f", ("g",), decay, rated=True, channels=True)
    b, w = (Gate(name, (name,), strength, channels=True) for name in ("b", "w"))
    return FrontTable(
        layout,
        GDN2Inputs,
        sizes.state,
        delta_sections(normalise_qk),
        (g, b, w),
        scale=sizes.key_dim**-0.5,
        recomputed=GDN2Inputs._fields if recompute_qkv else GATES,
    )

"""The front table of Gated DeltaNet-2, a Gated DeltaNet with three gates per channel.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) softplus(f + dt_bias);  b = sigmoid(b);  w = sigmoid(w)
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from ..ops.delta_rule.base import HeadSizes
from ..ops.front.gates import decay, strength
from ..ops.front.table import FrontTable, Gate, delta_sections
from ..ops.layout import Layout
from ..ops.parts import Parts, parts_of
from .rule import GDN2Inputs

GATES = ("g", "b", "w")


@lru_cache(maxsize=64)
def gdn2_table(layout: Layout, normalise_qk: bool = True) -> FrontTable:
    """The front table of a Gated DeltaNet-2; ``normalise_qk`` as in :func:`gdn2_parts`."""
    sizes = HeadSizes.of(layout)
    g = Gate("f", ("g",), decay, rated=True, channels=True)
    b, w = (Gate(name, (name,), strength, channels=True) for name in ("b", "w"))
    sections, scale = delta_sections(normalise_qk), sizes.key_dim**-0.5
    return FrontTable(layout, GDN2Inputs, sizes.state, sections, (g, b, w), scale=scale)


def gdn2_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    normalise_qk: bool = True,
    recompute_qkv: bool = False,
    **others: Any,
) -> Parts:
    """The :class:`Parts` of a Gated DeltaNet-2, whose backward computes the gates again.

    The arguments are those of :func:`..gdn.front.gdn_parts`, with ``A_log`` ``[G]`` and ``dt_bias``
    ``[G K]``. ``others`` are for :func:`..ops.parts.parts_of`, which lists the errors; one of
    ``others`` is ``rule``, the result of :func:`.rule.choose_gdn2`.
    """
    again = GDN2Inputs._fields if recompute_qkv else GATES
    table, parameters = gdn2_table(layout, normalise_qk), (conv_weight, conv_bias, A_log, dt_bias)
    return parts_of(table, rows, parameters, again=again, **others)

"""The front of Gated DeltaNet-2: that of a Gated DeltaNet, with three gates per channel.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) softplus(f + dt_bias);  b = sigmoid(b);  w = sigmoid(w)
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..ops.delta_rule.base import HeadSizes
from ..ops.front import gates as gate_functions
from ..ops.front.plain import front_of
from ..ops.front.table import FrontTable, Gate, TableFront, delta_sections
from ..ops.layout import Layout
from ..ops.parts import GatedNorm, Parts, parts_of
from ..ops.readout.base import Apart
from ..ops.rules.base import Bits, Rule
from .rule import GDN2Inputs

GATES = ("g", "b", "w")


@lru_cache(maxsize=64)
def gdn2_front(
    device: str,
    dtype: torch.dtype,
    taps: int,
    layout: Layout,
    normalise_qk: bool = True,
    bits: Bits = Bits.FREE,
    recompute_qkv: bool = False,
    kernels: str = "auto",
) -> TableFront:
    """The front of rows query | key | value | z | f | b | w; the backward makes the gates again."""
    sizes = HeadSizes.of(layout)
    table = FrontTable(
        layout=layout,
        inputs=GDN2Inputs,
        state=sizes.state,
        convolved=delta_sections(normalise_qk),
        gates=(
            Gate("f", ("g",), gate_functions.decay, rated=True, channels=True),
            Gate("b", ("b",), gate_functions.strength, channels=True),
            Gate("w", ("w",), gate_functions.strength, channels=True),
        ),
        scale=sizes.key_dim**-0.5,
    )
    again = GDN2Inputs._fields if recompute_qkv else GATES
    return front_of(table, device, dtype, taps, kernels, bits, again=again)


def gdn2_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | Apart,
    normalise_qk: bool = True,
    recompute_qkv: bool = False,
    run_again: bool = False,
    kernels: str = "auto",
    gates: Tensor | None = None,
) -> Parts:
    """The :class:`Parts` of a Gated DeltaNet-2.

    Args:
        rows: ``[S, B, P]``; their device and dtype choose the kernels.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[G]``, ``[G K]``, fp32.
        layout: rows query | key | value | z | f | b | w.
        rule: from :func:`.rule.choose_gdn2`.
        norm: the gated output norm: gamma and its settings, or a readout that calls the norm.
        normalise_qk: scale q and k to unit length.
        recompute_qkv: compute q, k and v too again in the backward instead of saving them.
        run_again: see :class:`Parts`.
        kernels: see :func:`..ops.front.plain.front_of`.
        gates: f | b | w, if ``rows`` end with z; not for generation.

    Raises:
        ValueError: what :func:`..ops.parts.parts_of` refuses; unknown ``kernels``.
    """
    front = gdn2_front(
        rows.device.type, rows.dtype, conv_weight.shape[-1], layout, normalise_qk,
        rule.bits, recompute_qkv, kernels,
    )  # fmt: skip
    parameters = conv_weight, conv_bias, A_log, dt_bias
    return parts_of(front, rows, parameters, rule, norm, run_again=run_again, gates=gates)

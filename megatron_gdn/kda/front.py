"""The front of Kimi Delta Attention, as a table: that of a Gated DeltaNet, with g per channel.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) softplus(f + dt_bias)
g    = lower_bound sigmoid(exp(A_log) (f + dt_bias))          with a lower bound
beta = sigmoid(b)
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleInputs
from ..ops.front.gates import bounded_decay, decay, strength
from ..ops.front.plain import front_of
from ..ops.front.table import FrontTable, Gate, TableFront, delta_sections
from ..ops.layout import Layout
from ..ops.parts import GatedNorm, Parts, parts_of
from ..ops.readout.base import Apart
from ..ops.rules.base import Bits, Rule
from .sizes import sizes_of


@lru_cache(maxsize=64)
def kda_front(
    device: str,
    dtype: torch.dtype,
    taps: int,
    layout: Layout,
    lower_bound: float | None = None,
    bits: Bits = Bits.FREE,
    again: tuple[str, ...] = ("g",),
    kernels: str = "auto",
) -> TableFront:
    """The front of rows in ``dtype``; ``lower_bound`` is g's."""
    sizes, g = sizes_of(layout), Gate("f", ("g",), decay, rated=True, channels=True)
    if lower_bound is not None:
        g = g._replace(function=bounded_decay, low=lower_bound)
    table = FrontTable(
        layout,
        RuleInputs,
        sizes.state,
        delta_sections(),
        (g, Gate("beta", ("beta",), strength)),
        scale=sizes.key_dim**-0.5,
    )
    return front_of(table, device, dtype, taps, kernels, bits, again=again)


def kda_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | Apart,
    lower_bound: float | None = None,
    run_again: bool = False,
    kernels: str = "auto",
) -> Parts:
    """The :class:`Parts` of a Kimi Delta Attention.

    Args:
        rows: ``[S, B, P]``; their device and dtype choose the kernels.
        conv_weight, conv_bias: ``[C, 1, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, ``[H K]``, fp32.
        layout: rows query | key | value | f | z | beta.
        rule: from :func:`.rule.choose_kda`.
        norm: the gated output norm: gamma and its settings, or a readout that calls the norm.
        lower_bound: of the log-decay, below 0; None: unbounded.
        run_again: see :class:`Parts`.
        kernels: see :func:`..ops.front.plain.front_of`.

    Raises:
        ValueError: what :func:`..ops.parts.parts_of` refuses; unknown ``kernels``.
    """
    again = tuple(name for name in ("g",) if name in rule.reads_again)
    front = kda_front(
        rows.device.type, rows.dtype, conv_weight.shape[-1], layout, lower_bound,
        rule.bits, again, kernels,
    )  # fmt: skip
    parameters = conv_weight, conv_bias, A_log, dt_bias
    return parts_of(front, rows, parameters, rule, norm, run_again=run_again)

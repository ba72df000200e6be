"""The parts of a Kimi Delta Attention, from its tensors.

Legend: P width of a row, C conv channels, W conv taps, H heads, K key dim.
"""

from __future__ import annotations

from torch import Tensor

from ..kernels.obstacles import why_not_triton
from ..layout import Layout
from ..parts import GatedNorm, Parts
from ..readout.base import Apart
from ..readout.choose import per_head
from ..rules.base import Rule
from .front import KDAFront


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
        rule: from :func:`.rule.resolve.resolve_kda`.
        norm: the gated output norm: gamma and its settings, or a readout that calls the norm.
        lower_bound: of the log-decay, below 0; None: unbounded.
        run_again: see :class:`Parts`.
        kernels: see :func:`..gdn.front_choice.kernels_for`.

    Raises:
        ValueError: rows of other heads; unknown ``kernels``.
    """
    if rows.shape[-1] != layout.width:
        raise ValueError(
            f"rows of {rows.shape[-1]} columns, but query, key, value, f, z and beta of these "
            f"heads have {layout.width}: {dict(zip(layout.names, layout.widths, strict=True))}."
        )
    taps, device = conv_weight.shape[-1], rows.device.type
    again = tuple(name for name in ("g",) if name in rule.reads_again)
    front = KDAFront.of(
        device, rows.dtype, taps, layout, lower_bound, rule.batch_invariant, again, kernels,
        getattr(rule, "aligned", False),
    )  # fmt: skip
    readout, gamma = norm, None
    if isinstance(readout, GatedNorm):
        gamma, eps, zero_centered, activation = readout
        triton = kernels == "triton" or (
            kernels == "auto" and why_not_triton(device, rows.dtype, taps) is None
        )
        readout = per_head(layout.gate_columns, eps, zero_centered, triton, activation)
    parameters = conv_weight, conv_bias, A_log, dt_bias, gamma
    return Parts(front, rule, readout, parameters, run_again)

"""The stages of a mixer (front, rule and readout) from tensors, without a Megatron
module.

Each function returns the `Stages` that a layer would run on whole sequences, for
``decode`` and ``prefill``. All functions take:

    rows                   projection rows [S, B, P], any strides along S and B
    conv_weight, conv_bias [C, 1, W] or [C, W]; [C] or None
    A_log, dt_bias         fp32, with a value per head, or per channel as in the layer
    layout                 the sections of a row
    rule                   the recurrence, for example from
                           ``megatron_gdn.resolve_rule``
    norm                   the gated output norm, or a readout that calls the norm as a
                           module; None: the output is gated and not normed
    recompute              whether a backward computes front and rule again
    kernels                "auto", "triton" or "torch", for the front and the norm

and raise a ValueError for ``rows`` or ``conv_weight`` of a wrong shape or stride, and
for unknown ``kernels``.
"""

from __future__ import annotations

from torch import Tensor

from ..gdn.front import gdn_table
from ..gdn2.front import gdn2_table
from ..gdp.front import gdp_table
from ..kda.front import kda_table
from ..mamba2.front import mamba2_table
from ..mamba2.rule import UNLIMITED_TIME_STEPS
from ..ops.front.table import FrontTable
from ..ops.layout import Layout
from ..ops.readout.base import SplitReadout
from ..ops.rules.base import Rule
from ..ops.stages import GatedNorm, Stages, front_by_table, stages_of


def gdn_rows(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | SplitReadout | None,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    recompute_qkv: bool = False,
    recompute: bool = False,
    kernels: str = "auto",
) -> Stages:
    """The stages of a Gated DeltaNet, with ``A_log`` and ``dt_bias`` ``[H]``.

    Args:
        normalise_qk: scale q and k to unit length.
        allow_neg_eigval: write strengths beta in (0, 2), not in (0, 1).
        recompute_qkv: a backward computes q, k and v again, and none of them is saved.

    Raises:
        ValueError: also if ``rule`` has fp16 operands without ``normalise_qk``.
    """
    table = gdn_table(layout, normalise_qk, allow_neg_eigval, recompute_qkv)
    parameters = conv_weight, conv_bias, A_log, dt_bias
    return _stages_from_table(table, rows, parameters, rule, norm, recompute, kernels)


def gdn2_rows(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | SplitReadout | None,
    normalise_qk: bool = True,
    recompute_qkv: bool = False,
    recompute: bool = False,
    kernels: str = "auto",
) -> Stages:
    """The stages of a Gated DeltaNet-2, with ``A_log [G]`` and ``dt_bias [G K]``.

    ``normalise_qk`` and ``recompute_qkv`` are as in :func:`gdn_rows`.
    """
    table = gdn2_table(layout, normalise_qk, recompute_qkv)
    parameters = conv_weight, conv_bias, A_log, dt_bias
    return _stages_from_table(table, rows, parameters, rule, norm, recompute, kernels)


def gdp_rows(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | SplitReadout | None,
    recompute_qkv: bool = False,
    recompute: bool = False,
    kernels: str = "auto",
) -> Stages:
    """The stages of a Gated DeltaProduct, with a norm per group; the norm's gamma is
    ``[H V]``, and ``A_log`` and ``dt_bias`` are ``[H]``.

    ``recompute_qkv`` is as in :func:`gdn_rows`.
    """
    table = gdp_table(layout, recompute_qkv)
    parameters = conv_weight, conv_bias, A_log, dt_bias
    norm = _norm_per_group(norm, layout)
    return _stages_from_table(table, rows, parameters, rule, norm, recompute, kernels)


def kda_rows(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | SplitReadout | None,
    lower_bound: float | None = None,
    recompute: bool = False,
    kernels: str = "auto",
) -> Stages:
    """The stages of a Kimi Delta Attention, with ``A_log [H]`` and ``dt_bias [H K]``.

    With a ``lower_bound``, another function computes the log-decays, which are all
    above this bound (see ``kda/front.py``). None: no bound.
    """
    table = kda_table(layout, lower_bound)
    parameters = conv_weight, conv_bias, A_log, dt_bias
    return _stages_from_table(table, rows, parameters, rule, norm, recompute, kernels)


def mamba2_rows(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    norm: GatedNorm | SplitReadout | None,
    dt_limit: tuple[float, float] = UNLIMITED_TIME_STEPS,
    recompute: bool = False,
    kernels: str = "auto",
) -> Stages:
    """The stages of a Mamba2 mixer, with ``D`` ``[H]`` or ``[H V]`` and a norm per
    group.

    ``dt_limit``: the least and the greatest time step. The norm's gamma is ``[H V]``.
    """
    table = mamba2_table(layout, dt_limit)
    parameters = (conv_weight, conv_bias, A_log, dt_bias, D)
    norm = _norm_per_group(norm, layout)
    return _stages_from_table(table, rows, parameters, rule, norm, recompute, kernels)


def _norm_per_group(
    norm: GatedNorm | SplitReadout | None, layout: Layout
) -> GatedNorm | SplitReadout | None:
    """``norm``, but with one norm over the channels of each group of heads."""
    if isinstance(norm, GatedNorm):
        return norm._replace(groups=layout.heads("group"))
    return norm


def _stages_from_table(
    table: FrontTable,
    rows: Tensor,
    parameters: tuple[Tensor | None, ...],
    rule: Rule,
    norm: GatedNorm | SplitReadout | None,
    recompute: bool,
    kernels: str,
) -> Stages:
    """The stages of the mixer whose front has this ``table``; ``parameters`` are those
    of the front, the convolution's weight first."""
    weight = parameters[0]
    assert weight is not None
    front = front_by_table(
        lambda _: table,  # the table was made for this layout
        table.layout,
        rule,
        rows.device,
        rows.dtype,
        weight.shape[-1],  # taps of the convolution
        kernels,
    )
    return stages_of(front, rule, rows, parameters, norm, recompute=recompute)

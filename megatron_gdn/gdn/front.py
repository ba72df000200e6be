"""The front of a Gated DeltaNet, as a table.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) * softplus(alpha + dt_bias)
beta = sigmoid(b), or 2 sigmoid(b) with ``allow_neg_eigval``
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from ..ops.delta_rule.base import HeadSizes, RuleInputs, require_even_groups
from ..ops.elementwise import largest_beta
from ..ops.front import gates as gate_functions
from ..ops.front.plain import front_of
from ..ops.front.table import FrontTable, Gate, TableFront, delta_sections
from ..ops.parts import GatedNorm, Parts, parts_of
from ..ops.readout.base import Apart
from ..ops.rules.base import Bits, Rule


@lru_cache(maxsize=64)
def gdn_front(
    device: str,
    dtype: torch.dtype,
    taps: int,
    sizes: HeadSizes,
    operands: torch.dtype | None = None,
    bits: Bits = Bits.FREE,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    recompute_qkv: bool = False,
    kernels: str = "auto",
) -> TableFront:
    """The front of rows in ``dtype`` for a rule with this ``operand_dtype`` and marks."""
    if operands is not None and not normalise_qk:
        raise ValueError(
            f"this rule takes q and k in {operands}, whose range they may leave without unit "
            f"length; pass normalise_qk=False to resolve_rule too, or choose operands='bf16'."
        )
    table = FrontTable(
        sizes.layout,
        RuleInputs,
        sizes.state,
        delta_sections(normalise_qk),
        (
            Gate("alpha", ("g",), gate_functions.decay, rated=True),
            Gate("beta", ("beta",), gate_functions.strength, high=largest_beta(allow_neg_eigval)),
        ),
        scale=sizes.key_dim**-0.5,
    )
    return front_of(
        table, device, dtype, taps, kernels, bits, dtype=operands,
        again=("q", "k", "v") if recompute_qkv else ("q",),  # q costs the least per byte
    )  # fmt: skip


def gdn_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    rule: Rule,
    norm: GatedNorm | Apart,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    recompute_qkv: bool = False,
    recompute_rule: bool = False,
    kernels: str = "auto",
    gates: Tensor | None = None,
) -> Parts:
    """The :class:`Parts` of a Gated DeltaNet.

    Args:
        rows: ``[S, B, P]``, query | key | value | z | beta | alpha. Their device and dtype choose
            the kernels.
        conv_weight, conv_bias: ``[C, 1, W]`` or ``[C, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        rule: from :func:`.rule.resolve_rule`.
        norm: the gated output norm: gamma and its settings, or a readout that calls the norm.
        normalise_qk: scale q and k to unit length.
        allow_neg_eigval: write strengths in (0, 2) instead of (0, 1).
        recompute_qkv: compute q, k and v again in the backward instead of saving them. This saves
            ``2 (G K + H V)`` bytes per token in bf16 and costs one more pass over the projection.
        recompute_rule: compute all inputs of the rule, its output and the inverses of its chunks
            again in the backward. This saves ``2 (G K + 2 H V + 64 H) + 8 H`` bytes per token and
            costs about one more forward of the rule.
        kernels: see :func:`..ops.front.plain.front_of`.
        gates: ``[S, B, 2 H]``, beta | alpha, if ``rows`` end with z; not for generation.

    Raises:
        ValueError: what :func:`..ops.parts.parts_of` refuses; fp16 operands without
            ``normalise_qk``, unknown ``kernels``.
    """
    require_even_groups(sizes.key_heads, sizes.value_heads)
    front = gdn_front(
        rows.device.type, rows.dtype, conv_weight.shape[-1], sizes, rule.operand_dtype,
        rule.bits, normalise_qk, allow_neg_eigval, recompute_qkv, kernels,
    )  # fmt: skip
    parameters = conv_weight, conv_bias, A_log, dt_bias
    return parts_of(front, rows, parameters, rule, norm, run_again=recompute_rule, gates=gates)

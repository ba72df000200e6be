"""The front table of a Gated DeltaNet.

q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
g    = -exp(A_log) * softplus(alpha + dt_bias)
beta = sigmoid(b), or 2 sigmoid(b) with ``allow_neg_eigval``
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from torch import Tensor

from ..ops.delta_rule.base import HeadSizes, RuleInputs, require_even_groups
from ..ops.elementwise import largest_beta
from ..ops.front.gates import decay, strength
from ..ops.front.table import FrontTable, Gate, delta_sections
from ..ops.layout import Layout
from ..ops.parts import Parts, parts_of
from ..ops.rules.base import Rule


@lru_cache(maxsize=64)
def gdn_table(
    sizes: HeadSizes, normalise_qk: bool = True, allow_neg_eigval: bool = False
) -> FrontTable:
    """The front table; ``normalise_qk``: |q| = |k| = 1; ``allow_neg_eigval``: beta in (0, 2)."""
    g = Gate("alpha", ("g",), decay, rated=True)
    beta = Gate("beta", ("beta",), strength, high=largest_beta(allow_neg_eigval))
    sections, scale = delta_sections(normalise_qk), sizes.key_dim**-0.5
    return FrontTable(sizes.layout, RuleInputs, sizes.state, sections, (g, beta), scale=scale)


def gdn_parts(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    *,
    rule: Rule,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    recompute_qkv: bool = False,
    **others: Any,
) -> Parts:
    """The :class:`Parts` of a Gated DeltaNet; ``others``: for :func:`..ops.parts.parts_of`.

    Args:
        rows: ``[S, B, P]``.
        conv_weight, conv_bias: ``[C, 1, W]`` or ``[C, W]``; ``[C]`` or None.
        A_log, dt_bias: ``[H]``, fp32.
        layout: the sections of a row, query | key | value | z | beta | alpha.
        rule: the delta rule that :func:`.rule.resolve_rule` chose.
        normalise_qk: scale q and k to unit length.
        allow_neg_eigval: write strengths in (0, 2) instead of (0, 1).
        recompute_qkv: compute q, k and v again in the backward instead of saving them. This saves
            ``2 (G K + H V)`` bytes per token in bf16 and costs one more pass over the projection.

    Raises:
        ValueError: ``rule`` has fp16 operands without ``normalise_qk``, or as in ``parts_of``.
    """
    sizes = HeadSizes.of(layout)
    require_even_groups(sizes.key_heads, sizes.value_heads)
    if rule.operand_dtype is not None and not normalise_qk:
        raise ValueError(
            f"this rule takes q and k in {rule.operand_dtype}, but without unit length they may "
            f"overflow; pass normalise_qk=False to resolve_rule too, or choose operands='bf16'."
        )
    again = ("q", "k", "v") if recompute_qkv else ("q",)  # q costs least to recompute
    return parts_of(
        gdn_table(sizes, normalise_qk, allow_neg_eigval), rows,
        (conv_weight, conv_bias, A_log, dt_bias),
        rule=rule, again=again, **others,
    )  # fmt: skip

"""Inputs and gradients of the gated delta rule.

Legend: S seq, B batch, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ...rules.rows import in_one_row


class RuleInputs(NamedTuple):
    """Inputs of the rule. A backward gets None for those that the rule does not read again."""

    q: Tensor  # [B, S, G, K], unit length
    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, H, V]
    g: Tensor  # [B, S, H] fp32 log-decay
    beta: Tensor  # [B, S, H] fp32


class RuleGrads(NamedTuple):
    """Gradients of the inputs, for the front's backward.

    dq and dk may have H heads, one per value head: the front sums those of one key head. With a
    ``factor`` the true gradient of a head is ``tensor * factor[head]``, which the front computes in
    fp32. The factor is a power of two, the same for the value heads of one key head.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    factor: Tensor | None = None  # [H] fp32


def inputs_in_one_row(inputs: RuleInputs) -> RuleInputs:
    return inputs if inputs.k.shape[0] == 1 else RuleInputs(*map(in_one_row, inputs))

"""Inputs and gradients of the gated delta rule.

Legend: S seq, B batch, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor


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


def in_one_row(x: Any) -> Any:
    """``[B, S, ...]`` to ``[1, B S, ...]``, batch rows end to end, without a copy; None stays."""
    if x is None or x.shape[0] == 1:
        return x
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def inputs_in_one_row(inputs: RuleInputs) -> RuleInputs:
    return inputs if inputs.k.shape[0] == 1 else RuleInputs(*map(in_one_row, inputs))


def in_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The reverse of :func:`in_one_row`, to ``rows`` = ``[B, S]``."""
    return x if x.shape[0] == rows[0] else x.reshape(*rows, *x.shape[2:])

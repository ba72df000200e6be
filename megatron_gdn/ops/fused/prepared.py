"""What the preparation hands to the delta rule, and what its backward returns.

Legend: S seq, B batch, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Prepared(NamedTuple):
    """Inputs of the delta rule, contiguous; None where a part was not asked for."""

    q: Tensor | None  # [B, S, G, K] in the projection's dtype
    k: Tensor | None  # [B, S, G, K]
    v: Tensor | None  # [B, S, H, V]
    g: Tensor | None  # [B, S, H] fp32, <= 0
    beta: Tensor | None  # [B, S, H] fp32, in (0, 1)


class PreparedGrads(NamedTuple):
    """Parameter gradients, in the parameters' shapes and dtypes."""

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor

"""The state-space dual (SSD) in plain torch: any device, dtype and size; repeatable bit for bit.

    S_t = exp(g_t) S_{t-1} + dt_t B_t x_t^T        o_t = S_t^T C_t + D_t x_t

per head: linear attention with a scalar decay (Dao, Gu, *Transformers are SSMs*, 2024). Each of the
G groups shares B and C among H / G neighbouring heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from ..ops.delta_rule.chunk_math import Values
from ..ops.delta_rule.plain import PlainRule

UNLIMITED = (0.0, math.inf)


class SSDInputs(NamedTuple):
    """What the front makes; also the gradients of these, in the same shapes."""

    x: Tensor  # [B, S, H, V]
    B: Tensor  # [B, S, G, K], the keys
    C: Tensor  # [B, S, G, K], the queries
    dt: Tensor  # [B, S, H] fp32, >= 0
    g: Tensor  # [B, S, H] fp32 log-decay, <= 0
    D: Tensor  # [B, S, H, 1 or V] fp32; a parameter, so all tokens share its memory

    @property
    def k(self) -> Tensor:
        return self.B

    @property
    def v(self) -> Tensor:
        return self.x


class PlainSSD(PlainRule):
    """The chunk form over :class:`SSDInputs`: ``backend="reference"``."""

    reads_again = frozenset(SSDInputs._fields)
    grads = SSDInputs
    erases = False

    def values(self, x: Tensor, B: Tensor, C: Tensor, dt: Tensor, g: Tensor, D: Tensor) -> Values:
        return Values(C, B, None, dt[..., None] * x, g, skip=D * x)

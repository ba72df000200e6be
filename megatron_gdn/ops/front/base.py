"""What the preparation hands to the delta rule, and what its backward returns.

Legend: S seq, B batch, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ..delta_rule.base import Core
from ..documents import Documents


class Prepared(NamedTuple):
    """Inputs of the delta rule, contiguous; None where a part was not asked for."""

    q: Tensor | None  # [B, S, G, K] in the projection's dtype, or another one asked for
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


class Preparation(Protocol):
    """What stands between the projection and the delta rule, forward and backward.

    :mod:`.gdn` and :mod:`.gdn_torch` are two of them, and say what the arguments are.
    """

    def prepare_forward(
        self, proj, conv_weight, conv_bias, A_log, dt_bias, sizes,
        *, documents, normalise_qk, eps=..., parts=..., dtype=..., batch_invariant=...,
    ) -> Prepared: ...  # fmt: skip

    def prepare_backward(
        self, proj, conv_weight, conv_bias, A_log, dt_bias, sizes, dq, dk, dv, dg, dbeta, d_proj,
        *, documents, factor=..., normalise_qk, eps=..., batch_invariant=...,
    ) -> PreparedGrads: ...  # fmt: skip


class SplitSequences(Protocol):
    """Rows that are pieces of sequences: how to compute over them as over whole ones.

    ``pieces`` are the boundaries of the pieces in every batch row, as if they were documents.
    ``preparation`` and ``core`` give those that bring what came before a piece into it.
    """

    pieces: Documents

    def preparation(self, preparation: Preparation) -> Preparation: ...

    def core(self, core: Core) -> Core: ...

"""What the mixer asks of an implementation of the gated delta rule.

Legend: S seq, B batch, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor

from ...documents import Documents


class RuleInputs(NamedTuple):
    """``o_t = S_t^T q_t / sqrt(K)`` over these; the state starts at zero in every sequence."""

    q: Tensor  # [B, S, G, K], unit length
    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, H, V]
    g: Tensor  # [B, S, H] fp32 log-decay
    beta: Tensor  # [B, S, H] fp32


class RuleGrads(NamedTuple):
    """dq and dk may have H heads, one per value head: the receiver sums those that share one."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


class Transition(NamedTuple):
    """What a sequence does to the state: ``S_out = through @ S_in + local``, per value head."""

    local: Tensor  # [N, H, K, V] fp32: final state from a zero initial state
    through: Tensor  # [N, H, K, K] fp32: what becomes of an initial state
    work: object  # whatever the core can reuse in forward; None allowed


class Core(Protocol):
    """The delta rule as two plain calls, so that what is saved between them is the mixer's.

    ``forward`` returns o ``[B, S, H, V]``, the tensors its backward wants beside q, k, v and beta
    (None allowed), and any object that is no tensor. ``keep`` False says that no backward will
    come. ``backward`` gets ``inputs.g`` as None: a core that needs it returns it among the
    tensors, in whatever form it prefers. Neither call waits for the device.
    """

    name: str

    def forward(
        self, inputs: RuleInputs, documents: Documents | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]: ...

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> RuleGrads: ...

"""What the mixer asks of an implementation of the gated delta rule.

Legend: S seq, B batch, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..documents import Documents


class RuleInputs(NamedTuple):
    """``o_t = S_t^T q_t / sqrt(K)`` over these; the state starts at zero in every sequence."""

    q: Tensor  # [B, S, G, K], unit length
    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, H, V]
    g: Tensor  # [B, S, H] fp32 log-decay
    beta: Tensor  # [B, S, H] fp32


class RuleGrads(NamedTuple):
    """dq and dk may have H heads, one per value head: the receiver sums those that share one.

    With a ``factor`` the gradients of a head are these times the head's factor, a power of two
    that value heads of one key head have in common: the receiver multiplies, in fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor
    factor: Tensor | None = None  # [H] fp32


class Transition(NamedTuple):
    """What a sequence does to the state: ``S_out = through @ S_in + local``, per value head."""

    local: Tensor  # [N, H, K, V] fp32: final state from a zero initial state
    through: Tensor  # [N, H, K, K] fp32: what becomes of an initial state
    work: object  # whatever the core can reuse in forward; None allowed


class Core(Protocol):
    """The delta rule as plain calls, so that what is saved between them is the mixer's.

    ``forward`` returns o ``[B, S, H, V]``, the tensors its backward wants beside q, k, v and beta
    (None allowed), and any object that is no tensor. ``keep`` False says that no backward will
    come. ``backward`` gets ``inputs.g`` as None: a core that needs it returns it among the
    tensors, in whatever form it prefers. No call waits for the device. ``batch_invariant`` says
    that the bits of a sequence do not depend on the other sequences or on its place.
    ``operand_dtype`` is the dtype that q, k and v are wanted in, and that o has; None takes the
    projection's. d_o has the projection's dtype.
    """

    name: str
    batch_invariant: bool
    operand_dtype: torch.dtype | None

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


class StatePassing(Core, Protocol):
    """A core whose sequences may go on from a state, and tell what they do to one.

    States and their gradients are fp32 (fp64 for fp64 input), ``[N, H, K, V]`` over N sequences:
    the batch rows, or the non-empty documents. Without a state a sequence starts at zero, and
    final states that get no gradient count for nothing, as in :class:`Core`.

        S_out  = through @ S_in + local                 transition
        dS_in  = through^T @ dS_out + d_local           d_initial

    The initial state is not among the saved tensors: the caller hands it in again. ``work`` is
    what ``transition`` or ``d_initial`` returned for the same inputs, to be used again, once. That
    of a core for fp16 operands is, from ``d_initial``, None or a tensor of gradients
    ``[., H, ., .]``, linear in ``d_o``.
    """

    def transition(self, inputs: RuleInputs, documents: Documents | None) -> Transition: ...

    def forward(
        self,
        inputs: RuleInputs,
        documents: Documents | None,
        keep: bool,
        initial: Tensor | None = None,
        work: object = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]: ...

    def d_initial(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> tuple[Tensor, object]: ...

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
        initial: Tensor | None = None,
        d_final: Tensor | None = None,
        work: object = None,
    ) -> RuleGrads: ...


def can_pass_states(core: Core) -> bool:
    return hasattr(core, "transition")

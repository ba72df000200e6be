"""What a mixer asks of a recurrence: staged plain calls, with states in and out.

    forward = rule.begin(inputs, documents)      backward = rule.begin_backward(d_o, inputs, ...)
    forward.state_map()     S_out(S_in)          backward.d_initial()   dS_in where dS_out is 0
    forward.run(initial)    o and S_out          backward.run(initial, d_final)        the rest

A stage keeps what its calls share, so asking for the map first costs little more than the run. No
call waits for the device. Between the stages nothing is kept but the tensors that the mixer saves.

States and their gradients are fp32 (fp64 for fp64 inputs), ``[N, H, K, V]``. N counts sequences:
the batch rows, or the non-empty documents. Documents of several batch rows lie end to end, row
after row. Without a state a sequence starts at zero.

Legend: B batch, S seq, N sequences, H heads with a state, K rows of a state, V columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .documents import Documents
from .state_maps.state_map import StateMap


class Saved(NamedTuple):
    """What a forward leaves for its backward beside the inputs.

    Attributes:
        tensors: saved by autograd.
        plan: how the batch was run, in the rule's own type; None where the documents say it all.
    """

    tensors: tuple[Tensor | None, ...] = ()
    plan: Any = None


class RuleOutput(NamedTuple):
    """Of one forward."""

    o: Tensor  # [B, S, H, V]
    final: Tensor | None  # [N, H, K, V], if asked for
    saved: Saved  # empty tensors where no backward will come


class RuleForward(Protocol):
    """A forward that has begun."""

    def state_map(self) -> StateMap:
        """What each of the N sequences does to the state that enters it."""
        ...

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The output, from the states that enter the sequences.

        Args:
            initial: ``[N, H, K, V]``; None is zero.
            keep: whether a backward will come.
            final: also return the states after the last tokens.
        """
        ...


class RuleBackward(Protocol):
    """A backward that has begun."""

    def d_initial(self) -> Tensor:
        """``[N, H, K, V]``: the gradient of the states that enter, where those that leave get none.

        The gradient for a ``d_final`` is this plus ``through^T @ d_final``.
        """
        ...

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> Any:
        """The gradients of the inputs, in the rule's own tuple.

        Args:
            initial: as the forward had it.
            d_final: ``[N, H, K, V]``, the gradient of the states that leave; None is zero.
        """
        ...


class ScalableBackward(RuleBackward, Protocol):
    """A backward whose d_o may be scaled after it has begun, see :mod:`.delta_rule.half`."""

    def d_o_was_scaled(self, by: Tensor) -> None:
        """Take note that d_o was multiplied in place by ``by`` ``[H, 1, 1]``, powers of two."""
        ...


class Rule(Protocol):
    """A recurrence over the inputs that a front makes.

    Attributes:
        name: as users ask for it.
        batch_invariant: the bits of a sequence do not depend on the others or on its place.
        operand_dtype: the dtype that the inputs are wanted in and ``o`` has; None takes the
            projection's. ``d_o`` has the projection's dtype.
        reads_again: names of the inputs that the backward reads. The others are None there.
    """

    name: str
    batch_invariant: bool
    operand_dtype: torch.dtype | None
    reads_again: frozenset[str]

    def why_not_heads(self, heads: int) -> str | None:
        """Why this many heads on a rank cannot run; None when they can."""
        ...

    def begin(self, inputs: Any, documents: Documents | None) -> RuleForward: ...

    def begin_backward(
        self, d_o: Tensor, inputs: Any, saved: Saved, documents: Documents | None
    ) -> RuleBackward:
        """``d_o`` is handed over: a rule that makes another form of it frees this one."""
        ...

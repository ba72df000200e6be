"""The interface of a recurrence: staged plain calls, with states in and out.

    forward = rule.begin(inputs, documents)      backward = rule.begin_backward(d_o, inputs, ...)
    forward.state_map()     S_out(S_in)          backward.d_initial()   dS_in where dS_out is 0
    forward.run(initial)    o and S_out          backward.run(initial, d_final)        the rest

A stage keeps what its calls share. No call waits for the device.

States and their gradients are fp32 (fp64 for fp64 inputs), ``[N, H, K, V]``. N counts sequences:
the batch rows, or the non-empty documents, row after row. Without a state a sequence starts at
zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..documents import Documents
from ..layout import Layout
from ..state_maps.state_map import StateMap


class Bits(IntEnum):
    """A promise about the bits of a result; each promise includes the promises before it."""

    FREE = 0
    DETERMINISTIC = 1  # a sequence's do not change with the run, nor with the rest of the batch
    ON_GRID = 2  # a token's depend on the tokens of its sequence alone, see :mod:`..aligned`


class Saved(NamedTuple):
    """The tensors that a forward keeps for its backward beside the inputs."""

    tensors: tuple[Any, ...] = ()  # saved by autograd; None where a rule has none to save
    plan: Any = None  # how the batch was run, in the rule's own type
    made: Any = None  # what a second run of the forward has made for the backward


class RuleOutput(NamedTuple):
    """The result of one forward."""

    o: Tensor  # [B, S, H, V]
    final: Tensor | None  # [N, H, K, V], if asked for
    saved: Saved  # no tensors if keep is False


class _Stage:
    """The inputs of a stage, packed documents in one row."""

    def __init__(self, rule: Any, inputs: Any, documents: Documents | None) -> None:
        self.rule, self.documents = rule, documents
        self.rows, *_ = [x.shape[:2] for x in inputs if x is not None]
        end_to_end = documents is not None and self.rows[0] > 1
        self.inputs = in_one_row(inputs) if end_to_end else inputs


class RuleForward(_Stage):
    """A forward that has begun."""

    def state_map(self) -> StateMap:
        """The map of each of the N sequences, ``local`` and ``through`` ``[N, H, K, .]``."""
        raise NotImplementedError

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The output, from the states that enter the sequences; None is zero.

        Args:
            keep: whether a backward will come.
            final: also return the states after the last tokens.
        """
        raise NotImplementedError


class RuleBackward(_Stage):
    """A backward that has begun."""

    def __init__(
        self, rule: Any, d_o: Tensor, inputs: Any, saved: Saved, documents: Documents | None
    ) -> None:
        super().__init__(rule, inputs, documents)
        self.saved, self.d_o = saved, d_o if documents is None else in_one_row(d_o)

    def d_initial(self) -> Tensor:
        """``[N, H, K, V]``: the gradient of the initial states if that of the final states is 0.

        With a ``d_final`` the gradient is this plus ``through^T @ d_final``.
        """
        raise NotImplementedError

    def d_o_was_scaled(self, by: Tensor) -> None:
        """Called after d_o was multiplied in place by ``by [H, 1, 1]``, see :mod:`...gdn.half`."""

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> Any:
        """The gradients of the inputs, in the rule's own tuple.

        ``initial`` is the forward's, ``d_final [N, H, K, V]`` of the final states; None is zero.
        """
        raise NotImplementedError

    def run_to_states(
        self, initial: Tensor | None, d_final: Tensor | None, maps: Callable[[], StateMap]
    ) -> tuple[Any, Tensor]:
        """The result of :meth:`run`, and the gradient of the initial states."""
        d_initial = self.d_initial()
        if d_final is not None:
            d_initial = maps().transposed(d_initial).apply(d_final)
        return self.run(initial, d_final), d_initial


class Rule:
    """A recurrence over the inputs that a front makes."""

    name: str  # the ``backend`` that selects it
    bits: Bits = Bits.FREE
    # Of the inputs and of o; None is the projection's, which d_o has always.
    operand_dtype: torch.dtype | None = None
    reads_again: frozenset[str] = frozenset()  # inputs that the backward gets
    forward: ClassVar[Callable[..., RuleForward]]
    backward: ClassVar[Callable[..., RuleBackward]]

    @property
    def batch_invariant(self) -> bool:
        """Whether the bits of a sequence do not depend on other sequences or on its place."""
        return self.bits >= Bits.DETERMINISTIC

    def why_not_heads(self, heads: int) -> str | None:
        """Why the rule cannot run this many heads on a rank; None if it can."""
        return None

    def around(self, wrapper: Callable[[Rule], Rule]) -> Rule:
        """This rule in ``wrapper``. A rule that converts operands wraps its inner rule instead."""
        return wrapper(self)

    def begin(self, inputs: Any, documents: Documents | None) -> RuleForward:
        return self.forward(self, inputs, documents)

    def begin_backward(
        self, d_o: Tensor, inputs: Any, saved: Saved, documents: Documents | None
    ) -> RuleBackward:
        """Begin a backward. The rule owns ``d_o`` and may free it."""
        return self.backward(self, d_o, inputs, saved, documents)

    def prepare(self, layout: Layout, dtype: torch.dtype, states: bool) -> None:
        """Called when a layer with this rule is built, to start compiling its kernels.

        ``layout``: of the rank that runs the rule. ``dtype``: of its inputs, unless the rule has an
        ``operand_dtype``. ``states``: whether states enter and leave.
        """

    def kept_to_run_again(self, saved: Saved) -> Saved:
        """The part of a forward's ``saved`` that its second run reads: little per token."""
        return Saved()

    def run_again(
        self, inputs: Any, kept: Saved, documents: Documents | None, initial: Tensor | None
    ) -> RuleOutput:
        """``o`` of a forward whose output was dropped, and the tensors that its backward needs.

        Inputs and states have the bits of the first run; :meth:`kept_to_run_again` returned
        ``kept``.
        """
        return self.begin(inputs, documents).run(initial)


def on_tokens(inputs: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply ``change`` to every input ``[B, S, ...]``, to change its tokens; None stays None."""
    return type(inputs)(*(None if x is None else change(x) for x in inputs))


def in_one_row(x: Any) -> Any:
    """A tensor ``[B, S, ...]``, or each input, as ``[1, B S, ...]``, without a copy."""
    if not isinstance(x, Tensor):
        return on_tokens(x, in_one_row)
    return x if x.shape[0] == 1 else x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def in_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The reverse of :func:`in_one_row`, to ``rows`` = ``[B, S]``."""
    return x if x.shape[0] == rows[0] else x.reshape(*rows, *x.shape[2:])

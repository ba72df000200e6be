"""The interface of a recurrence: a rule, and the objects of its forward and backward.

    forward = rule.begin(inputs, documents)
    forward.state_map()              the map from S_in to S_out
    forward.run(initial)             o and S_out

    backward = rule.begin_backward(d_o, inputs, saved, documents)
    backward.d_initial()             dS_in if dS_out is 0
    backward.run(initial, d_final)   the gradients of the inputs

S_in and S_out are the states before and after a sequence. The calls ``state_map`` and
``run`` share intermediates, and so do ``d_initial`` and ``run`` of the backward. No
call waits for the device.

States and their gradients are fp32 (fp64 for fp64 inputs), ``[N, H, K, V]``. The N
sequences are the batch rows or, if there are documents, all documents with tokens. An
initial state of None means zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from ..documents import Documents
from ..obstacles import Obstacle
from ..state_maps.state_map import StateMap

# A rule's inputs, and their gradients: a NamedTuple of tensors ``[B, S, ...]``, of a
# type that each rule chooses. A field is None if nothing reads it.
Inputs = Any
Gradients = Any
# The head counts and dims of a mixer, of a type that the mixer chooses for its rules.
Sizes = Any


class Bits(IntEnum):
    """What a rule promises about the bits of its results; each value includes the
    promises of smaller values.

    For every value but FREE, the backend "auto" takes a rule with kernels only if a
    test found that its bits repeat on this GPU with these packages. If there is no such
    rule, "auto" takes plain torch.
    """

    FREE = 0  # no promise
    # a sequence's bits do not depend on the run or on other sequences
    DETERMINISTIC = 1
    # a token's bits depend only on its sequence's tokens: batch_invariant_mode
    ON_GRID = 2


class RepeatResult(NamedTuple):
    """Whether a rule gave the same bits again in a test."""

    repeated: bool
    log_text: str = ""  # about the test, for the log


class SavedForBackward(NamedTuple):
    """The values that a rule's forward gives to its backward, besides the inputs."""

    tensors: tuple[Any, ...] = ()  # autograd saves these tensors; an entry may be None
    # other values that the backward reads, of a type that the rule chooses
    other_values: Any = None
    # more values for the backward, if it follows a second forward (recompute)
    intermediates: Any = None


class RuleOutput(NamedTuple):
    """The result of a rule's forward: the output, final states and values for the
    backward."""

    o: Tensor  # [B, S, H, V]
    final_states: Tensor | None  # [N, H, K, V]; None if ``final`` is False
    saved: SavedForBackward  # values for the backward; no tensors if keep is False


class _RuleCall:
    """One forward or backward of a rule for one batch.

    ``inputs`` are the rule's inputs ``[B, S, ...]``, or ``[1, B S, ...]`` if there are
    ``documents``; ``batch_shape`` is (B, S).
    """

    def __init__(self, rule: Any, inputs: Inputs, documents: Documents | None) -> None:
        """Store the call's arguments; with ``documents``, view the inputs of all batch
        rows as one row."""
        self.rule = rule
        self.documents = documents
        given = [x for x in inputs if x is not None]
        self.batch_shape = given[0].shape[:2]
        end_to_end = documents is not None and self.batch_shape[0] > 1
        if end_to_end:
            self.inputs = in_one_row(inputs)
        else:
            self.inputs = inputs


class RuleForward(_RuleCall):
    """The forward of a rule for one batch."""

    def state_map(self) -> StateMap:
        """Each sequence's map from initial to final state, in tensors
        ``[N, H, K, .]``."""
        raise NotImplementedError

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The output from the ``initial`` states.

        ``initial`` are ``[N, H, K, V]``; None means zeros. With ``keep`` the result
        also has tensors for a backward, with ``final`` the final states.
        """
        raise NotImplementedError


class RuleBackward(_RuleCall):
    """The backward of a rule for one batch."""

    def __init__(
        self,
        rule: object,
        d_o: Tensor,
        inputs: Inputs,
        saved: SavedForBackward,
        documents: Documents | None,
    ) -> None:
        """Store the call's arguments: ``d_o [B, S, H, V]``, and ``saved`` from the
        forward's output. With ``documents``, view ``d_o`` and the inputs as one row."""
        super().__init__(rule, inputs, documents)
        self.saved = saved
        if documents is not None:
            d_o = in_one_row(d_o)
        self.d_o = d_o

    def d_initial(self) -> Tensor:
        """``[N, H, K, V]``: the gradient of the initial states if the final states have
        gradient 0.

        For other gradients of the final states, the caller adds
        ``through^T @ d_final``.
        """
        raise NotImplementedError

    def scale_with_d_o(self, factor: Tensor) -> None:
        """Scale the results that this backward has already computed from d_o by
        ``factor [H, 1, 1]``. By default there are no such results.

        The caller, the backward of a rule with fp16 operands, has scaled d_o in place
        by this factor, because d_final was too large.
        """

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        """The gradients of the inputs, in a NamedTuple of the rule's own type.

        ``initial`` are the initial states of the forward, ``d_final`` the gradients of
        the final states, ``[N, H, K, V]`` each; None means zeros.
        """
        raise NotImplementedError

    def run_with_d_initial(
        self,
        initial: Tensor | None,
        d_final: Tensor | None,
        maps: Callable[[], StateMap],
    ) -> tuple[Gradients, Tensor]:
        """The gradients of the inputs, as :meth:`run` gives them, and of the initial
        states.

        ``initial`` and ``d_final`` are ``[N, H, K, V]`` or None (zeros). ``maps()``
        computes the forward's state maps; it is called only if ``d_final`` is not None.
        """
        d_initial = self.d_initial()
        if d_final is not None:
            d_initial = maps().transposed(d_initial).apply(d_final)
        return self.run(initial, d_final), d_initial


class Rule:
    """A recurrence over the inputs that a mixer's front computes from projection rows.

    The class says where the rule runs (:meth:`why_not`) and whether its bits repeat
    (:attr:`strongest_promise`, :meth:`repeats`). :func:`.choice.choose` takes the first
    class of a list that can run, and makes the rule by :meth:`of`.
    """

    name: str  # the value of ``backend`` that selects the rule
    # the reason in the log if "auto" takes this rule and skipped no other rule
    why_chosen: ClassVar[str] = ""
    # whether "auto" never takes this rule, so that only its name selects it
    only_by_name: ClassVar[bool] = False
    # the strongest promise that the rule can keep; repeats() says whether a test on
    # this GPU confirmed it
    strongest_promise: ClassVar[Bits] = Bits.ON_GRID
    # text for an error: why the rule cannot keep a stronger promise
    why_bits_vary: ClassVar[str] = ""
    bits: Bits = Bits.FREE
    # The dtype of inputs and o; None: the dtype of projection rows. d_o always has the
    # rows' dtype.
    operand_dtype: torch.dtype | None = None
    # names of the inputs that the backward reads
    backward_reads: frozenset[str] = frozenset()
    forward_class: ClassVar[Callable[..., RuleForward]]
    backward_class: ClassVar[Callable[..., RuleBackward]]

    @classmethod
    def why_not(
        cls, device: torch.device, dtype: torch.dtype, sizes: Sizes
    ) -> Obstacle | None:
        """Why the rule cannot run rows of this dtype on this device; None if it can."""
        return None

    @classmethod
    def repeats(
        cls, device: torch.device, dtype: torch.dtype, sizes: Sizes
    ) -> RepeatResult:
        """Whether a test found that a sequence has the same bits in every run, whatever
        the other sequences of the batch are."""
        return RepeatResult(True)

    @classmethod
    def of(cls, sizes: Sizes, bits: Bits) -> Self:
        """The rule for these sizes that promises ``bits``."""
        return cls()

    @property
    def batch_invariant(self) -> bool:
        """Whether a sequence's bits depend neither on other sequences nor on the
        sequence's place in the batch."""
        return self.bits >= Bits.DETERMINISTIC

    def why_not_heads(self, heads: int) -> str | None:
        """Why the rule cannot run this many heads on a rank; None if it can."""
        return None

    def wrapped_by(self, wrapper: Callable[[Rule], Rule]) -> Rule:
        """``wrapper(self)``. If this rule only converts operands for an inner rule, the
        wrapper goes around the inner rule instead."""
        return wrapper(self)

    def begin(self, inputs: Inputs, documents: Documents | None) -> RuleForward:
        return self.forward_class(self, inputs, documents)

    def begin_backward(
        self,
        d_o: Tensor,
        inputs: Inputs,
        saved: SavedForBackward,
        documents: Documents | None,
    ) -> RuleBackward:
        """Begin a backward; ``saved`` is from the forward. The rule may free ``d_o``,
        so the caller must not read it afterwards."""
        return self.backward_class(self, d_o, inputs, saved, documents)

    def kept_to_recompute(self, saved: SavedForBackward) -> SavedForBackward:
        """The part of ``saved`` that :meth:`recompute` needs; by default nothing. The
        tensors of this part stay in memory until the backward, so they must be
        small."""
        return SavedForBackward()

    def recompute(
        self,
        inputs: Inputs,
        kept: SavedForBackward,
        documents: Documents | None,
        initial: Tensor | None,
    ) -> RuleOutput:
        """Run a forward again, with the bits of the first run.

        ``inputs`` and ``initial`` must have the bits that they had in the first run;
        ``kept`` is the result of :meth:`kept_to_recompute`.
        """
        return self.begin(inputs, documents).run(initial)


def map_inputs(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The inputs ``change(x)`` for every input x ``[B, S, ...]``; None stays None."""
    return inputs._make(None if x is None else change(x) for x in inputs)


def contiguous_state(state: Tensor | None) -> Tensor | None:
    """A contiguous state, since kernels of other packages do not read its strides."""
    if state is None:
        return None
    return state.contiguous()


def in_one_row(x: Inputs) -> Inputs:
    """View a tensor ``[B, S, ...]``, or each tensor of a tuple of inputs, as
    ``[1, B S, ...]``."""
    if not isinstance(x, Tensor):
        return map_inputs(x, in_one_row)
    if x.shape[0] == 1:
        return x
    return x.flatten(0, 1)[None]


def in_rows(x: Tensor, batch_shape: Sequence[int]) -> Tensor:
    """View ``x [1, B S, ...]`` as ``[B, S, ...]``; ``batch_shape`` is (B, S)."""
    if x.shape[0] == batch_shape[0]:
        return x
    return x[0].unflatten(0, batch_shape)

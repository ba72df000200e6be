"""What a mixer frees before its backward ends: its output, the gradient of this output,
and the rule's inputs.

    RefilledOutput   frees the mixer's output until out_proj's backward reads it
    GradientHandOver         lets the mixer's backward free the output's gradient early
    SecondRun        runs front and rule again, so that only projection rows are kept

A second run starts in out_proj's backward if the mixer's output was freed, otherwise in
the mixer's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .autograd import uncompiled
from .front.history import History
from .front.table import Front
from .rules.base import Inputs, Rule, SavedForBackward
from .stages import SequenceContext


def saved_tensors_are_hooked() -> bool:
    """Whether ``saved_tensors_hooks`` of a checkpoint or an offload are active.

    Such hooks would read a freed tensor before it is filled again. So no tensor is
    freed then.
    """
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return hooks._top_saved_tensors_default_hooks(True) is not None


class RefilledOutput:
    """Frees the memory of one output of the mixer until out_proj's backward.

    out_proj's autograd saves this output. The output is computed again before
    out_proj's backward reads it, from tensors that the mixer saves anyway.
    """

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._refill: Callable[[Tensor], None] | None = None

    def remember(self, output: Tensor, refill: Callable[[Tensor], None]) -> None:
        """Store the mixer's ``output``; ``refill(x)`` writes the same bits to x
        again."""
        self._output = output.detach()
        self._refill = refill

    def remember_sent(self, output: Tensor, send: Callable[[Tensor], Tensor]) -> None:
        """Store ``output = send(x)`` in place of the stored tensor x; ``send`` is, for
        example, an exchange of heads. A refill then computes x again and sends x."""
        unsent = self._output
        refill = self._refill
        if unsent is None:  # no tokens
            return
        assert refill is not None
        shape = unsent.shape

        def refill_and_send(out: Tensor) -> None:
            """Compute x again, and write ``send(x)`` to ``out``."""
            rows = out.new_empty(shape)
            refill(rows)
            out.copy_(send(rows))

        self.remember(output, refill_and_send)

    @uncompiled  # Dynamo cannot trace a change of a storage
    def drop_until_backward_of(self, out: Tensor) -> None:
        """Free the remembered output's storage; fill it again when ``out`` gets its
        gradient.

        The storage is kept if ``out`` needs no gradient. No ``saved_tensors_hooks`` may
        be active.
        """
        output = self._output
        refill = self._refill
        self._output = self._refill = None
        if output is None or not out.requires_grad:
            return
        assert refill is not None
        storage = output.untyped_storage()
        size = storage.nbytes()

        def fill_again(_gradient: Tensor) -> None:
            """Compute the output again; ``_gradient`` is not read."""
            storage.resize_(size)
            # .data hides the write from autograd's change counter
            refill(output.data)
            hook.remove()  # else the hook would keep the tensors of refill alive

        storage.resize_(0)
        hook = out.register_hook(fill_again)


# Bytes of the smallest gradient that a GradientHandOver stores. Its autograd step takes
# the host about 50 microseconds. For a smaller gradient the GPU would wait for the
# host, and save little memory.
MIN_HAND_OVER_BYTES = 128 << 20


class GradientHandOver:
    """Lets a mixer's backward free the gradient of the mixer's output early.

    Autograd holds the gradient that it passes to a backward until the backward returns.
    So an autograd step after the mixer's function stores the gradient in this object,
    and passes on a tensor without memory. The mixer's backward calls :meth:`take`. One
    object serves one forward.
    """

    def __init__(self) -> None:
        # key: autograd's number of the backward pass
        self.stored_gradients: dict[int, Tensor] = {}

    def store_gradient_of(self, out: Tensor) -> Tensor:
        """``out``, whose gradient will be stored here."""
        return _StoreGradient.apply(out, self)

    def take(self, gradient: Tensor) -> Tensor:
        """The gradient that was stored in this backward; ``gradient`` if nothing was
        stored."""
        return self.stored_gradients.pop(torch._C._current_graph_task_id(), gradient)


class _StoreGradient(torch.autograd.Function):
    """The autograd step that stores the gradient of ``out`` in ``hand_over``."""

    @staticmethod
    def forward(ctx, out: Tensor, hand_over: GradientHandOver) -> Tensor:
        """Return a view of ``out``; its gradient will be stored in ``hand_over``."""
        ctx.hand_over = hand_over
        return out.view_as(out)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        """Store the gradient of ``out`` under the number of this backward pass. Pass on
        one element, expanded to the same shape."""
        (gradient,) = gradients
        ctx.hand_over.stored_gradients[torch._C._current_graph_task_id()] = gradient
        return gradient.new_empty(()).expand(gradient.shape), None


class SecondRunResult(NamedTuple):
    """The result of :class:`SecondRun`."""

    inputs: Inputs  # of the rule
    o: Tensor  # the rule's output [B, S, H, V]
    saved: SavedForBackward  # for the rule's backward


class SecondRun:
    """Runs the front and the rule again in the backward; one object serves one
    forward."""

    def __init__(
        self, front: Front, rule: Rule, sequence_context: SequenceContext
    ) -> None:
        """``front``, ``rule`` and ``sequence_context`` are those of the forward."""
        self._front = front
        self._rule = rule
        self._sequence_context = sequence_context
        self._result: SecondRunResult | None = None

    def compute_once(
        self,
        rows: Tensor,
        front_parameters: Sequence[Tensor | None],
        history: History | None,
        state_tensors: tuple[Tensor, ...],
        kept_by_rule: SavedForBackward,
    ) -> SecondRunResult:
        """Run front and rule at the first call; store the result for later calls.

        Args:
            rows: the projection rows ``[S, B, P]`` of the forward.
            history: the history that the forward read.
            state_tensors: the tensors that :meth:`.stages.StateLink.forward_states`
                returned.
            kept_by_rule: the result of :meth:`.rules.base.Rule.kept_to_recompute`.
        """
        if self._result is None:
            context = self._sequence_context
            inputs = self._front.forward(
                rows, front_parameters, context.documents, history=history
            )
            initial = None
            if context.states is not None:
                initial = context.states.states_from_saved(state_tensors)
            o, _, saved = self._rule.recompute(
                inputs, kept_by_rule, context.rule_documents, initial
            )
            self._result = SecondRunResult(inputs, o, saved)
        return self._result

    def rule_output(self, *arguments: Any) -> Tensor:
        """The rule's output o of :meth:`compute_once`."""
        return self.compute_once(*arguments).o

    def take(self, *arguments: Any) -> SecondRunResult:
        """The result of :meth:`compute_once` for its ``arguments``; the result is no
        longer stored.

        Inputs that the rule's backward does not read are None.
        """
        inputs, o, saved = self.compute_once(*arguments)
        self._result = None
        wanted = self._rule.backward_reads
        named = zip(self._front.input_names, inputs, strict=True)
        inputs = inputs._make(x if name in wanted else None for name, x in named)
        return SecondRunResult(inputs, o, saved)

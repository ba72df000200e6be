"""Tensors that a mixer frees between forward and backward, and gradients that it frees
early.

If the backward runs front and rule a second time, the mixer keeps only the projection
rows. The second run starts in out_proj's backward if the mixer's output was freed
(:class:`RefilledOutput`), otherwise in the mixer's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import uncompiled
from .front.history import History
from .front.table import Front
from .rules.base import Inputs, Rule, Saved
from .stages import SequenceContext


def saved_tensors_are_hooked() -> bool:
    """Whether ``saved_tensors_hooks``, of a checkpoint or an offload, are active.

    The hooks would read a freed tensor before it is filled again, so the tensor must
    not be freed.
    """
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return hooks._top_saved_tensors_default_hooks(True) is not None


class RefilledOutput:
    """Frees one forward's output, which out_proj saves, until out_proj's backward reads
    it.

    The output is computed again from tensors that the mixer saves anyway.
    """

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._refill: Callable[[Tensor], None] | None = None

    def remember(self, output: Tensor, refill: Callable[[Tensor], None]) -> None:
        """Store the mixer's ``output``; ``refill(x)`` computes the same bits again into
        x."""
        self._output = output.detach()
        self._refill = refill

    def remember_sent(self, output: Tensor, send: Callable[[Tensor], Tensor]) -> None:
        """Store ``output = send(x)`` in place of the stored x; a refill computes x,
        then output."""
        made = self._output
        refill = self._refill
        if made is None or refill is None:  # no tokens
            return
        shape = made.shape

        def refill_and_send(out: Tensor) -> None:
            """Compute the rows again and write what ``send`` makes of them to
            ``out``."""
            rows = out.new_empty(shape)
            refill(rows)
            out.copy_(send(rows))

        self.remember(output, refill_and_send)

    @uncompiled  # Dynamo would warn: it cannot trace saved_tensors_are_hooked
    def drop_until_backward_of(self, out: Tensor) -> None:
        """Free the remembered output's storage; fill it again when ``out`` gets its
        gradient.

        The storage is kept if ``out`` needs no gradient, or if ``saved_tensors_hooks``
        are active.
        """
        output = self._output
        refill = self._refill
        self._output = self._refill = None
        if (
            output is None
            or refill is None
            or not out.requires_grad
            or saved_tensors_are_hooked()
        ):
            return
        storage = output.untyped_storage()
        size = storage.nbytes()

        def fill_again(_gradient: Tensor) -> None:
            """Compute the output again if its storage is empty; ``_gradient`` is not
            read."""
            if storage.nbytes() == 0:
                storage.resize_(size)
                # .data hides the write from autograd's change counter
                with torch.no_grad():
                    refill(output.data)
            hook.remove()  # else the hook would keep the tensors of refill alive

        storage.resize_(0)
        hook = out.register_hook(fill_again)


# Bytes of the smallest gradient that a HandOver stores. Its autograd step takes the
# host about 50 microseconds. For a smaller gradient the GPU would wait for the host,
# and save little memory.
LEAST_BYTES = 128 << 20


class HandOver:
    """Lets a mixer's backward free the output's gradient, which autograd keeps until
    the return.

    An autograd step after the mixer's function stores the gradient in this object and
    passes on a stub without memory; the mixer's backward calls :meth:`take`. One object
    serves one forward.
    """

    def __init__(self) -> None:
        # key: autograd's number of the backward pass
        self.stored_gradients: dict[int, Tensor] = {}

    def store_gradient_of(self, out: Tensor) -> Tensor:
        """Return ``out``, with `_StoreGradient` behind it if the gradient is large and
        needed."""
        if not out.requires_grad or out.nbytes < LEAST_BYTES:
            return out
        return _StoreGradient.apply(out, self)

    def take(self, gradient: Tensor) -> Tensor:
        """The gradient that the storing step stored in this backward; if none,
        ``gradient``."""
        return self.stored_gradients.pop(torch._C._current_graph_task_id(), gradient)


class _StoreGradient(torch.autograd.Function):
    """The autograd step that stores the gradient of ``out`` in ``hand_over``."""

    @staticmethod
    def forward(ctx, out: Tensor, hand_over: HandOver) -> Tensor:
        """Return a view of ``out``; its gradient will be stored in ``hand_over``."""
        ctx.hand_over = hand_over
        return out.view_as(out)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (gradient,) = gradients
        # create_graph=True; the mixer's backward will refuse it
        if torch.is_grad_enabled():
            return gradient, None
        ctx.hand_over.stored_gradients[torch._C._current_graph_task_id()] = gradient
        return gradient.new_empty(()).expand(gradient.shape), None


class SecondRun:
    """Runs the front and the rule again in the backward; one object serves one
    forward."""

    def __init__(
        self, front: Front, rule: Rule, sequence_context: SequenceContext
    ) -> None:
        self._front = front
        self._rule = rule
        self._sequence_context = sequence_context
        self._result: tuple[Inputs, Tensor, Saved] | None = None

    def compute_once(
        self,
        rows: Tensor,
        of_front: Sequence[Tensor | None],
        history: History | None,
        linked: tuple[Tensor, ...],
        kept: Saved,
    ) -> tuple[Inputs, Tensor, Saved]:
        """The rule's inputs, o and saved tensors, made once; ``linked``: what
        `StateLink` kept."""
        if self._result is None:
            context = self._sequence_context
            inputs = self._front.forward(
                rows, of_front, context.documents, history=history
            )
            if context.states is None:
                initial = None
            else:
                initial = context.states.states_from_saved(linked)
            o, _, saved = self._rule.recompute(
                inputs, kept, context.rule_documents, initial
            )
            self._result = inputs, o, saved
        return self._result

    def take(self, *arguments: Any) -> tuple[Inputs, Tensor, Saved]:
        """Return and drop the result of :meth:`compute_once`; inputs not read later are
        None."""
        inputs, o, saved = self.compute_once(*arguments)
        self._result = None
        wanted = self._rule.backward_reads
        named = zip(self._front.names, inputs, strict=True)
        inputs = inputs._make(x if name in wanted else None for name, x in named)
        return inputs, o, saved

"""Tensors that a mixer drops between forward and backward, and gradients that it frees early.

The front and the rule may run again in the backward; then the mixer keeps only the projection rows.
This second run starts when the mixer's output is filled again, or else with the mixer's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .autograd import uncompiled
from .front.history import History
from .front.table import TableFront
from .parts import Neighbours
from .rules.base import Rule, Saved


def saved_tensors_are_hooked() -> bool:
    """Whether ``saved_tensors_hooks`` are on: a checkpoint's or an offload's.

    Such hooks do not see a tensor that is filled again later, so it may not be dropped.
    """
    hooks = torch._C._autograd  # pyright: ignore[reportAttributeAccessIssue]
    return hooks._top_saved_tensors_default_hooks(True) is not None


class RefilledOutput:
    """Frees a tensor that autograd still holds, and fills it again just before it is read.

    out_proj saves its input, the mixer's normed output, which one cheap pass computes again from
    tensors that the mixer saves anyway. One object per forward.
    """

    def __init__(self) -> None:
        self._output: Tensor | None = None
        self._refill: Callable[[Tensor], None] | None = None

    def remember(self, output: Tensor, refill: Callable[[Tensor], None]) -> None:
        """Called by the mixer: ``refill(x)`` writes the same bits as ``output`` into x."""
        self._output, self._refill = output.detach(), refill

    def remember_sent(self, output: Tensor, send: Callable[[Tensor], Tensor]) -> None:
        """Called if the reader saves ``output = send(remembered)``, not the remembered tensor."""
        made, refill = self._output, self._refill
        if made is None or refill is None:  # no tokens
            return
        shape = made.shape

        def refill_and_send(out: Tensor) -> None:
            rows = out.new_empty(shape)
            refill(rows)
            out.copy_(send(rows))

        self.remember(output, refill_and_send)

    @uncompiled  # Dynamo does not know whether tensors that are saved are hooked, and warns
    def drop_until_backward_of(self, out: Tensor) -> None:
        """Free the storage now; fill it again once the gradient of ``out`` is known.

        Does nothing if ``out`` needs no gradient: the storage is then freed with its last user.
        """
        output, refill = self._output, self._refill
        self._output = self._refill = None
        if output is None or refill is None or not out.requires_grad or saved_tensors_are_hooked():
            return
        storage = output.untyped_storage()
        size = storage.nbytes()

        def fill_again(_gradient: Tensor) -> None:
            if storage.nbytes() == 0:
                storage.resize_(size)
                with torch.no_grad():  # .data: autograd must not count this as a change
                    refill(output.data)
            hook.remove()  # else a reference to ``out`` keeps alive what the refill reads

        storage.resize_(0)
        hook = out.register_hook(fill_again)


# Bytes of the smallest gradient that is handed over. The step takes the host some 50 microseconds.
# Only with many rows has a GPU work for longer than that, and a gradient that counts in the peak.
LEAST = 128 << 20


class HandOver:
    """Lets a backward free the gradient that autograd holds until that backward returns.

    An autograd step ``behind`` the function keeps the gradient and gives the function a stub
    without memory; the function's backward ``take``s the gradient. One object per forward.
    """

    def __init__(self) -> None:
        self.aside: dict[int, Tensor] = {}  # by the run of the backward

    def behind(self, out: Tensor) -> Tensor:
        """``out`` through the step; unchanged if its gradient is not needed or is small."""
        if not out.requires_grad or out.nbytes < LEAST:
            return out
        return _PutAside.apply(out, self)

    def take(self, gradient: Tensor) -> Tensor:
        """The gradient that this run of the backward put aside; ``gradient`` if there is none."""
        return self.aside.pop(_run(), gradient)


def _run() -> int:
    return torch._C._current_graph_task_id()


class _PutAside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: Tensor, hand_over: HandOver) -> Tensor:
        ctx.hand_over = hand_over
        return out.view_as(out)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if torch.is_grad_enabled():  # a second derivative; the function's own backward refuses it
            return gradient, None
        ctx.hand_over.aside[_run()] = gradient
        return gradient.new_empty(()).expand(gradient.shape), None


class SecondRun:
    """The front and the rule, run again in the backward. One object per forward."""

    def __init__(self, front: TableFront, rule: Rule, neighbours: Neighbours) -> None:
        self._front, self._rule, self._neighbours = front, rule, neighbours
        self._made: tuple[Any, Tensor, Saved] | None = None

    def made(
        self,
        rows: Tensor,
        of_front: Sequence[Tensor | None],
        history: History | None,
        linked: tuple[Tensor, ...],
        kept: Saved,
    ) -> tuple[Any, Tensor, Saved]:
        """The rule's inputs, o and the tensors that its forward saves. The first call computes.

        ``linked`` are the tensors that the state link kept, ``kept`` the rule's
        :meth:`.rules.base.Rule.kept_to_run_again`.
        """
        if self._made is None:
            near = self._neighbours
            inputs = self._front.forward(rows, of_front, near.documents, history=history)
            initial = None if near.states is None else near.states.entered(linked)
            o, _, saved = self._rule.run_again(inputs, kept, near.of_rule, initial)
            self._made = inputs, o, saved
        return self._made

    def take(self, *given: Any) -> tuple[Any, Tensor, Saved]:
        """The result of :meth:`made`, then forgotten; inputs that no backward reads are None."""
        inputs, o, saved = self.made(*given)
        self._made = None
        wanted = self._rule.reads_again
        named = zip(self._front.names, inputs, strict=True)
        return type(inputs)(*(x if n in wanted else None for n, x in named)), o, saved

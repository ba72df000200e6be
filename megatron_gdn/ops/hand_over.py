"""Gradients that are freed while the function that they were given to still runs.

Autograd keeps what it hands to a backward until the backward returns. Here a step of its own stands
behind the function's output. Its backward puts the gradient aside and hands on a stub of the same
shape, which takes no memory. The function's backward takes the gradient from there, and no other
reference is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of a gradient. The step takes the host some 50 microseconds. A GPU has work for longer than
# that only where the rows are many, and only there the gradient counts in the peak.
LEAST = 128 << 20


class HandOver:
    """One object per forward: ``out = hand_over.behind(out)``, ``take`` in the backward."""

    def __init__(self) -> None:
        self._aside: dict[int, Tensor] = {}

    def behind(self, out: Tensor) -> Tensor:
        """``out`` for its readers; as it is if it needs no gradient or its gradient is small."""
        if not out.requires_grad or out.nbytes < LEAST:
            return out
        return _PutAside.apply(out, self)

    def take(self, gradient: Tensor) -> Tensor:
        """The gradient of ``out``: put aside in this run of the backward, else as it was given."""
        return self._aside.pop(_run(), gradient)

    def put_aside(self, gradient: Tensor) -> Tensor:
        self._aside[_run()] = gradient
        return gradient.new_empty(()).expand(gradient.shape)


def _run() -> int:
    """The number of the backward that runs in this thread."""
    return torch._C._current_graph_task_id()


class _PutAside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, out: Tensor, hand_over: HandOver) -> Tensor:
        ctx.hand_over = hand_over
        return out.view_as(out)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        if torch.is_grad_enabled():  # a second derivative, which the function behind refuses
            return gradient, None
        return ctx.hand_over.put_aside(gradient), None

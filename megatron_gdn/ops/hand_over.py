"""Gradients that are freed while the function that they were given to still runs.

Autograd holds the gradient that it gives to a backward until that backward returns. So a small
autograd step follows the function. Its backward, which runs first, puts the gradient into a
:class:`HandOver` and returns a stub of the same shape, which takes no memory. The function's
backward takes the gradient from the HandOver. No other reference to the gradient is left.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Bytes of the smallest gradient that is handed over. The step takes the host some 50 microseconds.
# Only with many rows has a GPU work for longer than that, and a gradient that counts in the peak.
LEAST = 128 << 20


class HandOver:
    """One object per forward: ``out = hand_over.behind(out)``, ``take`` in the backward."""

    def __init__(self) -> None:
        self._aside: dict[int, Tensor] = {}

    def behind(self, out: Tensor) -> Tensor:
        """``out`` through the step; unchanged if its gradient is not needed or is small."""
        if not out.requires_grad or out.nbytes < LEAST:
            return out
        return _PutAside.apply(out, self)

    def take(self, gradient: Tensor) -> Tensor:
        """The gradient that this run of the backward put aside; ``gradient`` if there is none."""
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
        if torch.is_grad_enabled():  # a second derivative; the function's own backward refuses it
            return gradient, None
        return ctx.hand_over.put_aside(gradient), None

"""Backwards that compute a gradient and no graph of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_derivative_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """The backward of an autograd function whose gradients cannot be differentiated again.

    torch's own ``once_differentiable`` refuses only what depends on the gradient that arrives. A
    gradient also depends on the saved tensors; with respect to these, torch would silently take it
    for a constant. Autograd enables gradients in a backward if and only if it was called with
    ``create_graph=True``. The grad mode around the call does not matter.

    Raises:
        NotImplementedError: the backward runs under ``create_graph=True``.
    """

    @wraps(backward)
    def call(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph=True (a gradient penalty, a Hessian product): megatron_gdn computes "
                "gradients that autograd cannot differentiate again; it would take them for "
                "constants. Call backward() or torch.autograd.grad without create_graph, or keep "
                "this layer out of what is differentiated twice."
            )
        return backward(ctx, *gradients)

    return call

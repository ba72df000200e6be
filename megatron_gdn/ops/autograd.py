"""Backwards that compute a gradient and no graph of it.

Functions that torch.compile leaves as they are.

The mixer of a batch without tokens, so that kernels and rules never get an empty batch.

Legend: S seq, B batch, P projection width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor


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


def uncompiled[F: Callable[..., Any]](function: F) -> F:
    """``torch.compiler.disable``, applied when ``torch.compile`` traces the call.

    Applied at the import, it would import Dynamo too, which takes seconds and needs NumPy.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


class _Nothing(torch.autograd.Function):
    """A tensor without elements, and zero gradients for its inputs."""

    @staticmethod
    def forward(ctx, shape: tuple[int, ...], proj: Tensor, *parameters: Tensor | None):
        ctx.save_for_backward(proj, *parameters)
        return proj.new_empty(shape)

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_out: Tensor):
        return None, *(None if x is None else torch.zeros_like(x) for x in ctx.saved_tensors)


def mix_no_tokens(rows: Tensor, *parameters: Tensor | None, width: int) -> Tensor:
    """``[S, B, width]`` for rows with S or B zero.

    The parameters are inputs, so that they get gradients on this rank as on any other.
    """
    return _Nothing.apply((*rows.shape[:2], width), rows, *parameters)

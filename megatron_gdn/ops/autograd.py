"""Functions for writing autograd functions: gradients by a second run, and an error for
second derivatives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, cast

import torch
from torch import Tensor


def first_derivative_only(backward: Callable) -> Callable:
    """A decorator for an autograd function's ``backward``: raise an error if the user
    asks for ``create_graph=True``.

    Autograd enables gradients in a backward only with ``create_graph=True``. torch's
    ``once_differentiable`` is not used: it would treat the saved tensors as constants,
    without an error.
    """

    @wraps(backward)
    def call(ctx: object, *gradients: object) -> object:
        """Run ``backward``; raise if autograd would differentiate its results."""
        if torch.is_grad_enabled():
            raise NotImplementedError(
                "create_graph=True (a gradient penalty, a Hessian product): "
                "megatron_gdn computes gradients that autograd cannot differentiate "
                "again; autograd would treat these gradients as constants. Call "
                "backward() or torch.autograd.grad without create_graph, or keep this "
                "layer out of the part that is differentiated twice."
            )
        return backward(ctx, *gradients)

    return call


def gradients(
    function: Callable, inputs: Sequence[Tensor | None], d_outputs: Any
) -> tuple[Any, ...]:
    """Run ``function(*inputs)`` again; return the gradient of each input.

    ``d_outputs`` are the gradients of the function's results. The gradient of an input
    None is None.
    """
    leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
    with torch.enable_grad():
        outputs = function(*leaves)
    computed = iter(
        torch.autograd.grad(outputs, [x for x in leaves if x is not None], d_outputs)
    )
    return tuple(None if x is None else next(computed) for x in leaves)


def uncompiled[F: Callable](function: F) -> F:
    """A decorator: ``torch.compile`` runs ``function`` as it is, and does not trace it.

    ``torch.compiler.disable`` does this, but imports Dynamo, which takes seconds and
    needs NumPy. So it is applied only when ``torch.compile`` traces a call.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        """Run ``function``; ``torch.compile`` does not trace it."""
        if torch.compiler.is_compiling():
            return torch.compiler.disable(function)(*args, **kwargs)
        return function(*args, **kwargs)

    return cast(F, call)


class _SavingInputs(torch.autograd.Function):
    """The autograd function of :func:`run_saving_inputs`."""

    @staticmethod
    def forward(ctx, function: Callable[..., Tensor], *inputs: Tensor | None) -> Tensor:
        """Return ``function(*inputs)``; save ``inputs`` and nothing else."""
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_output: Tensor):
        """Gradients of the inputs from ``d_output``, by a second run of the
        function."""
        return None, *gradients(ctx.function, ctx.saved_tensors, d_output)


def run_saving_inputs(
    function: Callable[..., Tensor], *inputs: Tensor | None
) -> Tensor:
    """Return ``function(*inputs)``, of which autograd saves only ``inputs``; the
    backward runs ``function`` again."""
    return _SavingInputs.apply(function, *inputs)


def output_without_tokens(
    rows: Tensor, *parameters: Tensor | None, width: int
) -> Tensor:
    """A result ``[S, B, width]`` without elements, for rows ``[S, B, P]`` where S or B
    is zero.

    The parameters get zero gradients, so that every rank has a gradient of every
    parameter.
    """

    def empty_output(*rows_and_parameters: Tensor | None) -> Tensor:
        """A tensor ``[S, B, width]`` without elements. It depends on every given
        tensor, so autograd gives each a zero gradient."""
        sums = [x.sum().to(rows.dtype) for x in rows_and_parameters if x is not None]
        return torch.stack(sums).sum().expand(rows.shape[:2] + (width,))

    return run_saving_inputs(empty_output, rows, *parameters)

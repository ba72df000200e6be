"""The gates of a rule as elementwise functions; :mod:`.gate_kernels` has them in
Triton.

    function(x, A_log, low, high)  x [B, S, heads, width] in fp32 or wider, A_log
                                   [heads, 1] or None

x is the gate's columns, plus ``dt_bias`` if the gate has ``A_log``. ``low`` and
``high`` are two numbers that the mixer's ``front.py`` states; each function's equation
says which of them it reads. Each function returns one or two of the rule's inputs, as a
tuple of tensors in the shape of x. ``A_log`` only needs a shape that broadcasts to x.

Log-decays are clamped at :func:`..elementwise.least_log_decay`, ``A_log`` at
:func:`..elementwise.largest_A_log`. Where a clamp acts, the decay exp(g) and its
gradient are exactly 0, and they would be 0 without the clamp too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..elementwise import (
    largest_A_log,
    largest_beta,
    least_log_decay,
    sigmoid,
    softplus,
)


def decay(x: Tensor, A_log: Tensor, low: float, high: float) -> tuple[Tensor]:
    """The log-decay ``-exp(A_log) softplus(x)``; ``low`` and ``high`` are not read."""
    return (_log_decay(softplus(x), A_log),)


def bounded_decay(x: Tensor, A_log: Tensor, low: float, high: float) -> tuple[Tensor]:
    """The log-decay ``low sigmoid(exp(A_log) x)``, which lies between ``low`` and 0;
    ``high`` is not read."""
    return (low * sigmoid(_decay_rate(A_log) * x),)


def time_step(
    x: Tensor, A_log: Tensor, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """The log-decay ``-exp(A_log) dt`` and the time step
    ``dt = clamp(softplus(x), low, high)``."""
    dt = softplus(x).clamp(low, high)
    return _log_decay(dt, A_log), dt


def strength(x: Tensor, A_log: Tensor | None, low: float, high: float) -> tuple[Tensor]:
    """The strength ``high sigmoid(x)`` of writing or erasing; ``A_log`` and ``low`` are
    not read."""
    return (sigmoid(x) * high,)


def _decay_rate(A_log: Tensor) -> Tensor:
    """``exp(A_log)``, with A_log clamped at its upper bound."""
    return A_log.clamp(max=largest_A_log(A_log.dtype)).exp()


def _log_decay(dt: Tensor, A_log: Tensor) -> Tensor:
    return (-_decay_rate(A_log) * dt).clamp(min=least_log_decay(dt.dtype))


def decay_and_write_gates(
    alpha_H: Tensor,
    beta_H: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """The log-decay ``g <= 0`` and the write strength ``beta`` from their projected
    columns.

        g    = -exp(A_log) * softplus(alpha + dt_bias)
        beta = sigmoid(beta_H), or 2 sigmoid(beta_H) with ``allow_neg_eigval``

    Args:
        alpha_H, beta_H: ``[..., H]``, the alpha and beta sections of the projection.
        A_log_H, dt_bias_H: ``[H]``, the parameters of the log-decay.
        allow_neg_eigval: allow write strengths up to 2, which give negative
            eigenvalues.

    Returns:
        ``g`` and ``beta``, both ``[..., H]``, computed in fp32 (fp64 for fp64
        parameters), because the recurrence compounds a rounding error of ``A_log`` over
        the whole sequence.
    """
    wide = torch.promote_types(A_log_H.dtype, torch.float32)
    # `decay` reads neither 0.0 nor 1.0, and `strength` does not read 0.0
    (g_H,) = decay(alpha_H.to(wide) + dt_bias_H.to(wide), A_log_H.to(wide), 0.0, 1.0)
    (beta_H,) = strength(beta_H.to(wide), None, 0.0, largest_beta(allow_neg_eigval))
    return g_H, beta_H

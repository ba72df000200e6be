"""The functions of :mod:`.gates` and their gradients, as Triton device functions.

    function(x, A_log, low, high)                             -> first, second
    function_backward(x, A_log, d_first, d_second, low, high) -> d_x, d_A_log

``x``, ``A_log``, ``low`` and ``high`` are as in :mod:`.gates`. All arithmetic is
elementwise in fp32. A function with one result returns it twice, and its backward
ignores ``d_same``, the second gradient. If a gate has no A_log, the caller ignores
d_A_log.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.elementwise import (
    LARGEST_A_LOG,
    LEAST_LOG_DECAY,
    minus_rate,
    sigmoid,
    softplus,
)


@triton.jit
def _log_decay(dt, A_log):
    """The log-decay ``-exp(A_log) dt``, at least LEAST_LOG_DECAY, whose exp is 0.

    The limit keeps sums of log-decays finite.
    """
    g = minus_rate(A_log) * dt
    return tl.where(g < LEAST_LOG_DECAY, LEAST_LOG_DECAY, g)  # NaN stays NaN


@triton.jit
def _log_decay_backward(dt, A_log, d_g):
    """Gradients of dt and A_log from ``d_g``, the gradient of :func:`_log_decay`.

    Both gradients are 0 where the log-decay is clamped. The gradient of A_log is also 0
    where A_log is clamped.
    """
    rate = minus_rate(A_log)
    clamped = rate * dt < LEAST_LOG_DECAY
    # masked before the products: inf * 0 would be NaN
    d_g = tl.where(clamped, 0.0, d_g)
    d_A_log = d_g * rate * tl.where(clamped, 0.0, dt)
    return d_g * rate, tl.where(A_log > LARGEST_A_LOG, 0.0, d_A_log)


@triton.jit
def decay(x, A_log, low, high):
    """The log-decay ``-exp(A_log) softplus(x)``, twice; bounds ``low``, ``high`` are
    not used."""
    g = _log_decay(softplus(x), A_log)
    return g, g


@triton.jit
def decay_backward(x, A_log, d_g, d_same, low, high):
    """Gradients of x and A_log from the log-decay's gradient ``d_g``; ``d_same`` is
    ignored."""
    d_dt, d_A_log = _log_decay_backward(softplus(x), A_log, d_g)
    return d_dt * sigmoid(x), d_A_log


@triton.jit
def bounded_decay(x, A_log, low, high):
    """The log-decay ``low sigmoid(exp(A_log) x)``, twice; ``high`` is not used."""
    g = low * sigmoid(-minus_rate(A_log) * x)
    return g, g


@triton.jit
def bounded_decay_backward(x, A_log, d_g, d_same, low, high):
    """Gradients of x and A_log from the log-decay's gradient ``d_g``; ``d_same`` is
    ignored."""
    rate = -minus_rate(A_log)
    sig = sigmoid(rate * x)
    d_x = d_g * low * sig * (1.0 - sig) * rate
    return d_x, tl.where(A_log > LARGEST_A_LOG, 0.0, d_x * x)


@triton.jit
def time_step(x, A_log, low, high):
    """The log-decay ``-exp(A_log) dt`` and the time step
    ``dt = clamp(softplus(x), low, high)``."""
    dt = softplus(x)
    dt = tl.where(dt < low, low, dt)  # NaN stays NaN
    dt = tl.where(dt > high, high, dt)
    return _log_decay(dt, A_log), dt


@triton.jit
def time_step_backward(x, A_log, d_g, d_dt, low, high):
    """Gradients of x and A_log from ``d_g`` and ``d_dt``, the gradients of the
    log-decay and of dt. Where the clamp of dt acts, the gradient of x is 0."""
    unclamped = softplus(x)
    _, dt = time_step(x, A_log, low, high)
    d_dt_of_decay, d_A_log = _log_decay_backward(dt, A_log, d_g)
    d_x = (d_dt + d_dt_of_decay) * sigmoid(x)
    return tl.where((unclamped < low) | (unclamped > high), 0.0, d_x), d_A_log


@triton.jit
def strength(x, A_log, low, high):
    """The strength ``high sigmoid(x)``, twice; ``A_log`` and ``low`` are not used."""
    y = sigmoid(x) * high
    return y, y


@triton.jit
def strength_backward(x, A_log, d_y, d_same, low, high):
    """Gradient of x, twice, from the strength's gradient ``d_y``; the caller drops the
    second."""
    sig = sigmoid(x)
    d_x = d_y * high * sig * (1.0 - sig)
    return d_x, d_x

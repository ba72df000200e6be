"""Decay and write strength of the gated delta rule.

Legend: ``alpha_H`` is ``[..., H]``, H value heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .elementwise import sigmoid, softplus


def least_log_decay(dtype: torch.dtype) -> float:
    """The bound below which every log-decay means the same: its exp rounds to 0 in ``dtype``.

    -104 in fp32 (exp(-103.98) is half of the smallest subnormal number, 2^-149) and -746 in fp64.
    Clamping a log-decay at the bound changes no decay. Its sums over a chunk then stay finite, and
    exact to the digits that exp() needs. Sums of -1e30 or -inf would give inf - inf = NaN.
    """
    numbers = torch.finfo(dtype)
    smallest = numbers.tiny * numbers.eps
    return float(math.floor(math.log(smallest) - math.log(2)))


def largest_A_log(dtype: torch.dtype) -> float:
    """66 in fp32, 532 in fp64: a rate exp(A_log) that leaves room for products with gradients.

    Above the bound the products overflow, and inf times a softplus of 0 is NaN. At the bound any
    softplus above 2e-27 already gives a decay of 0 (in fp32).
    """
    return float(math.floor(0.75 * math.log(torch.finfo(dtype).max)))


def largest_beta(allow_neg_eigval: bool) -> float:
    """The bound of write strengths: 1, or 2 with negative eigenvalues.

    A token's transition I - beta k k^T has the eigenvalue 1 - beta |k|^2: in (0, 1), or in (-1, 1).
    """
    return 2.0 if allow_neg_eigval else 1.0


def decay_and_write_gates(
    alpha_H: Tensor,
    beta_H: Tensor,
    A_log_H: Tensor,
    dt_bias_H: Tensor,
    *,
    allow_neg_eigval: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turn raw projections into log-decay ``g <= 0`` and write strength ``beta`` in (0, 1).

        g    = -exp(A_log) * softplus(alpha + dt_bias)
        beta = sigmoid(b), or 2 sigmoid(b) with ``allow_neg_eigval``

    in fp32 for inputs of any dtype: a rounded ``A_log`` is a wrong decay rate, and the recurrence
    compounds it over the whole sequence.

    ``g`` is clamped at :func:`least_log_decay` from below, ``A_log`` at :func:`largest_A_log` from
    above. The decay exp(g) is exactly 0 there with or without the clamp, and so is its gradient, as
    in the recurrence.

    Args:
        alpha_H, beta_H: ``[..., H]``, the alpha and beta sections of the projection.
        A_log_H, dt_bias_H: ``[H]``.
        allow_neg_eigval: see :func:`largest_beta`.

    Returns:
        ``g`` and ``beta``, both ``[..., H]`` in fp32 (fp64 for fp64 parameters).
    """
    wide = torch.promote_types(A_log_H.dtype, torch.float32)
    rate_H = A_log_H.to(wide).clamp(max=largest_A_log(wide)).exp()
    g_H = -rate_H * softplus(alpha_H.to(wide) + dt_bias_H.to(wide))
    beta_H = sigmoid(beta_H.to(wide)) * largest_beta(allow_neg_eigval)
    return g_H.clamp(min=least_log_decay(wide)), beta_H

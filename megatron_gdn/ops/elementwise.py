"""Activations, norms and bounds of gates in plain torch; norms sum squares in fp32 (or
fp64)."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# On a CPU torch computes a tensor in SIMD vectors. It computes the last few elements,
# which fill no vector, by other code with other rounding. So a token's value would
# depend on the number of later tokens. Therefore tensors are padded to a multiple of
# this many elements: two vectors of 512 bits with 16-bit elements, 2 * 512 / 16. (With
# several threads this helps only up to 32768 elements.)
_PADDED_ELEMENTS = 64
L2NORM_EPS = 1e-6  # of :func:`l2norm` and of the kernels that compute it


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, of any shape."""
    return _apply_padded(F.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``, of any shape."""
    return _apply_padded(torch.sigmoid, x)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))`` of a tensor of any shape; where x is above 20, the result is
    x."""
    return _apply_padded(F.softplus, x)


def _apply_padded(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Elementwise ``function`` of ``x``; on a CPU ``x`` is padded for the call, so that
    torch computes all elements in SIMD vectors."""
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    missing = -len(flat) % _PADDED_ELEMENTS
    if not missing:
        return function(flat).view(x.shape)
    return function(F.pad(flat, (0, missing)))[: len(flat)].view(x.shape)


def l2norm(x: Tensor, eps: float = L2NORM_EPS) -> Tensor:
    """Scale the last dimension to unit length: ``x * rsqrt(sum(x^2) + eps)``.

    ``eps`` is under the root, so an all-zero row (padding) gives zeros and a finite
    gradient.

    Args:
        x: ``[..., D]``, any float dtype.

    Returns:
        ``[..., D]`` in ``x.dtype``; the sum of squares is taken in fp32 (fp64 for fp64
        input).
    """
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x_wide * torch.rsqrt(x_wide.square().sum(-1, keepdim=True) + eps)).to(
        x.dtype
    )


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, zero_centered: bool = False
) -> Tensor:
    """RMSNorm over the last dimension: ``x * rsqrt(mean(x^2) + eps) * gamma``.

    Args:
        x: ``[..., D]``, any float dtype.
        weight: ``[D]``; ``gamma`` is ``weight``, or ``1 + weight`` if ``zero_centered``
            (as with Megatron's ``layernorm_zero_centered_gamma``). Without weight,
            ``gamma`` is 1.

    Returns:
        ``[..., D]`` in ``x.dtype``, rounded once at the end.
    """
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        gamma = weight.to(y.dtype)
        y = y * (1 + gamma if zero_centered else gamma)
    return y.to(x.dtype)


def least_log_decay(dtype: torch.dtype) -> float:
    """The number to which smaller log-decays are clamped: -104 in fp32, -746 in fp64.

    exp of this number is already 0. Sums of clamped log-decays are finite; with -inf a
    difference of two sums would be -inf - (-inf) = NaN.
    """
    numbers = torch.finfo(dtype)
    smallest = numbers.tiny * numbers.eps  # the smallest positive number
    # exp of the result is below half of this number, so exp is rounded to 0
    return float(math.floor(math.log(smallest) - math.log(2)))


def largest_A_log(dtype: torch.dtype) -> float:
    """The number to which larger A_log are clamped: 66 in fp32, 532 in fp64.

    Let max be the dtype's largest number. Then exp(A_log) is at most max^0.75, and its
    product with a gradient up to max^0.25 is finite. A larger A_log would change no
    decay: at this one exp(g) is already 0 for every softplus above 2e-27 (fp32).
    """
    return float(math.floor(0.75 * math.log(torch.finfo(dtype).max)))


def largest_beta(allow_neg_eigval: bool) -> float:
    """The upper bound of write strengths beta: 1, or 2 with ``allow_neg_eigval``.

    A token multiplies the state by I - beta k k^T. The eigenvalue 1 - beta |k|^2 of
    this matrix is in (0, 1) for the bound 1, and in (-1, 1) for the bound 2.
    """
    if allow_neg_eigval:
        return 2.0
    return 1.0

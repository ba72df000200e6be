"""Scales gradients to fp16 by powers of two, in plain torch; the twin of
:mod:`.half_kernels`."""

from __future__ import annotations

import torch
from torch import Tensor

BIAS, MANTISSA = 127, 23  # fp32's exponent bias, and its number of mantissa bits


def to_half(
    x: Tensor, key_heads: int, log2_bound: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale ``x [B, S, H, V]`` by powers of two, so that |x| < ``2^log2_bound``.

    The value heads of one key head have the same power.

    Returns:
        x times the powers, rounded once to fp16; the powers, and the inverse powers,
        ``[H]`` fp32.
    """
    exponent = power_exponent(x, key_heads, log2_bound, (0, 1, 3))
    # 2 BIAS - exponent is the exponent of the inverse power
    up, down = (_powers_of_two(e, x.shape[2]) for e in (exponent, 2 * BIAS - exponent))
    half = torch.empty(x.shape, dtype=torch.float16, device=x.device)
    return torch.mul(x, up[:, None], out=half), up, down


def lower_powers(
    half: Tensor, up: Tensor, d_final: Tensor, key_heads: int, log2_bound: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lower the powers ``up [H]`` of :func:`to_half`, so that powers times the final
    states' gradients ``d_final [N, H, K, V]`` are below 2^log2_bound.

    ``half``, the result of `to_half`, is multiplied in place by new / old powers;
    elements that become smaller than fp16's normal numbers are rounded again. Returns
    the ratios new / old, the new powers and the inverse powers, each ``[H]`` fp32.
    """
    largest_exponent = power_exponent(d_final, key_heads, log2_bound, (0, 2, 3))
    H = len(up)
    # the value heads of a key head have the same power
    old_exponent = up.view(torch.int32)[:: H // key_heads] >> MANTISSA
    new_exponent = torch.minimum(old_exponent, largest_exponent)
    # If ``change`` is 0, ``ratio`` is 0: every element of ``half`` would underflow in
    # fp16.
    change = (new_exponent - old_exponent + BIAS).clamp(min=0)
    ratio, up, down = (
        _powers_of_two(e, H) for e in (change, new_exponent, 2 * BIAS - new_exponent)
    )
    half.mul_(ratio[:, None])
    return ratio, up, down


def power_exponent(
    x: Tensor, key_heads: int, log2_bound: int, dims: tuple[int, ...]
) -> Tensor:
    """The fp32 exponents ``[G]`` int32, with their bias, of powers of two that bring
    |x| below ``2^log2_bound``.

    ``dims`` are all dimensions of x except the dimension of the value heads. After
    scaling, the largest |x| of a key head is in ``[2^(log2_bound - 1), 2^log2_bound)``,
    or below 2^2 if |x| is near fp32's largest number. inf and NaN in one document count
    as zero, so that they do not change the power of other documents. The powers are at
    least 2^-126 and at most 2^126.
    """
    if x.numel() == 0:
        most_G = torch.zeros(key_heads, dtype=torch.float32, device=x.device)
    else:
        finite = torch.where(x.isfinite(), x, 0)
        most_H = torch.linalg.vector_norm(finite, float("inf"), dim=dims)
        most_G = most_H.float().view(key_heads, -1).amax(1)
    exponent = most_G.view(torch.int32) >> MANTISSA & 0xFF
    # |x| is below 2^(exponent - BIAS + 1)
    return (2 * BIAS - 1 + log2_bound - exponent).clamp(1, 2 * BIAS - 1)


def _powers_of_two(exponent: Tensor, value_heads: int) -> Tensor:
    """Turn exponents ``[G]``, with their bias, into fp32 powers of two, repeated for
    value heads: ``[H]``."""
    power = (exponent << MANTISSA).view(torch.float32)
    return power.repeat_interleave(
        value_heads // len(exponent), output_size=value_heads
    )

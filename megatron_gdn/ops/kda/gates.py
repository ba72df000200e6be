"""Decay per channel and write strength of Kimi Delta Attention.

Legend: H heads, K key dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..elementwise import sigmoid, softplus
from ..gates import largest_A_log, least_log_decay


def channel_gates(
    f: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None = None
) -> tuple[Tensor, Tensor]:
    """Turn raw projections into log-decays ``g <= 0`` and write strength ``beta`` in (0, 1).

        g    = -exp(A_log) softplus(f + dt_bias)
        g    = lower_bound sigmoid(exp(A_log) (f + dt_bias))          with a lower bound
        beta = sigmoid(b)

    in fp32 for inputs of any dtype. ``A_log`` and an unbounded g are clamped as in
    :func:`..gates.decay_and_write_gates`.

    Args:
        f: ``[..., H K]``, the forget gate's section of a row.
        b: ``[..., H]``.
        A_log, dt_bias: ``[H]``, ``[H K]``.
        lower_bound: of g, below 0; None: unbounded.

    Returns:
        ``g [..., H, K]`` and ``beta [..., H]`` in fp32 (fp64 for fp64 parameters).
    """
    wide = torch.promote_types(A_log.dtype, torch.float32)
    rate = A_log.to(wide).clamp(max=largest_A_log(wide)).exp()[:, None]
    x = (f.to(wide) + dt_bias.to(wide)).unflatten(-1, (len(A_log), -1))
    if lower_bound is None:
        g = (-rate * softplus(x)).clamp(min=least_log_decay(wide))
    else:
        g = lower_bound * sigmoid(rate * x)
    return g, sigmoid(b.to(wide))

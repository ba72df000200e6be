"""The layer's two normalisations in plain torch; statistics are always fp32 (or fp64).

Legend: D size of the last dimension, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .elementwise import silu


def l2norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Scale the last dimension to unit length: ``x * rsqrt(sum(x^2) + eps)``.

    ``eps`` is added under the root, so an all-zero row (padding) gives zeros and a finite gradient.
    ``x / max(|x|, eps)`` would have no finite gradient there.

    Args:
        x: ``[..., D]``, any float dtype.

    Returns:
        ``[..., D]`` in ``x.dtype``; the sum of squares is taken in fp32 (fp64 for fp64 input).
    """
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (x_wide * torch.rsqrt(x_wide.square().sum(-1, keepdim=True) + eps)).to(x.dtype)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float = 1e-6, zero_centered: bool = False
) -> Tensor:
    """RMSNorm over the last dimension: ``x * rsqrt(mean(x^2) + eps) * gamma``.

    Args:
        x: ``[..., D]``, any float dtype.
        weight: ``[D]``; ``gamma`` is ``weight``, or ``1 + weight`` when ``zero_centered`` (the
            form Megatron stores under ``layernorm_zero_centered_gamma``). None means 1.

    Returns:
        ``[..., D]`` in ``x.dtype``, rounded once at the end.
    """
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = x_wide * torch.rsqrt(x_wide.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        gamma = weight.to(y.dtype)
        y = y * (1 + gamma if zero_centered else gamma)
    return y.to(x.dtype)


def rms_norm_gated(
    x: Tensor, z: Tensor, weight: Tensor | None, eps: float = 1e-6, zero_centered: bool = False
) -> Tensor:
    """The layer's output norm: ``RMSNorm(x) * SiLU(z)``, computed in fp32 and rounded once.

    Args:
        x: output of the delta rule, ``[..., V]``.
        z: the gate, same shape.
        weight, eps, zero_centered: as in :func:`rms_norm`.

    Returns:
        ``[..., V]`` in ``x.dtype``.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    return (rms_norm(x.to(wide), weight, eps, zero_centered) * silu(z.to(wide))).to(x.dtype)

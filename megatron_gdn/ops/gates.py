"""Decay and write strength of the gated delta rule.

Legend: ``alpha_H`` stands for ``[..., H]``, H value heads.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def decay_and_write_gates(
    alpha_H: Tensor, beta_H: Tensor, A_log_H: Tensor, dt_bias_H: Tensor
) -> tuple[Tensor, Tensor]:
    """Turn raw projections into log-decay ``g <= 0`` and write strength ``beta`` in (0, 1).

        g    = -exp(A_log) * softplus(alpha + dt_bias)
        beta = sigmoid(b)

    in fp32 whatever the inputs are: a rounded ``A_log`` is a wrong decay rate, which the
    recurrence then compounds over the whole sequence.

    Args:
        alpha_H, beta_H: ``[..., H]``, the alpha and beta sections of the projection.
        A_log_H, dt_bias_H: ``[H]``.

    Returns:
        ``g`` and ``beta``, both ``[..., H]`` in fp32 (fp64 for fp64 parameters).
    """
    wide = torch.promote_types(A_log_H.dtype, torch.float32)
    g_H = -A_log_H.to(wide).exp() * F.softplus(alpha_H.to(wide) + dt_bias_H.to(wide))
    return g_H, beta_H.to(wide).sigmoid()

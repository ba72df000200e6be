"""Functions that the ``reference.py`` of several mixers share, for one sequence, in
plain torch.

Legend: T tokens, C channels, W taps of the convolution.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def causal_conv1d(x_TC: Tensor, weight_C1W: Tensor, bias_C: Tensor | None) -> Tensor:
    """``y_t = bias + sum_j weight_j x_{t - W + 1 + j}`` for each channel, ``[T, C]``; x
    is zero before the sequence."""
    C, _, W = weight_C1W.shape
    padded_CT = F.pad(x_TC.T, (W - 1, 0))
    return F.conv1d(padded_CT, weight_C1W, bias_C, groups=C).T


def unit_length(x: Tensor) -> Tensor:
    """``x / sqrt(sum(x^2) + 1e-6)`` over the last dimension; zeros stay zeros."""
    return x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

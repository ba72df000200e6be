"""Few columns of a projection behind an RMSNorm, in plain torch: the twin of the Triton kernels.

    r = 1 / sqrt(mean(x^2) + eps);  y = r (x @ factor^T)

The norm is a factor of each token, so normed rows are neither written nor kept.

Legend: T tokens, D hidden size, P columns.
"""

from __future__ import annotations

import torch
from torch import Tensor


def forward(
    x_TD: Tensor, factor_PD: Tensor, eps: float, normed: bool
) -> tuple[Tensor, Tensor | None]:
    """y ``[T, P]`` in the dtype of x, and r ``[T]`` in fp32; without the norm r is 1, here None."""
    r_T = None
    y = _wide_product(x_TD, factor_PD.t())
    if normed:
        size = torch.linalg.vector_norm(x_TD, dim=-1, dtype=_wide(x_TD))
        r_T = (size.square() / x_TD.shape[-1] + eps).rsqrt()
        y = y * r_T[:, None]
    return y.to(x_TD.dtype), r_T


def backward(
    x_TD: Tensor, factor_PD: Tensor, d_y_TP: Tensor, y_TP: Tensor, r_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and ``(r d_y)^T x [P, D]`` in fp32, which is factor's gradient.

    r depends on x as well: d_x = (r d_y) @ factor - r^2 / D (y . d_y) x.
    """
    if r_T is None:
        return d_y_TP @ factor_PD, _wide_product(d_y_TP.t(), x_TD)
    d_scaled = (d_y_TP * r_T[:, None]).to(x_TD.dtype)
    along_T = (y_TP.to(r_T.dtype) * d_y_TP).sum(-1) * r_T.square() / x_TD.shape[-1]
    d_x = torch.addcmul(d_scaled @ factor_PD, along_T[:, None].to(x_TD.dtype), x_TD, value=-1)
    return d_x, _wide_product(d_scaled.t(), x_TD)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, not rounded to 16 bits."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(_wide(a)) @ b.to(_wide(b))

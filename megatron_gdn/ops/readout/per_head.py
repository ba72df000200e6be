"""The plain-torch twin of :mod:`.norm`: same signatures, any device, fp64 for fp64 input.

Legend: S seq, B batch, P projection width, H value heads, V value dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..norm import rms_norm_gated


def gated_norm_forward(
    o: Tensor,
    proj: Tensor,
    gamma: Tensor,
    z: slice,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """As :func:`.norm.gated_norm_forward`, differentiable when ``out`` is None."""
    gate = proj[..., z].unflatten(-1, o.shape[2:])
    wide = torch.promote_types(proj.dtype, torch.float32)
    y = rms_norm_gated(o.to(wide), gate.transpose(0, 1), gamma, eps, zero_centered)
    y = y.transpose(0, 1).flatten(2).to(proj.dtype)
    return y.contiguous() if out is None else out.copy_(y)


def gated_norm_backward(
    d_out: Tensor,
    o: Tensor,
    proj: Tensor,
    gamma: Tensor,
    z: slice,
    d_proj: Tensor,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
) -> tuple[Tensor, Tensor]:
    """As :func:`.norm.gated_norm_backward`, through autograd of the forward above."""
    wide = torch.promote_types(proj.dtype, torch.float32)
    with torch.enable_grad():
        leaves = [x.detach().to(wide).requires_grad_() for x in (o, proj, gamma)]
        o_wide, proj_wide, gamma_wide = leaves
        out = gated_norm_forward(
            o_wide, proj_wide, gamma_wide, z, eps=eps, zero_centered=zero_centered
        )
    d_o, d_rows, d_gamma = torch.autograd.grad(out, leaves, d_out.to(wide))
    d_proj[..., z] = d_rows[..., z]
    return d_o.to(proj.dtype).contiguous(), d_gamma.to(gamma.dtype)

"""The Mamba2 mixer for one sequence, step by step in plain torch.

Dao, Gu, "Transformers are SSMs", 2024. The mixer computes this function in fewer
passes; ``tests/layer/test_equation.py`` compares the two in fp64.

Legend: T tokens, D hidden size, C channels, G groups, H heads, N state dim, V head dim.
Each group's B and C serve H / G neighbouring heads. The parameter D is called ``skip``
here.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.reference_steps import causal_conv1d
from .sizes import Mamba2Dims


def mamba2(
    x_TD: Tensor,
    parameters: Mapping[str, Tensor],
    dims: Mamba2Dims,
    *,
    norm_eps: float = 1e-5,
    rmsnorm: bool = True,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
) -> Tensor:
    """The mixer's output ``[T, D]`` for one sequence ``[T, D]``; differentiable.

    Args:
        parameters: the mixer's parameters by name, not split (tensor-parallel size 1).
        dims: the sizes of the mixer.
        norm_eps, rmsnorm, dt_limit: as in :class:`megatron_gdn.Mamba2Mixer`.
    """
    p = parameters
    o_TC, z_TC = recurrence_and_gate(x_TD, p, dims, dt_limit)

    # Gate, then norm over each group, then project back.
    y_TC = o_TC * F.silu(z_TC)
    if rmsnorm:
        y_TGC = y_TC.unflatten(-1, (dims.num_groups, -1))
        y_TGC = F.rms_norm(y_TGC, y_TGC.shape[-1:], None, norm_eps)
        y_TC = y_TGC.flatten(1) * p["norm.weight"]
    return F.linear(y_TC, p["out_proj.weight"], p.get("out_proj.bias"))


def recurrence_and_gate(
    x_TD: Tensor,
    parameters: Mapping[str, Tensor],
    dims: Mamba2Dims,
    dt_limit: tuple[float, float],
) -> tuple[Tensor, Tensor]:
    """The recurrence's output with the skip connection, and the output gate z before
    its activation, each ``[T, H V]``."""
    p = parameters
    # the dtype of time steps and state
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    G, H = dims.num_groups, dims.num_heads
    N, V = dims.state_dim, dims.head_dim

    # Project.
    row_TP = F.linear(x_TD, p["in_proj.weight"], p.get("in_proj.bias"))
    z, xBC, dt_TH = row_TP.split((H * V, H * V + 2 * G * N, H), dim=-1)

    # A causal convolution of each channel, then SiLU.
    xBC = F.silu(causal_conv1d(xBC, p["conv1d_weight"], p.get("conv1d_bias")))
    x, B, C = xBC.split((H * V, G * N, G * N), dim=-1)
    x_THV = x.unflatten(-1, (H, V)).to(wide)
    B_THN = B.unflatten(-1, (G, N)).to(wide).repeat_interleave(H // G, dim=1)
    C_THN = C.unflatten(-1, (G, N)).to(wide).repeat_interleave(H // G, dim=1)

    # Time step and log-decay.
    dt_TH = F.softplus(dt_TH.to(wide) + p["dt_bias"]).clamp(*dt_limit)
    g_TH = -p["A_log"].exp() * dt_TH

    # The recurrence: decay, write dt x at the key B, read by C.
    S_HNV = x_TD.new_zeros(H, N, V, dtype=wide)
    outputs = []
    for x_HV, B_HN, C_HN, dt_H, g_H in zip(
        x_THV, B_THN, C_THN, dt_TH, g_TH, strict=True
    ):
        S_HNV = g_H.exp()[:, None, None] * S_HNV
        S_HNV = S_HNV + torch.einsum("hn,hv->hnv", B_HN, dt_H[:, None] * x_HV)
        outputs.append(torch.einsum("hnv,hn->hv", S_HNV, C_HN))
    skip_HV = p["D"].view(H, -1)
    o_THV = torch.stack(outputs) + skip_HV * x_THV
    return o_THV.to(x_TD.dtype).flatten(1), z

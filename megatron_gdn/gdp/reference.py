"""The Gated DeltaProduct layer for one sequence, step by step in plain torch.

Siems, Carstensen, Zela, Hutter, Pontil, Grazzi, "DeltaProduct: Improving State-Tracking
in Linear RNNs via Householder Products", 2025. The layer computes this function in
fewer passes; ``tests/layer/test_equation.py`` compares the two in fp64.

Legend: T tokens, D hidden size, G groups, H heads, K state dim, V head dim, n updates
per token. Each group's query and keys serve H / G neighbouring heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.reference_steps import causal_conv1d, unit_length
from .sizes import GDPDims


def gated_delta_product(
    x_TD: Tensor,
    parameters: Mapping[str, Tensor],
    dims: GDPDims,
    *,
    norm_eps: float = 1e-5,
) -> Tensor:
    """The layer's output ``[T, D]`` for one sequence ``[T, D]``; differentiable.

    Args:
        parameters: the layer's parameters by name, not split (tensor-parallel size 1).
        dims: the sizes of the layer.
        norm_eps: of the output norm.
    """
    p = parameters
    # the dtype of gates and state
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    n = dims.num_householder
    H, G = dims.num_heads, dims.num_groups
    K, V = dims.state_dim, dims.head_dim

    # Project.
    row_TP = F.linear(x_TD, p["in_proj.weight"], p.get("in_proj.bias"))
    widths = (H * V, n * H * V + n * G * K + G * K, n * H, H)
    z_TC, vkq_TC, b, a_TH = row_TP.split(widths, dim=-1)

    # A causal convolution of each channel, then SiLU.
    vkq_TC = causal_conv1d(vkq_TC, p["conv1d.weight"], p.get("conv1d.bias"))
    v, k, q = F.silu(vkq_TC).split((n * H * V, n * G * K, G * K), dim=-1)
    v_TnHV = v.unflatten(-1, (n, H, V)).to(wide)
    k_TnGK = unit_length(k.unflatten(-1, (n, G, K)).to(wide))
    q_TGK = unit_length(q.unflatten(-1, (G, K)).to(wide)) / K**0.5

    # One log-decay per token and head, one write strength per update and head.
    rate_H = p["A_log"].exp()
    g_TH = -rate_H * F.softplus(a_TH.to(wide) + p["dt_bias"])
    beta_TnH = b.to(wide).sigmoid().unflatten(-1, (n, H))

    # Each group's query and keys, for each of its heads.
    k_TnHK = k_TnGK.repeat_interleave(H // G, dim=2)
    q_THK = q_TGK.repeat_interleave(H // G, dim=1)

    # The rule: decay, then n times erase what the key reads and write the value, then
    # read by the query.
    S_HKV = x_TD.new_zeros(H, K, V, dtype=wide)
    outputs = []
    tokens = zip(q_THK, k_TnHK, v_TnHV, g_TH, beta_TnH, strict=True)
    for q_HK, k_nHK, v_nHV, g_H, beta_nH in tokens:
        S_HKV = g_H.exp()[:, None, None] * S_HKV
        for k_HK, v_HV, beta_H in zip(k_nHK, v_nHV, beta_nH, strict=True):
            read_HV = torch.einsum("hkv,hk->hv", S_HKV, k_HK)
            write_HV = beta_H[:, None] * (v_HV - read_HV)
            S_HKV = S_HKV + torch.einsum("hk,hv->hkv", k_HK, write_HV)
        outputs.append(torch.einsum("hkv,hk->hv", S_HKV, q_HK))
    o_TC = torch.stack(outputs).to(x_TD.dtype).flatten(1)

    # Gate, then norm over each group, then project back.
    y_TGC = (o_TC * F.silu(z_TC)).unflatten(-1, (G, -1))
    y_TGC = F.rms_norm(y_TGC, y_TGC.shape[-1:], None, norm_eps)
    y_TC = y_TGC.flatten(1) * p["norm.weight"]
    return F.linear(y_TC, p["out_proj.weight"], p.get("out_proj.bias"))

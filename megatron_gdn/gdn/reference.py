"""The Gated DeltaNet layer for one sequence, step by step in plain torch, in the
paper's order.

Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule",
2024. The layer computes this function for each document of a batch, in fewer passes;
``tests/layer/test_equation.py`` compares the two in fp64.

Legend: T tokens, D hidden size, G key heads, H value heads, K key dim, V value dim, C
channels of the convolution, P columns of in_proj. Each key head serves H / G
neighbouring value heads.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.reference_steps import causal_conv1d, unit_length
from .sizes import GDNDims

ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


def gated_delta_net(
    x_TD: Tensor,
    parameters: Mapping[str, Tensor],
    dims: GDNDims,
    *,
    norm_eps: float = 1e-6,
    zero_centered_norm: bool = False,
    use_qk_l2norm: bool = True,
    output_gate_activation: str = "silu",
    allow_neg_eigval: bool = False,
) -> Tensor:
    """The layer's output ``[T, D]`` for one sequence ``[T, D]``; differentiable.

    Args:
        parameters: the layer's parameters by name, not split (tensor-parallel size 1).
        dims: the sizes of the layer.
        norm_eps: the eps of ``out_norm``.
        zero_centered_norm: whether the norm multiplies by 1 + weight.
        use_qk_l2norm, output_gate_activation, allow_neg_eigval: as in
            :class:`megatron_gdn.GatedDeltaNet`.
    """
    p = parameters
    # dtype of q, k, v, the gates and the state
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    G, H = dims.num_key_heads, dims.num_value_heads
    K, V = dims.key_head_dim, dims.value_head_dim

    # Project.
    row_TP = F.linear(x_TD, p["in_proj.weight"], p.get("in_proj.bias"))
    widths = (G * K, G * K, H * V, H * V, H, H)
    query, key, value, z, b_TH, a_TH = row_TP.split(widths, dim=-1)

    # A causal convolution of each channel, then SiLU.
    qkv_TC = torch.cat([query, key, value], dim=-1)
    qkv_TC = F.silu(causal_conv1d(qkv_TC, p["conv1d.weight"], p.get("conv1d.bias")))
    q, k, v = qkv_TC.split((G * K, G * K, H * V), dim=-1)
    q_TGK = q.unflatten(-1, (G, K)).to(wide)
    k_TGK = k.unflatten(-1, (G, K)).to(wide)
    v_THV = v.unflatten(-1, (H, V)).to(wide)
    if use_qk_l2norm:
        q_TGK = unit_length(q_TGK)
        k_TGK = unit_length(k_TGK)
    q_THK = q_TGK.repeat_interleave(H // G, dim=1) / K**0.5
    k_THK = k_TGK.repeat_interleave(H // G, dim=1)

    # Log-decay and write strength.
    g_TH = -p["A_log"].exp() * F.softplus(a_TH.to(wide) + p["dt_bias"])
    beta_TH = b_TH.to(wide).sigmoid()
    if allow_neg_eigval:
        beta_TH = 2 * beta_TH

    # The gated delta rule: decay, erase what the key reads, write the value, read by
    # the query.
    S_HKV = x_TD.new_zeros(H, K, V, dtype=wide)
    outputs = []
    for q_HK, k_HK, v_HV, g_H, beta_H in zip(
        q_THK, k_THK, v_THV, g_TH, beta_TH, strict=True
    ):
        S_HKV = g_H.exp()[:, None, None] * S_HKV
        read_HV = torch.einsum("hkv,hk->hv", S_HKV, k_HK)
        written_HV = beta_H[:, None] * (v_HV - read_HV)
        S_HKV = S_HKV + torch.einsum("hk,hv->hkv", k_HK, written_HV)
        outputs.append(torch.einsum("hkv,hk->hv", S_HKV, q_HK))
    o_THV = torch.stack(outputs).to(x_TD.dtype)

    # Norm over each head, gate, project back.
    gamma_V = p["out_norm.weight"] + int(zero_centered_norm)
    o_THV = F.rms_norm(o_THV, (V,), gamma_V, norm_eps)
    gate_THV = ACTIVATIONS[output_gate_activation](z.unflatten(-1, (H, V)))
    return F.linear(
        (o_THV * gate_THV).flatten(1), p["out_proj.weight"], p.get("out_proj.bias")
    )

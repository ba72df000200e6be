"""The Gated DeltaNet-2 layer for one sequence, step by step in plain torch.

A Gated DeltaNet with three gates for each channel: the decay g, the erase gate b, the
write gate w. The layer computes this function in fewer passes;
``tests/layer/test_equation.py`` compares the two in fp64. Source:
``megatron.core.ssm.gated_delta_net.gdn2`` of Megatron's main branch.

Legend: T tokens, D hidden size, G key heads, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.reference_steps import causal_conv1d, unit_length
from .sizes import GDN2Dims


def gated_delta_net2(
    x_TD: Tensor,
    parameters: Mapping[str, Tensor],
    dims: GDN2Dims,
    *,
    norm_eps: float = 1e-6,
    zero_centered_norm: bool = False,
    use_qk_l2norm: bool = True,
) -> Tensor:
    """The layer's output ``[T, D]`` for one sequence ``[T, D]``; differentiable.

    Args:
        parameters: the layer's parameters by name, not split (tensor-parallel size 1).
        dims: the sizes of the layer.
        norm_eps, zero_centered_norm: of ``out_norm``; zero-centred: the factor is 1 +
            weight.
        use_qk_l2norm: as in :class:`megatron_gdn.GatedDeltaNet2`.
    """
    p = parameters
    # the dtype of gates and state
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    G, H = dims.num_key_heads, dims.num_value_heads
    K, V = dims.key_head_dim, dims.value_head_dim

    # Project.
    row_TP = F.linear(x_TD, p["in_proj.weight"], p.get("in_proj.bias"))
    widths = (G * K, G * K, H * V, H * V, G * K, G * K, H * V)
    query, key, value, z, f, b, w = row_TP.split(widths, dim=-1)

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

    # The gates of channels. exp(A_log) is the decay rate of a key head.
    rate_GK = p["A_log"].exp()[:, None]
    f_TGK = (f.to(wide) + p["dt_bias"]).unflatten(-1, (G, K))
    g_TGK = -rate_GK * F.softplus(f_TGK)
    b_TGK = b.to(wide).sigmoid().unflatten(-1, (G, K))
    w_THV = w.to(wide).sigmoid().unflatten(-1, (H, V))

    # Each key head's tensors, for each of its value heads.
    per_head = H // G
    q_THK = q_TGK.repeat_interleave(per_head, dim=1) / K**0.5
    k_THK = k_TGK.repeat_interleave(per_head, dim=1)
    g_THK = g_TGK.repeat_interleave(per_head, dim=1)
    erase_THK = (b_TGK * k_TGK).repeat_interleave(per_head, dim=1)
    write_THV = w_THV * v_THV

    # The rule: decay, erase what the gated key reads, write the gated value, read by
    # the query.
    S_HKV = x_TD.new_zeros(H, K, V, dtype=wide)
    outputs = []
    tokens = zip(q_THK, k_THK, g_THK, erase_THK, write_THV, strict=True)
    for q_HK, k_HK, g_HK, erase_HK, write_HV in tokens:
        S_HKV = g_HK.exp()[:, :, None] * S_HKV
        read_HV = torch.einsum("hkv,hk->hv", S_HKV, erase_HK)
        S_HKV = S_HKV + torch.einsum("hk,hv->hkv", k_HK, write_HV - read_HV)
        outputs.append(torch.einsum("hkv,hk->hv", S_HKV, q_HK))
    o_THV = torch.stack(outputs).to(x_TD.dtype)

    # Norm over each head, gate, project back.
    gamma_V = p["out_norm.weight"] + int(zero_centered_norm)
    o_THV = F.rms_norm(o_THV, (V,), gamma_V, norm_eps) * F.silu(z.unflatten(-1, (H, V)))
    return F.linear(o_THV.flatten(1), p["out_proj.weight"], p.get("out_proj.bias"))

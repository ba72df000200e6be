"""The Kimi Delta Attention layer for one sequence, step by step in plain torch.

A Gated DeltaNet with a decay for each channel of a key ("Kimi Linear: An Expressive,
Efficient Attention Architecture", 2025). The layer computes this function in fewer
passes; ``tests/layer/test_equation.py`` compares the two in fp64.

Legend: T tokens, D hidden size, G key heads, H value heads, K key dim, V value dim. A
gate of a low rank R is ``[T, R]``, times a weight ``[columns, R]``.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.reference_steps import causal_conv1d, unit_length
from .sizes import KDADims


def kimi_delta_attention(
    x_TD: Tensor,
    parameters: Mapping[str, Tensor],
    dims: KDADims,
    *,
    norm_eps: float = 1e-6,
    zero_centered_norm: bool = False,
    use_qk_l2norm: bool = True,
    gate_lower_bound: float | None = None,
) -> Tensor:
    """The layer's output ``[T, D]`` for one sequence ``[T, D]``; differentiable.

    Args:
        parameters: the layer's parameters by name, whole (tensor-parallel size 1).
        dims: the sizes of the layer; a ``forget_rank`` or ``output_rank`` of 0 is a
            full gate.
        norm_eps, zero_centered_norm: of ``out_norm``; zero-centred: the factor is 1 +
            weight.
        use_qk_l2norm, gate_lower_bound: as in
            :class:`megatron_gdn.KimiDeltaAttention`.
    """
    p = parameters
    # the dtype of gates and state
    wide = torch.promote_types(x_TD.dtype, torch.float32)
    G, H = dims.num_key_heads, dims.num_value_heads
    K, V = dims.key_head_dim, dims.value_head_dim

    # Project. A gate of a low rank has two weights.
    row_TP = F.linear(x_TD, p["in_proj.weight"], p.get("in_proj.bias"))
    widths = (G * K, G * K, H * V)
    if dims.gates_in_in_proj:
        widths += (H * K, H * V)
        query, key, value, f, z = row_TP.split(widths, dim=-1)
    else:
        query, key, value = row_TP.split(widths, dim=-1)
        f = gate_of(x_TD, p, "f")
        z = gate_of(x_TD, p, "g")
    b_TH = F.linear(x_TD, p["beta_proj.weight"], p.get("beta_proj.bias"))

    # A causal convolution of each channel, then SiLU.
    qkv_TC = torch.cat([query, key, value], dim=-1)
    qkv_TC = F.silu(causal_conv1d(qkv_TC, p["conv1d.weight"], p.get("conv1d.bias")))
    q, k, v = qkv_TC.split((G * K, G * K, H * V), dim=-1)
    q_TGK = q.unflatten(-1, (G, K)).to(wide)
    k_TGK = k.unflatten(-1, (G, K)).to(wide)
    if use_qk_l2norm:
        q_TGK = unit_length(q_TGK)
        k_TGK = unit_length(k_TGK)
    v_THV = v.unflatten(-1, (H, V)).to(wide)
    q_THK = q_TGK.repeat_interleave(H // G, dim=1) / K**0.5
    k_THK = k_TGK.repeat_interleave(H // G, dim=1)

    # Log-decay of each channel, and write strength.
    rate_HK = p["A_log"].exp()[:, None]
    f_THK = (f.to(wide) + p["dt_bias"]).unflatten(-1, (H, K))
    if gate_lower_bound is None:
        g_THK = -rate_HK * F.softplus(f_THK)
    else:
        g_THK = gate_lower_bound * (rate_HK * f_THK).sigmoid()
    beta_TH = b_TH.to(wide).sigmoid()

    # The delta rule: decay, erase what the key reads, write the value, read by the
    # query.
    S_HKV = x_TD.new_zeros(H, K, V, dtype=wide)
    outputs = []
    for q_HK, k_HK, v_HV, g_HK, beta_H in zip(
        q_THK, k_THK, v_THV, g_THK, beta_TH, strict=True
    ):
        S_HKV = g_HK.exp()[:, :, None] * S_HKV
        read_HV = torch.einsum("hkv,hk->hv", S_HKV, k_HK)
        written_HV = beta_H[:, None] * (v_HV - read_HV)
        S_HKV = S_HKV + torch.einsum("hk,hv->hkv", k_HK, written_HV)
        outputs.append(torch.einsum("hkv,hk->hv", S_HKV, q_HK))
    o_THV = torch.stack(outputs).to(x_TD.dtype)

    # Norm over each head, gate, project back.
    gamma_V = p["out_norm.weight"] + int(zero_centered_norm)
    o_THV = (
        F.rms_norm(o_THV, (V,), gamma_V, norm_eps) * z.unflatten(-1, (H, V)).sigmoid()
    )
    return F.linear(o_THV.flatten(1), p["out_proj.weight"], p.get("out_proj.bias"))


def gate_of(x_TD: Tensor, parameters: Mapping[str, Tensor], letter: str) -> Tensor:
    """The forget gate ("f") or output gate ("g") of all heads, ``[T, columns]``."""
    if f"{letter}_proj.weight" in parameters:
        return F.linear(x_TD, parameters[f"{letter}_proj.weight"])
    narrow_TR = F.linear(x_TD, parameters[f"{letter}_a_proj.weight"])
    return F.linear(narrow_TR, parameters[f"{letter}_b_proj.weight"])

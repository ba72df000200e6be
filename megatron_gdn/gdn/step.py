"""One token of many sequences whose states lie in slots, in two launches (Triton).

The plain twin is :func:`megatron_gdn.ops.generation.step.decode`. No context calls it yet. Every
program reads the number of its slot from the device and overwrites the slot's history or state in
place: no other program reads those elements.

Legend: N rows, M slots, P projection width, C conv channels, W taps, G key heads, H value heads, K
key dim, V value dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.delta_rule.base import HeadSizes
from ..ops.elementwise import largest_beta
from ..ops.front.conv_forward import conv_head_step
from ..ops.kernels.elementwise import LEAST_LOG_DECAY, minus_rate, sigmoid, softplus
from ..ops.kernels.tiles import block_dim

_BLOCK_V = 32  # columns of a state for one program: enough programs for a batch of one


def step_slots(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    history: Tensor,
    state: Tensor,
    slots: Tensor,
    sizes: HeadSizes,
    *,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """The delta rule's output ``[N, 1, H, V]`` in fp32 for one token of each sequence.

    Nothing depends on values on the host, so the call can be captured in a CUDA graph.

    Args:
        rows: ``[N, P]``, columns adjacent.
        history, state: ``[M, C, W - 1]`` in the dtype of ``rows`` and ``[M, H, K, V]`` fp32,
            contiguous; written.
        slots: int64 ``[N]``, all different.
    """
    N = rows.shape[0]
    G, H, K, V = sizes
    wide = {"dtype": torch.float32, "device": rows.device}
    q, k = (torch.empty(N, G, K, **wide) for _ in range(2))
    v, o = (torch.empty(N, H, V, **wide) for _ in range(2))
    g, beta = (torch.empty(N, H, **wide) for _ in range(2))
    taps = conv_weight.shape[-1]
    prepare_step_kernel[(2 * G + H + 1, N)](
        rows, conv_weight, conv_bias, A_log, dt_bias, history, slots,
        q, k, v, g, beta, rows.stride(0), eps, largest_beta(allow_neg_eigval),
        G=G, H=H, K=K, V=V, W=taps,
        BLOCK_K=block_dim(K), BLOCK_V=block_dim(V), BLOCK_H=block_dim(H),
        HAS_BIAS=conv_bias is not None, NORMALISE=normalise_qk, num_warps=1,
    )  # fmt: skip
    block_v = min(_BLOCK_V, block_dim(V))
    state_step_kernel[(triton.cdiv(V, block_v), H, N)](
        q, k, v, g, beta, state, slots, o, K**-0.5,
        G=G, H=H, K=K, V=V, BLOCK_K=block_dim(K), BLOCK_V=block_v, num_warps=4,
    )  # fmt: skip
    return o[:, None]


@triton.jit
def prepare_step_kernel(
    proj_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, history_ptr, slot_ptr,
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, stride_n, eps, largest_beta,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_BIAS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """Grid (2 G + H + 1, N): q heads, k heads, v heads, and all gates."""
    head, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    proj_ptr += n * stride_n
    history_ptr += tl.load(slot_ptr + n).to(tl.int64) * ((2 * G * K + H * V) * (W - 1))
    if head < G:
        conv_head_step(
            proj_ptr, weight_ptr, bias_ptr, history_ptr, q_ptr + (n * G + head) * K, head * K, eps,
            K, BLOCK_K, W, HAS_BIAS, NORMALISE,
        )  # fmt: skip
    elif head < 2 * G:
        conv_head_step(
            proj_ptr, weight_ptr, bias_ptr, history_ptr, k_ptr + (n * G + head - G) * K, head * K,
            eps, K, BLOCK_K, W, HAS_BIAS, NORMALISE,
        )  # fmt: skip
    elif head < 2 * G + H:
        h = head - 2 * G
        conv_head_step(
            proj_ptr, weight_ptr, bias_ptr, history_ptr, v_ptr + (n * H + h) * V,
            2 * G * K + h * V, eps, V, BLOCK_V, W, HAS_BIAS, False,
        )  # fmt: skip
    else:
        h_H = tl.arange(0, BLOCK_H)
        real_H = h_H < H
        raw_ptr = proj_ptr + 2 * G * K + 2 * H * V + h_H  # beta, then alpha
        b_H = tl.load(raw_ptr, mask=real_H, other=0.0).to(tl.float32)
        alpha_H = tl.load(raw_ptr + H, mask=real_H, other=0.0).to(tl.float32)
        A_log_H = tl.load(A_log_ptr + h_H, mask=real_H, other=0.0).to(tl.float32)
        dt_bias_H = tl.load(dt_bias_ptr + h_H, mask=real_H, other=0.0).to(tl.float32)
        g_H = minus_rate(A_log_H) * softplus(alpha_H + dt_bias_H)
        g_H = tl.where(g_H < LEAST_LOG_DECAY, LEAST_LOG_DECAY, g_H)  # NaN stays NaN
        tl.store(g_ptr + n * H + h_H, g_H, mask=real_H)
        tl.store(beta_ptr + n * H + h_H, sigmoid(b_H) * largest_beta, mask=real_H)


@triton.jit
def state_step_kernel(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, state_ptr, slot_ptr, o_ptr, scale,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(V / BLOCK_V), H, N): BLOCK_V columns of one state, read once and written once."""
    h, n = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_K = tl.arange(0, BLOCK_K)
    v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_K, real_V = k_K < K, v_V < V
    real_KV = real_K[:, None] & real_V[None, :]
    slot = tl.load(slot_ptr + n).to(tl.int64)
    at_KV = state_ptr + (slot * H + h) * K * V + k_K[:, None] * V + v_V[None, :]
    key_head = n * G + h // (H // G)
    q_K = tl.load(q_ptr + key_head * K + k_K, mask=real_K, other=0.0).to(tl.float32)
    key_K = tl.load(k_ptr + key_head * K + k_K, mask=real_K, other=0.0).to(tl.float32)
    value_V = tl.load(v_ptr + (n * H + h) * V + v_V, mask=real_V, other=0.0).to(tl.float32)
    decay = tl.exp(tl.load(g_ptr + n * H + h))
    beta = tl.load(beta_ptr + n * H + h)
    S_KV = tl.load(at_KV, mask=real_KV, other=0.0) * decay
    error_V = value_V - tl.sum(S_KV * key_K[:, None], axis=0)
    S_KV += (beta * key_K)[:, None] * error_V[None, :]
    tl.store(at_KV, S_KV, mask=real_KV)
    o_V = tl.sum(S_KV * (q_K * scale)[:, None], axis=0)
    tl.store(o_ptr + (n * H + h) * V + v_V, o_V.to(o_ptr.dtype.element_ty), mask=real_V)

"""One token of many Mamba2 sequences whose states lie in slots, in two launches (Triton).

The plain twin is :func:`megatron_gdn.ops.generation.step.decode`. No context calls it yet. As in
:mod:`..gdn.step`, every program reads the number of its slot from the device and overwrites
elements that no other program reads.

Legend: N rows, M slots, C conv channels, W taps, H heads, G groups, V head dim, K state dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.front.conv_forward import conv_head_step
from ..ops.kernels.elementwise import LEAST_LOG_DECAY, minus_rate, softplus
from ..ops.kernels.tiles import block_dim
from ..ops.layout import Layout
from .kernels import sizes_of
from .plain import UNLIMITED

_BLOCK_V = 32  # columns of a state for one program: enough programs for a batch of one


def mamba2_step_slots(
    rows: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    D: Tensor,
    history: Tensor,
    state: Tensor,
    slots: Tensor,
    layout: Layout,
    *,
    dt_limit: tuple[float, float] = UNLIMITED,
) -> Tensor:
    """``[N, 1, H, V]`` fp32: the output of one token of each sequence, with D's skip.

    Nothing depends on values on the host: in a CUDA graph a replay reads rows and slots anew.

    Args:
        rows: ``[N, P]``, z | x | B | C | dt, columns adjacent.
        history, state: ``[M, C, W - 1]`` in the dtype of ``rows`` and ``[M, H, K, V]`` fp32, both
            contiguous; written.
        slots: int64 ``[N]``, all different.
    """
    N = rows.shape[0]
    H, G, V, K = sizes_of(layout)
    wide = {"dtype": torch.float32, "device": rows.device}
    x, o = (torch.empty(N, H, V, **wide) for _ in range(2))
    B, C = (torch.empty(N, G, K, **wide) for _ in range(2))
    dt, g = (torch.empty(N, H, **wide) for _ in range(2))
    shape = {"H": H, "G": G, "V": V, "K": K, "BLOCK_K": block_dim(K)}
    prepare_mamba2_step_kernel[(H + 2 * G + 1, N)](
        rows[:, layout.conv_columns.start :], conv_weight, conv_bias, A_log, dt_bias, history,
        slots, x, B, C, dt, g, rows.stride(0), *dt_limit,
        W=conv_weight.shape[-1], BLOCK_V=block_dim(V), BLOCK_H=block_dim(H),
        HAS_BIAS=conv_bias is not None, num_warps=1, **shape,
    )  # fmt: skip
    block_v = min(_BLOCK_V, block_dim(V))
    mamba2_state_step_kernel[(triton.cdiv(V, block_v), H, N)](
        x, B, C, dt, g, D, state, slots, o,
        BLOCK_V=block_v, D_OF_CHANNELS=D.numel() != H, num_warps=4, **shape,
    )  # fmt: skip
    return o[:, None]


@triton.jit
def prepare_mamba2_step_kernel(
    rows_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, history_ptr, slot_ptr,
    x_ptr, B_ptr, C_ptr, dt_ptr, g_ptr, stride_n, least_dt, greatest_dt,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_H: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Grid (H + 2 G + 1, N): heads of x, groups of B, groups of C, and all time steps.

    ``rows_ptr`` is at the first convolved column.
    """
    head, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    rows_ptr += n * stride_n
    history_ptr += tl.load(slot_ptr + n).to(tl.int64) * ((H * V + 2 * G * K) * (W - 1))
    if head < H:
        conv_head_step(
            rows_ptr, weight_ptr, bias_ptr, history_ptr, x_ptr + (n * H + head) * V, head * V,
            0.0, V, BLOCK_V, W, HAS_BIAS, False,
        )  # fmt: skip
    elif head < H + 2 * G:
        group = head - H
        out_ptr = B_ptr + (n * G + group) * K if group < G else C_ptr + (n * G + group - G) * K
        conv_head_step(
            rows_ptr, weight_ptr, bias_ptr, history_ptr, out_ptr, H * V + group * K, 0.0,
            K, BLOCK_K, W, HAS_BIAS, False,
        )  # fmt: skip
    else:
        h_H = tl.arange(0, BLOCK_H)
        real_H = h_H < H
        raw_H = tl.load(rows_ptr + H * V + 2 * G * K + h_H, mask=real_H, other=0.0)
        dt_bias_H = tl.load(dt_bias_ptr + h_H, mask=real_H, other=0.0).to(tl.float32)
        A_log_H = tl.load(A_log_ptr + h_H, mask=real_H, other=0.0).to(tl.float32)
        dt_H = softplus(raw_H.to(tl.float32) + dt_bias_H)
        dt_H = tl.where(dt_H < least_dt, least_dt, dt_H)  # NaN stays NaN
        dt_H = tl.where(dt_H > greatest_dt, greatest_dt, dt_H)
        g_H = minus_rate(A_log_H) * dt_H
        g_H = tl.where(g_H < LEAST_LOG_DECAY, LEAST_LOG_DECAY, g_H)
        tl.store(dt_ptr + n * H + h_H, dt_H, mask=real_H)
        tl.store(g_ptr + n * H + h_H, g_H, mask=real_H)


@triton.jit
def mamba2_state_step_kernel(
    x_ptr, B_ptr, C_ptr, dt_ptr, g_ptr, D_ptr, state_ptr, slot_ptr, o_ptr,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, D_OF_CHANNELS: tl.constexpr,
):  # fmt: skip
    """Grid (ceil(V / BLOCK_V), H, N): BLOCK_V columns of one state, read once and written once."""
    h, n = tl.program_id(1), tl.program_id(2).to(tl.int64)
    k_K = tl.arange(0, BLOCK_K)
    v_V = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    real_K, real_V = k_K < K, v_V < V
    real_KV = real_K[:, None] & real_V[None, :]
    slot = tl.load(slot_ptr + n).to(tl.int64)
    at_KV = state_ptr + (slot * H + h) * K * V + k_K[:, None] * V + v_V[None, :]
    group = n * G + h // (H // G)
    key_K = tl.load(B_ptr + group * K + k_K, mask=real_K, other=0.0)
    query_K = tl.load(C_ptr + group * K + k_K, mask=real_K, other=0.0)
    x_V = tl.load(x_ptr + (n * H + h) * V + v_V, mask=real_V, other=0.0)
    decay = tl.exp(tl.load(g_ptr + n * H + h))
    dt = tl.load(dt_ptr + n * H + h)
    if D_OF_CHANNELS:
        D_V = tl.load(D_ptr + h * V + v_V, mask=real_V, other=0.0).to(tl.float32)
        skipped_V = D_V * x_V
    else:
        skipped_V = tl.load(D_ptr + h).to(tl.float32) * x_V
    S_KV = tl.load(at_KV, mask=real_KV, other=0.0) * decay
    S_KV += key_K[:, None] * (dt * x_V)[None, :]
    tl.store(at_KV, S_KV, mask=real_KV)
    o_V = tl.sum(S_KV * query_K[:, None], axis=0) + skipped_V
    tl.store(o_ptr + (n * H + h) * V + v_V, o_V, mask=real_V)

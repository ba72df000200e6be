"""Triton kernel before the delta rule: conv + SiLU + l2norm + gates, in one launch.

Legend: S seq, B batch, G key heads, H value heads, K key dim, V value dim, D dim of the head at
hand, W taps; in tile names R segments walked side by side, T tokens of a span.

The kernel reads the projection rows where they lie: element (t, b, column) of ``proj`` is at
``t * stride_s + b * stride_b + column``. Arithmetic is fp32, with one rounding at the store.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..front.walk import (
    UNROLL,
    at_an_edge,
    convolve,
    forget,
    load_history,
    load_row,
    load_taps,
    push,
    store_row,
)
from ..kernels.elementwise import LEAST_LOG_DECAY, minus_rate, sigmoid, softplus


@triton.jit(noinline=True)  # for the compiler's sake, see walk.py
def _walk_head(
    proj_ptr, weight_ptr, bias_ptr, position_ptr, out_ptr,
    column, start, S, steps, stride_s, out_stride, eps,
    D: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    EDGE: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """One head, ROWS segments of ``steps`` tokens: y = l2norm(silu(conv(x))).

    ``proj_ptr`` is at (0, b, 0). A walk loads and widens every input once. A tiled convolution
    would do so W times, and that would limit its speed.
    """
    LOOK_OUT: tl.constexpr = PACKED and EDGE
    PADDED: tl.constexpr = D != BLOCK_D
    d_D = tl.arange(0, BLOCK_D)
    real_D = d_D < D
    d_1D = d_D[None, :]
    real_1D = real_D[None, :]
    first_R = tl.arange(0, ROWS) * steps  # relative to start, which the pointers include
    base = tl.cast(start, tl.int64)
    x_ptr = proj_ptr + base * stride_s + column
    out_ptr += base * out_stride
    room_R = S - start - first_R  # tokens from a segment's first to the end of the sequence
    taps = load_taps(weight_ptr, column, d_D, real_D, W)
    if HAS_BIAS:
        bias_D = tl.load(bias_ptr + column + d_D, mask=real_D, other=0.0).to(tl.float32)
        bias_1D = bias_D[None, :]
    else:
        bias_1D = tl.zeros((1, BLOCK_D), tl.float32)
    if LOOK_OUT:
        seen_R = tl.load(position_ptr + start + first_R, mask=room_R > 0, other=0)
    else:
        seen_R = start + first_R
    x_at_RD = x_ptr + first_R[:, None] * stride_s + d_1D
    history = load_history(x_at_RD, stride_s, seen_R, room_R > 0, real_1D, W, PADDED, EDGE)

    # In an unrolled loop, rows that move one step along are renamed instead of copied. Meanwhile
    # the stages load later steps to shared memory.
    for lap in tl.range(0, steps, UNROLL, num_stages=STAGES):
        for turn in tl.static_range(UNROLL):
            step = lap + turn
            t_R = first_R + step
            x_at_RD = x_ptr + t_R[:, None] * stride_s + d_1D
            x_RD = load_row(x_at_RD, room_R > step, real_1D, PADDED, EDGE)
            if LOOK_OUT:
                seen_R = tl.load(position_ptr + start + t_R, mask=room_R > step, other=0)
                history = forget(history, seen_R, W)
            x_RD = x_RD.to(tl.float32)
            pre_RD = convolve(x_RD, history, taps, bias_1D, W, HAS_BIAS)
            act_RD = pre_RD * sigmoid(pre_RD)
            if NORMALISE:
                if PADDED:
                    act_RD = tl.where(real_1D, act_RD, 0.0)
                act_RD = act_RD * tl.rsqrt(tl.sum(act_RD * act_RD, axis=1) + eps)[:, None]
            y_RD = act_RD.to(out_ptr.dtype.element_ty)
            at_RD = out_ptr + t_R[:, None] * out_stride + d_1D
            store_row(at_RD, y_RD, room_R > step, real_1D, PADDED, EDGE)
            history = push(x_RD, history, W - 1)


@triton.jit
def _conv_head(
    proj_ptr, weight_ptr, bias_ptr, position_ptr, out_ptr,
    column, start, S, steps, stride_s, out_stride, eps,
    D: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, PACKED: tl.constexpr,
    ONE_PATH: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """:func:`_walk_head`, with masks only where needed, with ONE_PATH everywhere."""
    if ONE_PATH or at_an_edge(position_ptr, start, S, ROWS * steps, W, PACKED):
        _walk_head(
            proj_ptr, weight_ptr, bias_ptr, position_ptr, out_ptr,
            column, start, S, steps, stride_s, out_stride, eps,
            D, ROWS, STAGES, BLOCK_D, W, HAS_BIAS, PACKED, True, NORMALISE,
        )  # fmt: skip
    else:
        _walk_head(
            proj_ptr, weight_ptr, bias_ptr, position_ptr, out_ptr,
            column, start, S, steps, stride_s, out_stride, eps,
            D, ROWS, STAGES, BLOCK_D, W, HAS_BIAS, PACKED, False, NORMALISE,
        )  # fmt: skip


@triton.jit
def _gates(
    raw_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, start, S, tokens, stride_s,
    H: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """All value heads of ``tokens`` tokens. ``raw_ptr`` is at the beta column of (0, b)."""
    SPAN: tl.constexpr = 32
    end = min(start + tokens, S) - start
    h_H = tl.arange(0, BLOCK_H)
    real_H = h_H < H
    A_log_H = tl.load(A_log_ptr + h_H, mask=real_H, other=0.0).to(tl.float32)
    dt_bias_H = tl.load(dt_bias_ptr + h_H, mask=real_H, other=0.0).to(tl.float32)
    rate_H = minus_rate(A_log_H)
    base = tl.cast(start, tl.int64)
    raw_ptr += base * stride_s
    g_ptr += base * H
    beta_ptr += base * H
    for span in tl.range(0, end, SPAN):
        t_T = span + tl.arange(0, SPAN)
        real_TH = (t_T < end)[:, None] & real_H[None, :]
        raw_TH = raw_ptr + t_T[:, None] * stride_s + h_H[None, :]
        b_TH = tl.load(raw_TH, mask=real_TH, other=0.0).to(tl.float32)
        alpha_TH = tl.load(raw_TH + H, mask=real_TH, other=0.0).to(tl.float32)
        out_TH = t_T[:, None] * H + h_H[None, :]
        g_TH = rate_H[None, :] * softplus(alpha_TH + dt_bias_H[None, :])
        g_TH = tl.where(g_TH < LEAST_LOG_DECAY, LEAST_LOG_DECAY, g_TH)  # NaN stays NaN
        tl.store(g_ptr + out_TH, g_TH, mask=real_TH)
        tl.store(beta_ptr + out_TH, sigmoid(b_TH), mask=real_TH)


@triton.jit(do_not_specialize=["S", "steps", "first_slot"])
def prepare_forward_kernel(
    proj_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, position_ptr,
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,
    S, steps, first_slot, stride_s, stride_b, eps,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, ONE_PATH: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """grid (heads, token tiles, B). Slot 0 .. 2G+H-1 is a head; slot 2G+H computes the gates.

    Heads are the fastest axis, so that programs that run together read whole rows. ``first_slot``
    skips slots.
    """
    slot = tl.program_id(0) + first_slot
    tokens = ROWS * steps
    start = tl.program_id(1) * tokens
    b = tl.cast(tl.program_id(2), tl.int64)
    proj_ptr += b * stride_b
    if slot < 2 * G:
        out_ptr = q_ptr + slot * K if slot < G else k_ptr + (slot - G) * K
        _conv_head(
            proj_ptr, weight_ptr, bias_ptr, position_ptr, out_ptr + b * S * (G * K),
            slot * K, start, S, steps, stride_s, G * K, eps,
            K, ROWS, STAGES, BLOCK_K, W, HAS_BIAS, PACKED, ONE_PATH, NORMALISE,
        )  # fmt: skip
    elif slot < 2 * G + H:
        h = slot - 2 * G
        _conv_head(
            proj_ptr, weight_ptr, bias_ptr, position_ptr, v_ptr + b * S * (H * V) + h * V,
            2 * G * K + h * V, start, S, steps, stride_s, H * V, eps,
            V, ROWS, STAGES, BLOCK_V, W, HAS_BIAS, PACKED, ONE_PATH, False,
        )  # fmt: skip
    else:
        _gates(
            proj_ptr + 2 * G * K + 2 * H * V, A_log_ptr, dt_bias_ptr, g_ptr + b * S * H,
            beta_ptr + b * S * H, start, S, tokens, stride_s, H, BLOCK_H,
        )  # fmt: skip

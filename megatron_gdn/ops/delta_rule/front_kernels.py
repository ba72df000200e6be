"""Triton kernels around the delta rule: conv + SiLU + l2norm + gates, and their backward.

The forward reads the projection rows where they lie: element (t, b, column) of ``proj`` is at
``t * stride_s + b * stride_b + column``. Arithmetic is fp32, with one rounding at the store. The
backward computes activations again from the rows.

Legend: S seq, B batch, G key heads, H value heads, K key dim, V value dim, D dim of the head at
hand, W taps; in tile names R segments walked side by side, T tokens of a span.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..front.conv_backward import conv_head_backward
from ..front.conv_forward import conv_head
from ..kernels.elementwise import LARGEST_A_LOG, LEAST_LOG_DECAY, minus_rate, sigmoid, softplus


@triton.jit
def _gates(
    raw_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, start, S, tokens, stride_s, largest_beta,
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
        tl.store(beta_ptr + out_TH, sigmoid(b_TH) * largest_beta, mask=real_TH)


@triton.jit(do_not_specialize=["S", "steps", "first_slot"])
def prepare_forward_kernel(
    proj_ptr, gates_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, position_ptr,
    lead_ptr, place_ptr, q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr,
    S, steps, first_slot, stride_s, stride_b, eps, largest_beta,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, HAS_HISTORY: tl.constexpr,
    ONE_PATH: tl.constexpr, NORMALISE: tl.constexpr, APART: tl.constexpr,
):  # fmt: skip
    """grid (heads, token tiles, B). Slot 0 .. 2G+H-1 is a head; slot 2G+H computes the gates.

    Heads are the fastest axis, so that programs that run together read whole rows. ``first_slot``
    skips slots. The gates are columns of ``proj``; with APART they are ``gates [S, B, 2 H]``.
    """
    slot = tl.program_id(0) + first_slot
    tokens = ROWS * steps
    start = tl.program_id(1) * tokens
    b = tl.cast(tl.program_id(2), tl.int64)
    proj_ptr += b * stride_b
    CHANNELS: tl.constexpr = 2 * G * K + H * V
    lead_stride = tl.num_programs(2) * CHANNELS
    if HAS_HISTORY:
        lead_ptr += b * CHANNELS
    if slot < 2 * G:
        out_ptr = q_ptr + slot * K if slot < G else k_ptr + (slot - G) * K
        conv_head(
            proj_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr,
            out_ptr + b * S * (G * K),
            slot * K, start, S, steps, stride_s, lead_stride, G * K, eps,
            K, ROWS, STAGES, BLOCK_K, W, HAS_BIAS, PACKED, HAS_HISTORY, ONE_PATH, NORMALISE,
        )  # fmt: skip
    elif slot < 2 * G + H:
        h = slot - 2 * G
        conv_head(
            proj_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr,
            v_ptr + b * S * (H * V) + h * V,
            2 * G * K + h * V, start, S, steps, stride_s, lead_stride, H * V, eps,
            V, ROWS, STAGES, BLOCK_V, W, HAS_BIAS, PACKED, HAS_HISTORY, ONE_PATH, False,
        )  # fmt: skip
    else:
        raw_ptr = proj_ptr + 2 * G * K + 2 * H * V
        raw_stride = stride_s
        if APART:
            raw_ptr = gates_ptr + b * (2 * H)
            raw_stride = tl.num_programs(2) * (2 * H)
        _gates(
            raw_ptr, A_log_ptr, dt_bias_ptr, g_ptr + b * S * H,
            beta_ptr + b * S * H, start, S, tokens, raw_stride, largest_beta, H, BLOCK_H,
        )  # fmt: skip


@triton.jit
def _gates_backward(
    proj_ptr, A_log_ptr, dt_bias_ptr, dg_ptr, dbeta_ptr, factor_ptr, d_proj_ptr, partial_ptr,
    start, S, tokens, stride_s, d_stride_s, largest_beta,
    H: tl.constexpr, BLOCK_H: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """All value heads of ``tokens`` tokens. The pointers are at the beta column of (0, b)."""
    SPAN: tl.constexpr = 16
    end = min(start + tokens, S) - start
    h_H = tl.arange(0, BLOCK_H)
    real_H = h_H < H
    A_log_H = tl.load(A_log_ptr + h_H, mask=real_H, other=0.0).to(tl.float32)
    dt_bias_H = tl.load(dt_bias_ptr + h_H, mask=real_H, other=0.0).to(tl.float32)
    rate_H = minus_rate(A_log_H)
    if SCALED:
        factor_H = tl.load(factor_ptr + h_H, mask=real_H, other=0.0)
    base = tl.cast(start, tl.int64)
    proj_ptr += base * stride_s
    d_proj_ptr += base * d_stride_s
    dg_ptr += base * H
    dbeta_ptr += base * H
    dA_TH = tl.zeros((SPAN, BLOCK_H), tl.float32)
    ddt_TH = tl.zeros((SPAN, BLOCK_H), tl.float32)
    for span in tl.range(0, end, SPAN):
        t_T = span + tl.arange(0, SPAN)
        real_TH = (t_T < end)[:, None] & real_H[None, :]
        raw_TH = proj_ptr + t_T[:, None] * stride_s + h_H[None, :]
        b_TH = tl.load(raw_TH, mask=real_TH, other=0.0).to(tl.float32)
        x_TH = tl.load(raw_TH + H, mask=real_TH, other=0.0).to(tl.float32) + dt_bias_H[None, :]
        grad_TH = t_T[:, None] * H + h_H[None, :]
        dg_TH = tl.load(dg_ptr + grad_TH, mask=real_TH, other=0.0).to(tl.float32)
        dbeta_TH = tl.load(dbeta_ptr + grad_TH, mask=real_TH, other=0.0).to(tl.float32)
        if SCALED:
            dg_TH = dg_TH * factor_H[None, :]
            dbeta_TH = dbeta_TH * factor_H[None, :]
        # A decay of exactly 0 has no gradient; zeros before the products, since g may be -inf.
        softplus_TH = softplus(x_TH)
        held_TH = rate_H[None, :] * softplus_TH < LEAST_LOG_DECAY
        softplus_TH = tl.where(held_TH, 0.0, softplus_TH)
        dg_TH = tl.where(held_TH, 0.0, dg_TH)
        write_TH = sigmoid(b_TH)
        dalpha_TH = dg_TH * rate_H[None, :] * sigmoid(x_TH)
        dA_TH += dg_TH * rate_H[None, :] * softplus_TH
        ddt_TH += dalpha_TH
        out_TH = d_proj_ptr + t_T[:, None] * d_stride_s + h_H[None, :]
        kind = d_proj_ptr.dtype.element_ty
        db_TH = dbeta_TH * largest_beta * write_TH * (1.0 - write_TH)
        tl.store(out_TH, db_TH.to(kind), mask=real_TH)
        tl.store(out_TH + H, dalpha_TH.to(kind), mask=real_TH)
    dA_H = tl.where(A_log_H > LARGEST_A_LOG, 0.0, tl.sum(dA_TH, axis=0))
    tl.store(partial_ptr + h_H, dA_H, mask=real_H)
    tl.store(partial_ptr + H + h_H, tl.sum(ddt_TH, axis=0), mask=real_H)


@triton.jit(do_not_specialize=["S", "steps"])
def prepare_backward_kernel(
    proj_ptr, weight_ptr, bias_ptr, A_log_ptr, dt_bias_ptr, position_ptr, lead_ptr, place_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, factor_ptr, d_proj_ptr, partial_ptr, d_lead_ptr,
    gates_ptr, d_gates_ptr,
    S, steps, stride_s, stride_b, d_stride_s, d_stride_b, eps, largest_beta,
    G: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, W: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
    HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, HAS_HISTORY: tl.constexpr,
    ONE_PATH: tl.constexpr, NORMALISE: tl.constexpr, SCALED: tl.constexpr, APART: tl.constexpr,
    GATES: tl.constexpr,
):  # fmt: skip
    """grid (GATES + 2G + H, token tiles, B). Slot 0 is the gates, so that they never finish last.

    Each program writes its own stretch of one partial row per tile: conv weight [C, W], conv
    bias [C], A_log [H], dt_bias [H]. A second launch adds the rows in a fixed order.
    """
    CHANNELS: tl.constexpr = 2 * G * K + H * V
    slot = tl.program_id(0) - (1 if GATES else 0)
    tile = tl.program_id(1)
    start = tile * (ROWS * steps)
    b = tl.cast(tl.program_id(2), tl.int64)
    proj_ptr += b * stride_b
    d_proj_ptr += b * d_stride_b
    PARTIAL: tl.constexpr = CHANNELS * (W + 1 if HAS_BIAS else W)
    partial_ptr += (b * tl.num_programs(1) + tile) * (PARTIAL + (2 * H if GATES else 0))
    lead_stride = tl.num_programs(2) * CHANNELS
    if HAS_HISTORY:
        lead_ptr += b * CHANNELS
        d_lead_ptr += b * CHANNELS
    if slot < 0:
        raw_ptr = proj_ptr + CHANNELS + H * V
        d_raw_ptr = d_proj_ptr + CHANNELS + H * V
        raw_stride = stride_s
        d_raw_stride = d_stride_s
        if APART:
            raw_ptr = gates_ptr + b * (2 * H)
            d_raw_ptr = d_gates_ptr + b * (2 * H)
            raw_stride = tl.num_programs(2) * (2 * H)
            d_raw_stride = tl.num_programs(2) * (2 * H)
        _gates_backward(
            raw_ptr, A_log_ptr, dt_bias_ptr,
            dg_ptr + b * S * H, dbeta_ptr + b * S * H, factor_ptr,
            d_raw_ptr, partial_ptr + PARTIAL,
            start, S, ROWS * steps, raw_stride, d_raw_stride, largest_beta, H, BLOCK_H, SCALED,
        )  # fmt: skip
    elif slot < 2 * G:
        factor = tl.load(factor_ptr + slot % G * (H // G)) if SCALED else 1.0
        grad_ptr = dq_ptr + slot * (GROUP * K) if slot < G else dk_ptr + (slot - G) * (GROUP * K)
        conv_head_backward(
            proj_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr,
            grad_ptr + b * S * (G * GROUP * K), d_proj_ptr, partial_ptr, d_lead_ptr,
            slot * K, start, S, steps, stride_s, d_stride_s, lead_stride, G * GROUP * K, factor,
            eps, K, CHANNELS, GROUP, W, ROWS, STAGES, BLOCK_K, HAS_BIAS, PACKED, HAS_HISTORY,
            ONE_PATH, NORMALISE, SCALED,
        )  # fmt: skip
    else:
        h = slot - 2 * G
        factor = tl.load(factor_ptr + h) if SCALED else 1.0
        conv_head_backward(
            proj_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr,
            dv_ptr + b * S * (H * V) + h * V, d_proj_ptr, partial_ptr, d_lead_ptr,
            2 * G * K + h * V, start, S, steps, stride_s, d_stride_s, lead_stride, H * V, factor,
            eps, V, CHANNELS, 1, W, ROWS, STAGES, BLOCK_V, HAS_BIAS, PACKED, HAS_HISTORY,
            ONE_PATH, False, SCALED,
        )  # fmt: skip

"""The gates of Kimi Delta Attention over strided rows, as one launch each way (Triton).

:func:`.front.channel_gates` is the plain twin.

Legend: S seq, B batch, P width of a row, H heads, K key dim; in tile names T tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.kernels.elementwise import LARGEST_A_LOG, LEAST_LOG_DECAY, minus_rate, sigmoid, softplus
from ..ops.kernels.launch import MOST_PLANS, Launch
from ..ops.kernels.reduce import sum_rows
from ..ops.kernels.tiles import Walk, block_dim, within_grid
from ..ops.layout import Layout
from .sizes import sizes_of

_TOKENS = 32  # of a tile


@triton.jit(do_not_specialize=["S", "repeats"])
def _forward_kernel(
    rows_ptr, A_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, S, repeats, f, b, stride_s, stride_b, bound,
    H: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """grid (H, token tiles, B); ``f``, ``b``: the first columns of the gates' sections."""
    h = tl.program_id(0)
    batch = tl.cast(tl.program_id(2), tl.int64)
    first = tl.cast(tl.program_id(1), tl.int64) * (TOKENS * repeats)
    rows_ptr += batch * stride_b
    k_K = tl.arange(0, BLOCK_K)
    real_K = k_K < K
    rate = minus_rate(tl.load(A_log_ptr + h).to(tl.float32))
    dt_bias_K = tl.load(dt_bias_ptr + h * K + k_K, mask=real_K, other=0.0).to(tl.float32)
    for repeat in tl.range(0, repeats):
        s_T = first + repeat * TOKENS + tl.arange(0, TOKENS)
        real_T = s_T < S
        real_TK = real_T[:, None] & real_K[None, :]
        row_T = rows_ptr + s_T * stride_s
        f_TK = tl.load(row_T[:, None] + f + h * K + k_K[None, :], mask=real_TK, other=0.0)
        x_TK = f_TK.to(tl.float32) + dt_bias_K[None, :]
        if BOUNDED:
            g_TK = bound * sigmoid(-rate * x_TK)
        else:
            g_TK = rate * softplus(x_TK)
            g_TK = tl.where(g_TK < LEAST_LOG_DECAY, LEAST_LOG_DECAY, g_TK)  # NaN stays NaN
        out_T = (batch * S + s_T) * H + h
        tl.store(g_ptr + out_T[:, None] * K + k_K[None, :], g_TK, mask=real_TK)
        b_T = tl.load(row_T + b + h, mask=real_T, other=0.0).to(tl.float32)
        tl.store(beta_ptr + out_T, sigmoid(b_T), mask=real_T)


@triton.jit(do_not_specialize=["S", "repeats"])
def _backward_kernel(
    rows_ptr, A_log_ptr, dt_bias_ptr, dg_ptr, dbeta_ptr, d_rows_ptr, partial_ptr,
    S, repeats, f, b, stride_s, stride_b, d_stride_s, d_stride_b, bound,
    H: tl.constexpr, K: tl.constexpr, TOKENS: tl.constexpr, BLOCK_K: tl.constexpr,
    BOUNDED: tl.constexpr,
):  # fmt: skip
    """grid (H, token tiles, B). A tile leaves one partial row: dt_bias [H K], A_log [H]."""
    h = tl.program_id(0)
    batch = tl.cast(tl.program_id(2), tl.int64)
    first = tl.cast(tl.program_id(1), tl.int64) * (TOKENS * repeats)
    rows_ptr += batch * stride_b
    d_rows_ptr += batch * d_stride_b
    k_K = tl.arange(0, BLOCK_K)
    real_K = k_K < K
    A_log = tl.load(A_log_ptr + h).to(tl.float32)
    rate = minus_rate(A_log)
    dt_bias_K = tl.load(dt_bias_ptr + h * K + k_K, mask=real_K, other=0.0).to(tl.float32)
    d_bias_K = tl.zeros((BLOCK_K,), tl.float32)
    d_rate_K = tl.zeros((BLOCK_K,), tl.float32)
    for repeat in tl.range(0, repeats):
        s_T = first + repeat * TOKENS + tl.arange(0, TOKENS)
        real_T = s_T < S
        real_TK = real_T[:, None] & real_K[None, :]
        row_T, d_row_T = rows_ptr + s_T * stride_s, d_rows_ptr + s_T * d_stride_s
        at_T = (batch * S + s_T) * H + h
        f_TK = tl.load(row_T[:, None] + f + h * K + k_K[None, :], mask=real_TK, other=0.0)
        dg_TK = tl.load(dg_ptr + at_T[:, None] * K + k_K[None, :], mask=real_TK, other=0.0)
        dg_TK = dg_TK.to(tl.float32)
        x_TK = f_TK.to(tl.float32) + dt_bias_K[None, :]
        if BOUNDED:
            sig_TK = sigmoid(-rate * x_TK)
            dy_TK = dg_TK * bound * sig_TK * (1.0 - sig_TK)
            df_TK = -rate * dy_TK
            of_rate_TK = df_TK * x_TK
        else:
            # A decay of exactly 0 has no gradient; zeros before the products: g may be -inf.
            softplus_TK = softplus(x_TK)
            held_TK = rate * softplus_TK < LEAST_LOG_DECAY
            softplus_TK = tl.where(held_TK, 0.0, softplus_TK)
            dg_TK = tl.where(held_TK, 0.0, dg_TK)
            df_TK = dg_TK * rate * sigmoid(x_TK)
            of_rate_TK = dg_TK * rate * softplus_TK
        df_TK = tl.where(real_TK, df_TK, 0.0)
        d_bias_K += tl.sum(df_TK, axis=0)
        d_rate_K += tl.sum(tl.where(real_TK, of_rate_TK, 0.0), axis=0)
        kind = d_rows_ptr.dtype.element_ty
        tl.store(d_row_T[:, None] + f + h * K + k_K[None, :], df_TK.to(kind), mask=real_TK)
        b_T = tl.load(row_T + b + h, mask=real_T, other=0.0).to(tl.float32)
        dbeta_T = tl.load(dbeta_ptr + at_T, mask=real_T, other=0.0).to(tl.float32)
        beta_T = sigmoid(b_T)
        tl.store(d_row_T + b + h, (dbeta_T * beta_T * (1.0 - beta_T)).to(kind), mask=real_T)
    partial_ptr += (batch * tl.num_programs(1) + tl.program_id(1)) * (H * K + H)
    tl.store(partial_ptr + h * K + k_K, d_bias_K, mask=real_K)
    d_A = tl.where(A_log > LARGEST_A_LOG, 0.0, tl.sum(d_rate_K, axis=0))
    tl.store(partial_ptr + H * K + h, d_A)


@triton.jit
def step_gates(
    row_ptr, A_log_ptr, dt_bias_ptr, h, k_K, real_K, first, second, low, high, K: tl.constexpr,
):  # fmt: skip
    """As :func:`.front.channel_gates`: f and beta's columns; ``low`` is the bound, 0 for none."""
    f_K = tl.load(row_ptr + first + h * K + k_K, mask=real_K, other=0.0).to(tl.float32)
    dt_bias_K = tl.load(dt_bias_ptr + h * K + k_K, mask=real_K, other=0.0).to(tl.float32)
    rate_K = minus_rate(tl.load(A_log_ptr + h + 0 * k_K).to(tl.float32))
    x_K = f_K + dt_bias_K
    g_K = rate_K * softplus(x_K)
    g_K = tl.where(g_K < LEAST_LOG_DECAY, LEAST_LOG_DECAY, g_K)  # NaN stays NaN
    g_K = tl.where(low < 0, low * sigmoid(-rate_K * x_K), g_K)
    return g_K, sigmoid(tl.load(row_ptr + second + h + 0 * k_K).to(tl.float32)) * high


def gates_forward(
    rows: Tensor, A_log: Tensor, dt_bias: Tensor, layout: Layout, lower_bound: float | None
) -> tuple[Tensor, Tensor]:
    """``g [B, S, H, K]`` and ``beta [B, S, H]`` in fp32, of rows ``[S, B, P]`` of any strides."""
    S, B, _ = rows.shape
    _, H, K, _ = sizes_of(layout)
    g = torch.empty(B, S, H, K, dtype=torch.float32, device=rows.device)
    beta = torch.empty(B, S, H, dtype=torch.float32, device=rows.device)
    launch, _ = _launch(layout, S, B, rows.stride()[:2], None, lower_bound)
    if launch is not None:
        launch(rows, A_log, dt_bias, g, beta)
    return g, beta


def gates_backward(
    rows: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    layout: Layout,
    lower_bound: float | None,
    dg: Tensor,
    dbeta: Tensor,
    d_rows: Tensor,
) -> tuple[Tensor, Tensor]:
    """Gradients of A_log and dt_bias; writes the gates' columns of ``d_rows``."""
    S, B, _ = rows.shape
    strides, d_strides = rows.stride()[:2], d_rows.stride()[:2]
    launch, tiles = _launch(layout, S, B, strides, d_strides, lower_bound)
    _, H, K, _ = sizes_of(layout)
    partial = torch.empty(B * tiles, H * K + H, dtype=torch.float32, device=rows.device)
    if launch is not None:
        launch(rows, A_log, dt_bias, dg.contiguous(), dbeta.contiguous(), d_rows, partial)
    d_dt_bias, d_A_log = torch.empty_like(dt_bias), torch.empty_like(A_log)
    sum_rows(partial, d_dt_bias, d_A_log)
    return d_A_log, d_dt_bias


@lru_cache(maxsize=MOST_PLANS)
def _launch(
    layout: Layout, S: int, B: int, strides: tuple[int, ...], d_strides: tuple[int, ...] | None,
    lower_bound: float | None,
) -> tuple[Launch | None, int]:  # fmt: skip
    """The forward, or the backward if it has strides, and the tiles of a row."""
    _, H, K, _ = sizes_of(layout)
    # The backward leaves one partial row per tile, so it repeats to keep those few.
    repeats = 1 if d_strides is None else 8
    tile = within_grid(Walk(_TOKENS, repeats, warps=4), S, B)
    tiles = triton.cdiv(S, tile.tokens)
    if not S * B:
        return None, tiles
    kernel = _forward_kernel if d_strides is None else _backward_kernel
    return Launch(
        kernel, (H, tiles, B),
        S, tile.steps, layout.columns("f").start, layout.columns("beta").start,
        *strides, *(d_strides or ()), 0.0 if lower_bound is None else float(lower_bound),
        H=H, K=K, TOKENS=_TOKENS, BLOCK_K=block_dim(K), BOUNDED=lower_bound is not None,
        num_warps=4,
    ), tiles  # fmt: skip

"""Triton kernels of Mamba2's convolution: conv + SiLU of x, B and C, in one launch each way.

The walks along the sequence are those of every front.

Legend: S seq, B batch, H heads, G groups, V head dim, K state dim, W taps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..front.conv_backward import conv_head_backward
from ..front.conv_forward import conv_head


@triton.jit(do_not_specialize=["S", "steps", "first_slot"])
def conv_forward_kernel(
    rows_ptr, weight_ptr, bias_ptr, position_ptr, x_ptr, B_ptr, C_ptr,
    S, steps, first_slot, stride_s, stride_b,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, ONE_PATH: tl.constexpr,
):  # fmt: skip
    """grid (heads, token tiles, B). Slots are heads of x, then groups of B, then of C.

    ``rows_ptr`` is at the first convolved column. ``first_slot`` skips slots.
    """
    slot = tl.program_id(0) + first_slot
    start = tl.program_id(1) * (ROWS * steps)
    b = tl.cast(tl.program_id(2), tl.int64)
    rows_ptr += b * stride_b
    if slot < H:
        conv_head(
            rows_ptr, weight_ptr, bias_ptr, position_ptr, x_ptr + b * S * (H * V) + slot * V,
            slot * V, start, S, steps, stride_s, H * V, 0.0,
            V, ROWS, STAGES, BLOCK_V, W, HAS_BIAS, PACKED, ONE_PATH, False,
        )  # fmt: skip
    else:
        group = slot - H
        out_ptr = B_ptr + group * K if group < G else C_ptr + (group - G) * K
        conv_head(
            rows_ptr, weight_ptr, bias_ptr, position_ptr, out_ptr + b * S * (G * K),
            H * V + group * K, start, S, steps, stride_s, G * K, 0.0,
            K, ROWS, STAGES, BLOCK_K, W, HAS_BIAS, PACKED, ONE_PATH, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["S", "steps"])
def conv_backward_kernel(
    rows_ptr, weight_ptr, bias_ptr, position_ptr, dx_ptr, dB_ptr, dC_ptr, d_rows_ptr, partial_ptr,
    S, steps, stride_s, stride_b, d_stride_s, d_stride_b,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, ONE_PATH: tl.constexpr,
):  # fmt: skip
    """grid (H + 2G, token tiles, B).

    Each program writes its own stretch of one partial row per tile: conv weight [C, W], conv
    bias [C]. A second launch adds the rows in a fixed order.
    """
    CHANNELS: tl.constexpr = H * V + 2 * G * K
    slot = tl.program_id(0)
    tile = tl.program_id(1)
    start = tile * (ROWS * steps)
    b = tl.cast(tl.program_id(2), tl.int64)
    rows_ptr += b * stride_b
    d_rows_ptr += b * d_stride_b
    PARTIAL: tl.constexpr = CHANNELS * (W + 1 if HAS_BIAS else W)
    partial_ptr += (b * tl.num_programs(1) + tile) * PARTIAL
    if slot < H:
        conv_head_backward(
            rows_ptr, weight_ptr, bias_ptr, position_ptr, dx_ptr + b * S * (H * V) + slot * V,
            d_rows_ptr, partial_ptr, slot * V, start, S, steps, stride_s, d_stride_s, H * V,
            1.0, 0.0,
            V, CHANNELS, 1, W, ROWS, STAGES, BLOCK_V, HAS_BIAS, PACKED, ONE_PATH, False, False,
        )  # fmt: skip
    else:
        group = slot - H
        grad_ptr = dB_ptr + group * K if group < G else dC_ptr + (group - G) * K
        conv_head_backward(
            rows_ptr, weight_ptr, bias_ptr, position_ptr, grad_ptr + b * S * (G * K),
            d_rows_ptr, partial_ptr, H * V + group * K, start, S, steps, stride_s, d_stride_s,
            G * K, 1.0, 0.0,
            K, CHANNELS, 1, W, ROWS, STAGES, BLOCK_K, HAS_BIAS, PACKED, ONE_PATH, False, False,
        )  # fmt: skip

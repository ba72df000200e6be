"""Conv + SiLU, and l2norm if asked for, of one head along the sequence (Triton device functions).

Legend: S seq, D dim of the head at hand, W taps; in tile names R segments walked side by side.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.elementwise import sigmoid
from .walk import (
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
def conv_head(
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

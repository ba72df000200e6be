"""Conv + SiLU, and l2norm if asked for, of one head of one token (Triton device function).

Legend: D dim of the head at hand, C conv channels, W taps.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.elementwise import sigmoid


@triton.jit
def conv_head_step(
    proj_ptr, weight_ptr, bias_ptr, history_ptr, out_ptr, column, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """One head of one row; ``history_ptr`` is at the slot, ``[C, W - 1]`` oldest first."""
    d_D = tl.arange(0, BLOCK_D)
    real_D = d_D < D
    x_raw = tl.load(proj_ptr + column + d_D, mask=real_D, other=0.0)
    x_D = x_raw.to(tl.float32)
    taps_ptr = weight_ptr + (column + d_D) * W
    past_ptr = history_ptr + (column + d_D) * (W - 1)
    pre_D = x_D * tl.load(taps_ptr + W - 1, mask=real_D, other=0.0).to(tl.float32)
    for tap in tl.static_range(W - 1):
        past_raw = tl.load(past_ptr + tap, mask=real_D, other=0.0)
        tap_D = tl.load(taps_ptr + tap, mask=real_D, other=0.0).to(tl.float32)
        pre_D += past_raw.to(tl.float32) * tap_D
        if tap > 0:
            tl.store(past_ptr + tap - 1, past_raw, mask=real_D)
    tl.store(past_ptr + W - 2, x_raw, mask=real_D)
    if HAS_BIAS:
        pre_D += tl.load(bias_ptr + column + d_D, mask=real_D, other=0.0).to(tl.float32)
    act_D = pre_D * sigmoid(pre_D)
    if NORMALISE:
        act_D = tl.where(real_D, act_D, 0.0)
        act_D = act_D * tl.rsqrt(tl.sum(act_D * act_D, axis=0) + eps)
    tl.store(out_ptr + d_D, act_D.to(out_ptr.dtype.element_ty), mask=real_D)

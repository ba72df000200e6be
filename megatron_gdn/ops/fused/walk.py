"""Device functions of the kernels that walk along the sequence, one token at a time.

Legend: R segments walked side by side, D dim of the head at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_row(ptr, stride, t_R, d_D, real_D, S, EDGE: tl.constexpr):
    """Row t_r of every segment; at an edge of the sequence, zeros past its end."""
    at_RD = ptr + t_R[:, None] * stride + d_D[None, :]
    if EDGE:
        return tl.load(at_RD, mask=(t_R < S)[:, None] & real_D[None, :], other=0.0)
    else:
        return tl.load(at_RD, mask=real_D[None, :], other=0.0)


@triton.jit
def push(newest, rows, COUNT: tl.constexpr):
    """``rows`` one step later: ``newest`` in front, the oldest dropped."""
    pushed = (newest,)
    for age in tl.static_range(1, COUNT):
        pushed = pushed + (rows[age - 1],)
    return pushed


@triton.jit
def load_taps(weight_ptr, column, d_D, real_D, W: tl.constexpr):
    """The W taps of every channel, oldest input first, as a tuple of fp32 rows."""
    taps = ()
    for tap in tl.static_range(W):
        tap_D = tl.load(weight_ptr + (column + d_D) * W + tap, mask=real_D, other=0.0)
        taps = taps + (tap_D.to(tl.float32),)
    return taps


@triton.jit
def load_history(
    x_ptr, stride, first_R, seen_R, left, d_D, real_D, W: tl.constexpr, EDGE: tl.constexpr
):
    """The W - 1 inputs before each segment that its first token may see, newest first."""
    history = ()
    for delay in tl.static_range(1, W):
        at_RD = x_ptr + (first_R - delay)[:, None] * stride + d_D[None, :]
        if EDGE:
            seen_RD = ((seen_R >= delay) & (first_R < left))[:, None] & real_D[None, :]
            past_RD = tl.load(at_RD, mask=seen_RD, other=0.0)
        else:
            past_RD = tl.load(at_RD, mask=real_D[None, :], other=0.0)
        history = history + (past_RD.to(tl.float32),)
    return history


@triton.jit
def forget(history, seen_R, W: tl.constexpr):
    """Drop the inputs of the previous document where a new one starts."""
    kept = ()
    for delay in tl.static_range(1, W):
        kept = kept + (tl.where((seen_R == 0)[:, None], 0.0, history[delay - 1]),)
    return kept


@triton.jit
def convolve(x_RD, history, taps, bias_D, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The pre-activation of one token per segment."""
    pre_RD = taps[W - 1][None, :] * x_RD
    if HAS_BIAS:
        pre_RD += bias_D[None, :]
    for delay in tl.static_range(1, W):
        pre_RD += taps[W - 1 - delay][None, :] * history[delay - 1]
    return pre_RD


@triton.jit
def at_an_edge(position_ptr, start, S, TOKENS: tl.constexpr, W: tl.constexpr, PACKED: tl.constexpr):
    """Whether the walk over TOKENS tokens meets an end of the sequence or of a document.

    Within reach of the taps in either direction. All other walks, nearly all of a long sequence,
    need no masks.
    """
    edge = (start < W - 1) | (start + TOKENS + W - 1 > S)
    if PACKED:
        t_T = tl.arange(0, 2 * TOKENS)
        near_T = (t_T < TOKENS + W - 1) & (start + t_T < S)
        position_T = tl.load(position_ptr + start + t_T, mask=near_T, other=W)
        edge = edge | (tl.min(position_T) < W - 1)
    return edge

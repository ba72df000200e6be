"""Device functions of the kernels that walk along the sequence, one token at a time.

The walks are written for Triton's compiler (3.6). For every load and store, its coalescing pass
follows the uses of all operations of a function, so its time grows with the cube of the function's
size. So each walk is a function that is not inlined, and everything constant is computed before the
loop. The number of steps is an argument of the launch: one compilation serves all lengths.

Legend: R segments walked side by side, D dim of the head at hand.
"""

from __future__ import annotations

import triton
import triton.language as tl

UNROLL = tl.constexpr(4)  # steps per turn of the loop; a walk has a multiple of it


@triton.jit
def load_row(at_RD, real_R, real_1D, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """One row of every segment; zeros past the end of the sequence and of a PADDED head."""
    if EDGE and PADDED:
        return tl.load(at_RD, mask=real_R[:, None] & real_1D, other=0.0)
    elif EDGE:
        return tl.load(at_RD, mask=real_R[:, None], other=0.0)
    elif PADDED:
        return tl.load(at_RD, mask=real_1D, other=0.0)
    else:
        return tl.load(at_RD)


@triton.jit
def store_row(at_RD, y_RD, real_R, real_1D, PADDED: tl.constexpr, EDGE: tl.constexpr):
    """The reverse of :func:`load_row`."""
    if EDGE and PADDED:
        tl.store(at_RD, y_RD, mask=real_R[:, None] & real_1D)
    elif EDGE:
        tl.store(at_RD, y_RD, mask=real_R[:, None])
    elif PADDED:
        tl.store(at_RD, y_RD, mask=real_1D)
    else:
        tl.store(at_RD, y_RD)


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
        taps = taps + (tap_D.to(tl.float32)[None, :],)
    return taps


@triton.jit
def load_history(
    x_at_RD, stride, seen_R, real_R, real_1D,
    W: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """The W - 1 inputs before each segment, newest first; 0 if its first token may not read it."""
    history = ()
    for delay in tl.static_range(1, W):
        past_RD = load_row(
            x_at_RD - delay * stride, (seen_R >= delay) & real_R, real_1D, PADDED, EDGE
        )
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
def convolve(x_RD, history, taps, bias_1D, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The pre-activation of one token per segment."""
    pre_RD = taps[W - 1] * x_RD
    if HAS_BIAS:
        pre_RD += bias_1D
    for delay in tl.static_range(1, W):
        pre_RD += taps[W - 1 - delay] * history[delay - 1]
    return pre_RD


@triton.jit
def at_an_edge(position_ptr, start, S, tokens, W: tl.constexpr, PACKED: tl.constexpr):
    """Whether the walk over ``tokens`` tokens meets an end of the sequence or of a document.

    An end counts if the taps reach it, in either direction. All other walks, nearly all of a long
    sequence, need no masks.
    """
    end = start + tokens + (W - 1)  # of what the walk reads
    edge = (start < W - 1) | (end > S)
    if PACKED:
        # Positions count up within a document, so that of ``start`` follows from the last one.
        last = tl.load(position_ptr + end - 1, mask=end <= S, other=0)
        edge = edge | (last - (end - 1 - start) < W - 1)
    return edge

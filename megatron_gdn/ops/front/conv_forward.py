"""Conv, SiLU and an optional l2norm of one head along the sequence (Triton).

A program *walks* along R segments of ``steps`` successive tokens: in each step it
computes one token of every segment. Here a segment is a part of the program's tile, not
a segment of a rule.

Triton 3.6 has a coalescing pass whose time grows with the cube of a function's size. So
each loop over tokens is a function that is not inlined, and constants are computed
before the loop. The number of steps is a launch argument, so all sequence lengths share
one compilation.

Legend: D channels of the head, R segments; a *row* is the D channels of one token of
each segment. ``*at_RD`` are pointers, ``real_*`` masks of the elements that exist.
``history`` is here the W - 1 inputs before a token, in the same rows. HAS_HISTORY: some
pieces have rows before their first token (:mod:`.history`), so they have a lead-in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.elementwise import sigmoid

# steps per loop iteration; the number of steps is a multiple of UNROLL
UNROLL = tl.constexpr(4)


@triton.jit
def load_row(at_RD, real_R, real_1D, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Load one token of every segment at ``at_RD``, in the dtype of the pointer.

    If MASKED, only the segments in ``real_R`` are loaded; if PADDED, only the channels
    in ``real_1D``. Elements that are not loaded are 0.
    """
    if MASKED and PADDED:
        return tl.load(at_RD, mask=real_R[:, None] & real_1D, other=0.0)
    elif MASKED:
        return tl.load(at_RD, mask=real_R[:, None], other=0.0)
    elif PADDED:
        return tl.load(at_RD, mask=real_1D, other=0.0)
    else:
        return tl.load(at_RD)


@triton.jit
def store_row(at_RD, y_RD, real_R, real_1D, PADDED: tl.constexpr, MASKED: tl.constexpr):
    """Store ``y_RD``, one token of every segment, at ``at_RD``, with the masks of
    :func:`load_row`."""
    if MASKED and PADDED:
        tl.store(at_RD, y_RD, mask=real_R[:, None] & real_1D)
    elif MASKED:
        tl.store(at_RD, y_RD, mask=real_R[:, None])
    elif PADDED:
        tl.store(at_RD, y_RD, mask=real_1D)
    else:
        tl.store(at_RD, y_RD)


@triton.jit
def push_row(newest, rows, COUNT: tl.constexpr):
    """Put ``newest`` in front of ``rows``, a tuple of COUNT rows, and drop the last
    row, which is the oldest. The result also has COUNT rows."""
    pushed = (newest,)
    for age in tl.static_range(1, COUNT):
        pushed = pushed + (rows[age - 1],)
    return pushed


@triton.jit
def load_taps(weight_ptr, column, d_D, real_D, W: tl.constexpr):
    """Load the W taps of channels ``column + d_D`` from the conv weight [C, 1, W].

    Returns a tuple of fp32 rows [1, D], the tap of the oldest input first; any numbers
    where ``real_D`` is False.
    """
    taps = ()
    for tap in tl.static_range(W):
        tap_D = tl.load(weight_ptr + (column + d_D) * W + tap, mask=real_D)
        taps = taps + (tap_D.to(tl.float32)[None, :],)
    return taps


@triton.jit
def load_bias(
    bias_ptr, column, d_D, real_D, BLOCK_D: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """The bias of channels ``column + d_D`` in fp32, as a row; zeros unless
    HAS_BIAS."""
    if HAS_BIAS:
        bias_D = tl.load(bias_ptr + column + d_D, mask=real_D).to(tl.float32)
        return bias_D[None, :]
    else:
        return tl.zeros((1, BLOCK_D), tl.float32)


@triton.jit
def load_history(
    x_at_RD,
    stride,
    position_R,
    real_R,
    real_1D,
    W: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Load the W - 1 inputs before ``x_at_RD``, newest first, in fp32; 0 for inputs of
    another document.

    ``stride``: elements from token to token. ``position_R``: the position of the token
    at ``x_at_RD`` in its document. The masks are those of :func:`load_row`.
    """
    history = ()
    for delay in tl.static_range(1, W):
        past_RD = load_row(
            x_at_RD - delay * stride,
            (position_R >= delay) & real_R,
            real_1D,
            PADDED,
            MASKED,
        )
        history = history + (past_RD.to(tl.float32),)
    return history


@triton.jit
def drop_other_document(history, position_R, W: tl.constexpr):
    """Zero the ``history`` of segments whose token is the first of a document, since
    the inputs before it belong to another document.

    ``position_R``: the token's position in its document. ``history``: the W - 1 inputs
    before the token.
    """
    kept = ()
    for delay in tl.static_range(1, W):
        kept = kept + (tl.where((position_R == 0)[:, None], 0.0, history[delay - 1]),)
    return kept


@triton.jit
def convolve(x_RD, history, taps, bias_1D, W: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The convolution of one token ``x_RD`` per segment, before the activation.

    ``history``: the W - 1 inputs before x, newest first. ``taps``: from
    :func:`load_taps`; the last one is the tap of x.
    """
    pre_RD = taps[W - 1] * x_RD
    if HAS_BIAS:
        pre_RD += bias_1D
    for delay in tl.static_range(1, W):
        pre_RD += taps[W - 1 - delay] * history[delay - 1]
    return pre_RD


@triton.jit
def load_lead_in(lead_at_1D, lead_row_R, real_1D, stride):
    """For each segment, row ``lead_row_R`` of the lead-in (:mod:`.history`); zeros if
    ``lead_row_R`` is negative.

    ``lead_at_1D`` points at the head's channels of row 0. ``stride``: elements from row
    to row.
    """
    at_RD = lead_at_1D + tl.cast(lead_row_R, tl.int64)[:, None] * stride
    return tl.load(at_RD, mask=(lead_row_R >= 0)[:, None] & real_1D, other=0.0)


@triton.jit
def meets_a_boundary(
    position_ptr, start, S, tokens, W: tl.constexpr, PACKED: tl.constexpr
):
    """Whether a tile of ``tokens`` tokens from ``start`` on needs masks.

    It needs masks if the tile, or the W - 1 tokens on either side of it, contain a
    boundary of documents or an end of the sequence. In a long sequence few tiles do.
    ``position_ptr`` [S], read if PACKED: each token's position in its document.
    """
    # one past the last token that the tile reads
    end = start + tokens + (W - 1)
    meets = (start < W - 1) | (end > S)
    if PACKED:
        # The last token's position in its document shows whether the document begins
        # W - 1 tokens before ``start`` or earlier.
        last = tl.load(position_ptr + end - 1, mask=end <= S)
        meets = meets | (last - (end - 1 - start) < W - 1)
    return meets


@triton.jit(noinline=True)  # because Triton compiles small functions faster
def walk_head(
    proj_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    lead_ptr,
    place_ptr,
    out_ptr,
    column,
    start,
    S,
    steps,
    stride_s,
    lead_stride,
    out_stride,
    eps,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    W: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    MASKED: tl.constexpr,
    NORMALISE: tl.constexpr,
):
    """Compute one head in ROWS segments of ``steps`` tokens: y = l2norm(silu(conv(x))).

    ``proj_ptr`` points at channel 0 of token 0 of a batch row; ``column`` is the head's
    first channel. ``start`` is the first segment's first token, and S the number of
    tokens of the batch row. ``out_ptr`` points at the head's output of token 0.
    ``position_ptr``: each token's position in its document, read if PACKED. If
    HAS_HISTORY, ``lead_ptr`` is the lead-in of this batch row, and ``place_ptr`` each
    token's row in it (-1: none). ``stride_s`` and ``out_stride``: elements from token
    to token in the rows and in the output. ``lead_stride``: elements from row to row of
    the lead-in. NORMALISE: apply the l2norm. MASKED: a document or the sequence may end
    nearby. BLOCK_D: D rounded up to a power of two. STAGES: ``num_stages`` of the loop.

    Each input is loaded once; a tiled convolution would load each input W times.
    """
    MASK_DOCUMENTS: tl.constexpr = PACKED and MASKED
    PADDED: tl.constexpr = D != BLOCK_D
    d_D = tl.arange(0, BLOCK_D)
    real_D = d_D < D
    d_1D = d_D[None, :]
    real_1D = real_D[None, :]
    # each segment's first token, counted from ``start``
    first_R = tl.arange(0, ROWS) * steps
    base = tl.cast(start, tl.int64)
    x_ptr = proj_ptr + base * stride_s + column
    out_ptr += base * out_stride
    # tokens between a segment's start and the sequence's end
    room_R = S - start - first_R
    taps = load_taps(weight_ptr, column, d_D, real_D, W)
    bias_1D = load_bias(bias_ptr, column, d_D, real_D, BLOCK_D, HAS_BIAS)
    if MASK_DOCUMENTS:
        position_R = tl.load(position_ptr + start + first_R, mask=room_R > 0)
    else:
        position_R = start + first_R
    x_at_RD = x_ptr + first_R[:, None] * stride_s + d_1D
    history = load_history(
        x_at_RD, stride_s, position_R, room_R > 0, real_1D, W, PADDED, MASKED
    )

    # The unrolled loop shifts ``history`` by renaming registers, without copies. The
    # loop's stages prefetch later steps to shared memory.
    for first_step in tl.range(0, steps, UNROLL, num_stages=STAGES):
        for unrolled in tl.static_range(UNROLL):
            step = first_step + unrolled
            t_R = first_R + step
            x_at_RD = x_ptr + t_R[:, None] * stride_s + d_1D
            x_RD = load_row(x_at_RD, room_R > step, real_1D, PADDED, MASKED)
            if MASK_DOCUMENTS:
                position_R = tl.load(position_ptr + start + t_R, mask=room_R > step)
                history = drop_other_document(history, position_R, W)
            x_RD = x_RD.to(tl.float32)
            pre_RD = convolve(x_RD, history, taps, bias_1D, W, HAS_BIAS)
            if HAS_HISTORY:
                lead_row_R = tl.load(
                    place_ptr + start + t_R, mask=room_R > step, other=-1
                )
                pre_RD += load_lead_in(
                    lead_ptr + column + d_1D, lead_row_R, real_1D, lead_stride
                )
            act_RD = pre_RD * sigmoid(pre_RD)
            if NORMALISE:
                if PADDED:
                    act_RD = tl.where(real_1D, act_RD, 0.0)
                act_RD = (
                    act_RD * tl.rsqrt(tl.sum(act_RD * act_RD, axis=1) + eps)[:, None]
                )
            y_RD = act_RD.to(out_ptr.dtype.element_ty)
            at_RD = out_ptr + t_R[:, None] * out_stride + d_1D
            store_row(at_RD, y_RD, room_R > step, real_1D, PADDED, MASKED)
            history = push_row(x_RD, history, W - 1)

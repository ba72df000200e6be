"""The backward of :mod:`.conv_forward`: a program computes the tokens of one head
one by one (Triton).

Here a segment is one of the R parts of a tile; the legend of :mod:`.conv_forward` says
more.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.elementwise import sigmoid
from .conv_forward import (
    UNROLL,
    convolve,
    drop_other_document,
    load_bias,
    load_history,
    load_lead_in,
    load_row,
    load_taps,
    push_row,
    store_row,
)


@triton.jit
def _walk_one_token(
    x_ptr,
    grad_ptr,
    position_ptr,
    lead_ptr,
    place_ptr,
    t_R,
    real_R,
    d_1D,
    real_1D,
    factor,
    position_R,
    bias_1D,
    taps,
    history,
    partial_dx,
    stride_s,
    lead_stride,
    grad_stride,
    eps,
    D: tl.constexpr,
    W: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MASK_DOCUMENTS: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALED: tl.constexpr,
    PADDED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Compute d(pre-activation) of one token t per segment, and finish dx of the token
    t - (W - 1).

    Returns the token's input x, its d(pre-activation), the earlier token's dx, the
    token's row in the lead-in, its position in its document, the ``history`` without
    other documents, and the next ``partial_dx``.

    ``x_ptr``, ``grad_ptr``, ``position_ptr`` and ``place_ptr`` point at the tile's
    first token, ``lead_ptr`` at the lead-in's row 0. ``t_R``: one token of each
    segment, counted from the tile's first token; ``real_R``: whether it exists.
    ``d_1D``: the channels; if PADDED, only ``real_1D`` exist. ``position_*``: tokens'
    positions in documents. ``history``: the last W - 1 inputs, newest first;
    ``partial_dx``: the unfinished dx of these tokens. If HAS_HISTORY, the lead-in is at
    ``lead_ptr``, and ``place_ptr`` has tokens' rows in the lead-in. MASKED: the
    sequence may end nearby. MASK_DOCUMENTS: a document may end nearby. ``grad_ptr``:
    the output's gradient, as GROUP terms that are added. If SCALED, the sum is
    multiplied by ``factor``. NORMALISE: outputs have unit length. ``stride_s``,
    ``*_stride``: elements from token to token.
    """
    x_RD = load_row(
        x_ptr + t_R[:, None] * stride_s + d_1D, real_R, real_1D, PADDED, MASKED
    )
    grad_at_RD = grad_ptr + t_R[:, None] * grad_stride + d_1D
    grads = (load_row(grad_at_RD, real_R, real_1D, PADDED, MASKED),)
    for member in tl.static_range(1, GROUP):
        grads = grads + (
            load_row(grad_at_RD + member * D, real_R, real_1D, PADDED, MASKED),
        )
    x_RD = x_RD.to(tl.float32)
    if MASK_DOCUMENTS:
        # a token after the last has no tokens before it: its history may hold NaN
        position_R = tl.load(position_ptr + t_R, mask=real_R, other=0)
        history = drop_other_document(history, position_R, W)
    pre_RD = convolve(x_RD, history, taps, bias_1D, W, HAS_BIAS)
    # ``lead_row_R`` is always returned, so it needs a value without a history too.
    lead_row_R = position_R
    if HAS_HISTORY:
        lead_row_R = tl.load(place_ptr + t_R, mask=real_R, other=-1)
        pre_RD += load_lead_in(lead_ptr + d_1D, lead_row_R, real_1D, lead_stride)
    sig_RD = sigmoid(pre_RD)
    act_RD = pre_RD * sig_RD

    dact_RD = grads[0].to(tl.float32)
    for member in tl.static_range(1, GROUP):
        dact_RD += grads[member].to(tl.float32)
    if SCALED:
        dact_RD = dact_RD * factor
    if NORMALISE:
        if PADDED:
            act_RD = tl.where(real_1D, act_RD, 0.0)
        # the gradient of act * r, with r = 1 / sqrt(sum of act^2 + eps)
        r_R = tl.rsqrt(tl.sum(act_RD * act_RD, axis=1) + eps)
        along_R = tl.sum(dact_RD * act_RD, axis=1) * r_R * r_R * r_R
        dact_RD = dact_RD * r_R[:, None] - act_RD * along_R[:, None]
    dpre_RD = dact_RD * (sig_RD + act_RD * (1.0 - sig_RD))

    # Token t adds one term to dx of each of the tokens t, t - 1, .., t - (W - 1).
    # Tokens of another document get no term. Then dx of token t - (W - 1) is finished.
    sums = (taps[W - 1] * dpre_RD,)
    for delay in tl.static_range(1, W):
        term_RD = dpre_RD
        if MASK_DOCUMENTS:
            # The mask comes before the product. So the compiler fuses product and sum
            # as in the code without masks, and a document's bits do not depend on a
            # boundary nearby.
            term_RD = tl.where((position_R >= delay)[:, None], dpre_RD, 0.0)
        sums = sums + (partial_dx[delay - 1] + taps[W - 1 - delay] * term_RD,)
    partial_dx = push_row(sums[0], sums[1:W], W - 1)
    return x_RD, dpre_RD, sums[W - 1], lead_row_R, position_R, history, partial_dx


@triton.jit(noinline=True)  # because Triton compiles small functions faster
def walk_head_backward(
    proj_ptr,
    weight_ptr,
    bias_ptr,
    position_ptr,
    lead_ptr,
    place_ptr,
    grad_ptr,
    d_proj_ptr,
    partial_ptr,
    d_lead_ptr,
    column,
    start,
    S,
    steps,
    stride_s,
    d_stride_s,
    lead_stride,
    grad_stride,
    factor,
    eps,
    D: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUP: tl.constexpr,
    W: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PACKED: tl.constexpr,
    HAS_HISTORY: tl.constexpr,
    MASKED: tl.constexpr,
    NORMALISE: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Gradients of one head in ROWS segments of ``steps`` tokens; a step computes one
    token of every segment.

    Writes dx to ``d_proj_ptr`` (token stride ``d_stride_s``), d(lead-in) to
    ``d_lead_ptr``, and sums of d(weight) and d(bias) over the segments to
    ``partial_ptr``, the tile's row of sums. ``column``: the head's first channel; the
    convolution has CHANNELS channels. ``d_proj_ptr`` and ``d_lead_ptr`` point at a
    batch row, ``grad_ptr`` at the head's gradients in this batch row. PACKED: several
    documents. The other arguments are as in :func:`.conv_forward.walk_head` and
    :func:`_walk_one_token`.

    A token's dx is a sum over d(pre-activation) of this token and of the next W - 1
    tokens. The loop keeps unfinished sums in registers, so it loads every input once;
    only W - 1 tokens past each segment are computed twice.
    """
    MASK_DOCUMENTS: tl.constexpr = PACKED and MASKED
    PADDED: tl.constexpr = D != BLOCK_D
    d_D = tl.arange(0, BLOCK_D)
    real_D = d_D < D
    d_1D = d_D[None, :]
    real_1D = real_D[None, :]
    first_R = tl.arange(0, ROWS) * steps  # counted from token ``start``
    base = tl.cast(start, tl.int64)
    x_ptr = proj_ptr + base * stride_s + column
    dx_ptr = d_proj_ptr + base * d_stride_s + column
    grad_ptr += base * grad_stride
    # tokens between a segment's start and the sequence's end
    room_R = S - start - first_R

    taps = load_taps(weight_ptr, column, d_D, real_D, W)
    bias_1D = load_bias(bias_ptr, column, d_D, real_D, BLOCK_D, HAS_BIAS)

    if MASK_DOCUMENTS:
        position_ptr += start
        position_R = tl.load(position_ptr + first_R, mask=room_R > 0)
    else:
        position_R = start + first_R
    x_at_RD = x_ptr + first_R[:, None] * stride_s + d_1D
    history = load_history(
        x_at_RD, stride_s, position_R, room_R > 0, real_1D, W, PADDED, MASKED
    )
    if HAS_HISTORY:
        place_ptr += start
        lead_ptr += column
    partial_dx = ()
    for _delay in tl.static_range(1, W):
        partial_dx = partial_dx + (tl.zeros((ROWS, BLOCK_D), tl.float32),)
    d_taps = ()
    for _tap in tl.static_range(W):
        d_taps = d_taps + (tl.zeros((ROWS, BLOCK_D), tl.float32),)
    d_bias_RD = tl.zeros((ROWS, BLOCK_D), tl.float32)

    # The unrolled loop shifts ``history`` and ``partial_dx`` by renaming registers,
    # without copies. The loop's stages prefetch later steps to shared memory, since
    # there are too few registers.
    for first_step in tl.range(0, steps, UNROLL, num_stages=STAGES):
        for unrolled in tl.static_range(UNROLL):
            step = first_step + unrolled
            t_R = first_R + step
            x_RD, dpre_RD, dx_RD, lead_row_R, position_R, history, partial_dx = (
                _walk_one_token(
                    x_ptr,
                    grad_ptr,
                    position_ptr,
                    lead_ptr,
                    place_ptr,
                    t_R,
                    room_R > step,
                    d_1D,
                    real_1D,
                    factor,
                    position_R,
                    bias_1D,
                    taps,
                    history,
                    partial_dx,
                    stride_s,
                    lead_stride,
                    grad_stride,
                    eps,
                    D,
                    W,
                    GROUP,
                    HAS_BIAS,
                    MASK_DOCUMENTS,
                    HAS_HISTORY,
                    NORMALISE,
                    SCALED,
                    PADDED,
                    MASKED,
                )
            )
            if HAS_HISTORY:
                lead_row_R1 = tl.cast(lead_row_R, tl.int64)[:, None]
                at_RD = d_lead_ptr + lead_row_R1 * lead_stride
                of_edge_RD = tl.expand_dims(lead_row_R >= 0, 1) & real_1D
                tl.store(at_RD + column + d_1D, dpre_RD, mask=of_edge_RD)
            summed = ()
            for tap in tl.static_range(W - 1):
                summed = summed + (d_taps[tap] + dpre_RD * history[W - 2 - tap],)
            d_taps = summed + (d_taps[W - 1] + dpre_RD * x_RD,)
            if HAS_BIAS:
                d_bias_RD += dpre_RD
            dx_at_RD = dx_ptr + (t_R - (W - 1))[:, None] * d_stride_s + d_1D
            # The first W - 1 steps finish no token of this segment. They must store
            # nothing, so the mask of channels is used even if no channel is padding.
            ready_1D = (step >= W - 1) & real_1D
            dx_RD = dx_RD.to(dx_at_RD.dtype.element_ty)
            store_row(dx_at_RD, dx_RD, room_R > step - (W - 1), ready_1D, True, MASKED)
            history = push_row(x_RD, history, W - 1)

    # The W - 1 tokens after a segment finish the dx of the segment's last tokens.
    # Another segment contains these tokens and adds their terms to d(weight), d(bias)
    # and d(lead-in).
    for past in tl.static_range(W - 1):
        step = steps + past
        t_R = first_R + step
        x_RD, _, dx_RD, _, position_R, history, partial_dx = _walk_one_token(
            x_ptr,
            grad_ptr,
            position_ptr,
            lead_ptr,
            place_ptr,
            t_R,
            room_R > step,
            d_1D,
            real_1D,
            factor,
            position_R,
            bias_1D,
            taps,
            history,
            partial_dx,
            stride_s,
            lead_stride,
            grad_stride,
            eps,
            D,
            W,
            GROUP,
            HAS_BIAS,
            MASK_DOCUMENTS,
            HAS_HISTORY,
            NORMALISE,
            SCALED,
            PADDED,
            MASKED,
        )
        dx_at_RD = dx_ptr + (t_R - (W - 1))[:, None] * d_stride_s + d_1D
        dx_RD = dx_RD.to(dx_at_RD.dtype.element_ty)
        store_row(dx_at_RD, dx_RD, room_R > step - (W - 1), real_1D, PADDED, MASKED)
        history = push_row(x_RD, history, W - 1)

    for tap in tl.static_range(W):
        tl.store(
            partial_ptr + (column + d_D) * W + tap,
            tl.sum(d_taps[tap], axis=0),
            mask=real_D,
        )
    if HAS_BIAS:
        tl.store(
            partial_ptr + CHANNELS * W + column + d_D,
            tl.sum(d_bias_RD, axis=0),
            mask=real_D,
        )

"""Triton kernels for the first tokens of pieces: they start from the rows before the piece.

One program walks the first W - 1 tokens of one head of one piece, with the same step functions as
the walks over whole sequences.

Legend: N pieces that have a history, R rows of history, S tokens of the batch, B batch, C conv
channels, W taps, D dim of the head at hand, M rows that get further gradients; a line of ``pieces``
is as of :class:`.edges.HistoryTable`; ``history_r``, ``history_b`` and ``history_c`` are strides.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..kernels.elementwise import sigmoid
from .conv_backward import walk_one_token
from .conv_forward import convolve, load_bias, load_taps, push


@triton.jit
def _rows_before(history_ptr, piece_ptr, history_r, at_1D, real_1D, W: tl.constexpr):
    """The W - 1 rows before the piece, newest first; zeros where there are none."""
    rows = ()
    for delay in tl.static_range(1, W):
        row = tl.load(piece_ptr + 1 + delay)
        row_1D = tl.load(
            history_ptr + tl.cast(row, tl.int64) * history_r + at_1D,
            mask=real_1D & (row >= 0), other=0.0,
        )  # fmt: skip
        rows = rows + (row_1D.to(tl.float32),)
    return rows


@triton.jit
def _redo_head(
    proj_ptr, history_ptr, weight_ptr, bias_ptr, piece_ptr, out_ptr,
    column, stride_s, history_r, history_c, out_stride, eps,
    D: tl.constexpr, BLOCK_D: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORMALISE: tl.constexpr,
):  # fmt: skip
    """The pointers are at row 0 of batch row b; ``out_ptr`` is also at this head."""
    d_D = tl.arange(0, BLOCK_D)
    real_D = d_D < D
    d_1D, real_1D = d_D[None, :], real_D[None, :]
    first = tl.cast(tl.load(piece_ptr), tl.int64)
    redone = tl.load(piece_ptr + 1)
    taps = load_taps(weight_ptr, column, d_D, real_D, W)
    bias_1D = load_bias(bias_ptr, column, d_D, real_D, BLOCK_D, HAS_BIAS)
    at_1D = (column + d_1D) * history_c
    history = _rows_before(history_ptr, piece_ptr, history_r, at_1D, real_1D, W)
    for token in tl.static_range(W - 1):
        ours_1D = real_1D & (token < redone)
        x_at_1D = proj_ptr + (first + token) * stride_s + column + d_1D
        x_1D = tl.load(x_at_1D, mask=ours_1D, other=0.0).to(tl.float32)
        pre_1D = convolve(x_1D, history, taps, bias_1D, W, HAS_BIAS)
        act_1D = pre_1D * sigmoid(pre_1D)
        if NORMALISE:
            act_1D = tl.where(real_1D, act_1D, 0.0)
            act_1D = act_1D * tl.rsqrt(tl.sum(act_1D * act_1D, axis=1) + eps)[:, None]
        y_1D = act_1D.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (first + token) * out_stride + d_1D, y_1D, mask=ours_1D)
        history = push(x_1D, history, W - 1)


@triton.jit(do_not_specialize=["S", "first_slot"])
def redo_kernel(
    proj_ptr, history_ptr, weight_ptr, bias_ptr, pieces_ptr, a_ptr, b_ptr, c_ptr,
    S, first_slot, stride_s, stride_b, history_r, history_b, history_c, eps,
    COLUMN: tl.constexpr, HEADS_A: tl.constexpr, HEADS_B: tl.constexpr, HEADS_C: tl.constexpr,
    WIDTH_A: tl.constexpr, WIDTH_B: tl.constexpr, WIDTH_C: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALISE: tl.constexpr,
):  # fmt: skip
    """grid (N, heads, B): only the first axis takes more than 65535 programs.

    Slots are the heads of three sections of the convolved columns. The first two are scaled to unit
    length if NORMALISE. ``first_slot`` skips slots.
    """
    slot = tl.program_id(1) + first_slot
    piece_ptr = pieces_ptr + tl.program_id(0) * (W + 1)
    b = tl.cast(tl.program_id(2), tl.int64)
    proj_ptr += b * stride_b + COLUMN
    history_ptr += b * history_b
    if slot < HEADS_A:
        _redo_head(
            proj_ptr, history_ptr, weight_ptr, bias_ptr, piece_ptr,
            a_ptr + b * S * (HEADS_A * WIDTH_A) + slot * WIDTH_A,
            slot * WIDTH_A, stride_s, history_r, history_c, HEADS_A * WIDTH_A, eps,
            WIDTH_A, BLOCK_A, W, HAS_BIAS, NORMALISE,
        )  # fmt: skip
    elif slot < HEADS_A + HEADS_B:
        head = slot - HEADS_A
        _redo_head(
            proj_ptr, history_ptr, weight_ptr, bias_ptr, piece_ptr,
            b_ptr + b * S * (HEADS_B * WIDTH_B) + head * WIDTH_B,
            HEADS_A * WIDTH_A + head * WIDTH_B, stride_s, history_r, history_c,
            HEADS_B * WIDTH_B, eps, WIDTH_B, BLOCK_B, W, HAS_BIAS, NORMALISE,
        )  # fmt: skip
    else:
        head = slot - HEADS_A - HEADS_B
        _redo_head(
            proj_ptr, history_ptr, weight_ptr, bias_ptr, piece_ptr,
            c_ptr + b * S * (HEADS_C * WIDTH_C) + head * WIDTH_C,
            HEADS_A * WIDTH_A + HEADS_B * WIDTH_B + head * WIDTH_C, stride_s, history_r,
            history_c, HEADS_C * WIDTH_C, eps, WIDTH_C, BLOCK_C, W, HAS_BIAS, False,
        )  # fmt: skip


@triton.jit
def _redo_head_backward(
    proj_ptr, history_ptr, weight_ptr, bias_ptr, piece_ptr, grad_ptr, made_ptr, partial_ptr,
    column, of_redone, stride_s, history_r, history_c, grad_stride, made_stride, factor, eps,
    D: tl.constexpr, CHANNELS: tl.constexpr, GROUP: tl.constexpr, BLOCK_D: tl.constexpr,
    W: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALISE: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Step t completes dx of the row W - 1 before token t, which is a row of history.

    ``pending`` then holds what the steps add to dx of the piece's own tokens, whose rows in
    ``made`` begin at ``of_redone``.
    """
    PADDED: tl.constexpr = D != BLOCK_D
    d_D = tl.arange(0, BLOCK_D)
    real_D = d_D < D
    d_1D, real_1D = d_D[None, :], real_D[None, :]
    first = tl.cast(tl.load(piece_ptr), tl.int64)
    redone = tl.load(piece_ptr + 1)
    taps = load_taps(weight_ptr, column, d_D, real_D, W)
    bias_1D = load_bias(bias_ptr, column, d_D, real_D, BLOCK_D, HAS_BIAS)
    at_1D = (column + d_1D) * history_c
    history = _rows_before(history_ptr, piece_ptr, history_r, at_1D, real_1D, W)
    made_ptr += column
    zero_1D = tl.zeros((1, BLOCK_D), tl.float32)
    pending = ()
    for _delay in tl.static_range(1, W):
        pending = pending + (zero_1D,)
    d_taps = ()
    for _tap in tl.static_range(W):
        d_taps = d_taps + (zero_1D,)
    d_bias_1D = zero_1D
    for token in tl.static_range(W - 1):
        ours_1D = real_1D & (token < redone)
        x_at_1D = proj_ptr + (first + token) * stride_s + column + d_1D
        x_now_1D = tl.load(x_at_1D, mask=ours_1D, other=0.0)
        grads = ()
        for member in tl.static_range(GROUP):
            at = grad_ptr + (first + token) * grad_stride + member * D + d_1D
            grads = grads + (tl.load(at, mask=ours_1D, other=0.0),)
            # The front's backward over the piece, without history, must not count it again.
            tl.store(at, tl.zeros((1, BLOCK_D), grad_ptr.dtype.element_ty), mask=ours_1D)
        x_1D, dpre_1D, dx_1D, history, pending = walk_one_token(
            x_now_1D, grads, factor, 0, bias_1D, taps, history, pending, eps, real_1D,
            W, GROUP, HAS_BIAS, False, NORMALISE, SCALED, PADDED,
        )  # fmt: skip
        summed = ()
        for tap in tl.static_range(W - 1):
            summed = summed + (d_taps[tap] + dpre_1D * history[W - 2 - tap],)
        d_taps = summed + (d_taps[W - 1] + dpre_1D * x_1D,)
        d_bias_1D += dpre_1D
        row = tl.load(piece_ptr + W - token)  # of history, W - 1 - token before the piece
        made_at_1D = made_ptr + tl.cast(row, tl.int64) * made_stride + d_1D
        tl.store(made_at_1D, dx_1D, mask=real_1D & (row >= 0))
        history = push(x_1D, history, W - 1)
    for token in tl.static_range(W - 1):  # pending is complete
        made_at_1D = made_ptr + tl.cast(of_redone + token, tl.int64) * made_stride + d_1D
        tl.store(made_at_1D, pending[W - 2 - token], mask=real_1D)
    for tap in tl.static_range(W):
        tl.store(partial_ptr + (column + d_1D) * W + tap, d_taps[tap], mask=real_1D)
    if HAS_BIAS:
        tl.store(partial_ptr + CHANNELS * W + column + d_1D, d_bias_1D, mask=real_1D)


@triton.jit(do_not_specialize=["S", "R"])
def redo_backward_kernel(
    proj_ptr, history_ptr, weight_ptr, bias_ptr, pieces_ptr, da_ptr, db_ptr, dc_ptr, factor_ptr,
    made_ptr, partial_ptr,
    S, R, stride_s, stride_b, history_r, history_b, history_c, eps,
    COLUMN: tl.constexpr, HEADS_A: tl.constexpr, HEADS_B: tl.constexpr, HEADS_C: tl.constexpr,
    WIDTH_A: tl.constexpr, WIDTH_B: tl.constexpr, WIDTH_C: tl.constexpr,
    BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_C: tl.constexpr,
    GROUP: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, NORMALISE: tl.constexpr,
    SCALED: tl.constexpr,
):  # fmt: skip
    """grid (N, heads, B); slots as in :func:`redo_kernel`.

    ``made``, ``[R + N (W - 1), B, C]`` fp32: gradients of the rows of history, then of the tokens
    computed again. ``partial``: of conv weight and bias, ``[N B, C W]``, with a bias C (W + 1).

    da and db have GROUP gradients for each head of a and b; these are summed. ``factor`` has one
    entry per head of c; heads of c that share a head of a and of b have the same factor.
    """
    CHANNELS: tl.constexpr = HEADS_A * WIDTH_A + HEADS_B * WIDTH_B + HEADS_C * WIDTH_C
    slot = tl.program_id(1)
    n = tl.program_id(0)
    piece_ptr = pieces_ptr + n * (W + 1)
    b = tl.cast(tl.program_id(2), tl.int64)
    of_redone = R + n * (W - 1)
    made_stride = tl.num_programs(2) * CHANNELS
    proj_ptr += b * stride_b + COLUMN
    history_ptr += b * history_b
    made_ptr += b * CHANNELS
    PARTIAL: tl.constexpr = CHANNELS * (W + 1 if HAS_BIAS else W)
    partial_ptr += (n * tl.num_programs(2) + b) * PARTIAL
    if slot < HEADS_A:
        factor = tl.load(factor_ptr + slot * (HEADS_C // HEADS_A)) if SCALED else 1.0
        _redo_head_backward(
            proj_ptr, history_ptr, weight_ptr, bias_ptr, piece_ptr,
            da_ptr + b * S * (HEADS_A * GROUP * WIDTH_A) + slot * (GROUP * WIDTH_A),
            made_ptr, partial_ptr, slot * WIDTH_A, of_redone, stride_s, history_r, history_c,
            HEADS_A * GROUP * WIDTH_A, made_stride, factor, eps,
            WIDTH_A, CHANNELS, GROUP, BLOCK_A, W, HAS_BIAS, NORMALISE, SCALED,
        )  # fmt: skip
    elif slot < HEADS_A + HEADS_B:
        head = slot - HEADS_A
        factor = tl.load(factor_ptr + head * (HEADS_C // HEADS_B)) if SCALED else 1.0
        _redo_head_backward(
            proj_ptr, history_ptr, weight_ptr, bias_ptr, piece_ptr,
            db_ptr + b * S * (HEADS_B * GROUP * WIDTH_B) + head * (GROUP * WIDTH_B),
            made_ptr, partial_ptr, HEADS_A * WIDTH_A + head * WIDTH_B, of_redone, stride_s,
            history_r, history_c, HEADS_B * GROUP * WIDTH_B, made_stride, factor, eps,
            WIDTH_B, CHANNELS, GROUP, BLOCK_B, W, HAS_BIAS, NORMALISE, SCALED,
        )  # fmt: skip
    else:
        head = slot - HEADS_A - HEADS_B
        factor = tl.load(factor_ptr + head) if SCALED else 1.0
        _redo_head_backward(
            proj_ptr, history_ptr, weight_ptr, bias_ptr, piece_ptr,
            dc_ptr + b * S * (HEADS_C * WIDTH_C) + head * WIDTH_C,
            made_ptr, partial_ptr, HEADS_A * WIDTH_A + HEADS_B * WIDTH_B + head * WIDTH_C,
            of_redone, stride_s, history_r, history_c, HEADS_C * WIDTH_C, made_stride, factor, eps,
            WIDTH_C, CHANNELS, 1, BLOCK_C, W, HAS_BIAS, False, SCALED,
        )  # fmt: skip


@triton.jit
def _add_partial(out_ptr, partial_ptr, at_C, real_C, rows, COLUMNS: tl.constexpr):
    """``out += sum of partial rows``, in fp32, rounded once."""
    AT_ONCE: tl.constexpr = 8
    total_C = tl.load(out_ptr + at_C, mask=real_C, other=0.0).to(tl.float32)
    for first in tl.range(0, rows, AT_ONCE):
        row_R = first + tl.arange(0, AT_ONCE)
        at_RC = tl.cast(row_R, tl.int64)[:, None] * COLUMNS + at_C[None, :]
        mask_RC = (row_R < rows)[:, None] & real_C[None, :]
        total_C += tl.sum(tl.load(partial_ptr + at_RC, mask=mask_RC, other=0.0), axis=0)
    tl.store(out_ptr + at_C, total_C.to(out_ptr.dtype.element_ty), mask=real_C)


@triton.jit(do_not_specialize=["M", "most", "R", "redone", "partial_rows"])
def add_gradients_kernel(
    made_ptr, returned_ptr, partial_ptr, additions_ptr, d_proj_ptr, d_weight_ptr, d_bias_ptr,
    M, most, R, redone, partial_rows, stride_s, stride_b,
    COLUMN: tl.constexpr, CHANNELS: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """grid (M, plus W or with a bias W + 1 if there are partial rows; blocks of channels; B).

    A line of ``additions`` is a token, -1 for none, then ``most`` sources, -1 for none, whose
    gradients are added in this order. Below ``redone`` a source is a token computed again, from
    there on a row that came back. Programs from M on add to the gradients of taps and bias.
    """
    line = tl.program_id(0)
    b = tl.cast(tl.program_id(2), tl.int64)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_C = c_C < CHANNELS
    row_stride = tl.num_programs(2) * CHANNELS
    COLUMNS: tl.constexpr = CHANNELS * (W + 1 if HAS_BIAS else W)
    if line < M:
        line_ptr = additions_ptr + line * (1 + most)
        token = tl.cast(tl.load(line_ptr), tl.int64)
        real_C = real_C & (token >= 0)
        at_C = d_proj_ptr + token * stride_s + b * stride_b + COLUMN + c_C
        total_C = tl.load(at_C, mask=real_C, other=0.0).to(tl.float32)
        of_row_C = b * CHANNELS + c_C
        for number in tl.range(0, most):
            source = tl.load(line_ptr + 1 + number)
            ours, theirs = tl.cast(R + source, tl.int64), tl.cast(source - redone, tl.int64)
            total_C += tl.load(
                made_ptr + ours * row_stride + of_row_C,
                mask=real_C & (source >= 0) & (source < redone), other=0.0,
            )  # fmt: skip
            total_C += tl.load(
                returned_ptr + theirs * row_stride + of_row_C,
                mask=real_C & (source >= redone), other=0.0,
            )  # fmt: skip
        tl.store(at_C, total_C.to(d_proj_ptr.dtype.element_ty), mask=real_C)
    elif b == 0:
        tap = line - M
        if tap < W:
            _add_partial(d_weight_ptr, partial_ptr, c_C * W + tap, real_C, partial_rows, COLUMNS)
        elif HAS_BIAS:
            _add_partial(d_bias_ptr, partial_ptr + CHANNELS * W, c_C, real_C, partial_rows, COLUMNS)

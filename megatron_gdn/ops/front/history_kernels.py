"""The lead-in of :mod:`.history`, its backward, and the sums of returned gradients, in
Triton.

The letters are those of :mod:`.history`; in names of tensors inside a kernel C is the
channels of one program. ``real_*`` is the mask of the elements that exist.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import LAUNCH_CACHE_SIZE, Launch
from ..kernels.tiles import require_32_bits, require_rows_within_grid
from .conv_forward import load_taps
from .history import History

_CHANNELS = 256  # channels that a program computes


@triton.jit
def _load_rows_before(rows_ptr, before_ptr, stride_r, at_1C, real_1C, W: tl.constexpr):
    """Load the W - 1 rows before a piece, newest first, as a tuple of fp32 rows.

    The rows' indices are at ``before_ptr``; index -1 gives zeros. Rows lie ``stride_r``
    elements apart. ``at_1C`` are the channels' offsets in a row, ``real_1C`` their
    mask.
    """
    rows = ()
    for age in tl.static_range(1, W):
        index = tl.load(before_ptr + age - 1)
        row_at_1C = rows_ptr + tl.cast(index, tl.int64) * stride_r + at_1C
        row_1C = tl.load(row_at_1C, mask=real_1C & (index >= 0), other=0.0)
        rows = rows + (row_1C.to(tl.float32),)
    return rows


@triton.jit
def lead_in_kernel(
    rows_ptr,
    weight_ptr,
    before_ptr,
    lead_ptr,
    stride_r,
    stride_b,
    stride_c,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the lead-in ``[N, W - 1, B, C]`` to ``lead_ptr``; grid (N, blocks of
    channels, B).

    ``rows_ptr``: the history's rows ``[R, B, C]``, which have the three strides.
    ``weight_ptr``: the conv weight ``[C, 1, W]``. ``before_ptr``: the field
    `HistoryTable.rows_before`. CHANNELS is C, and a program computes BLOCK channels.
    """
    n = tl.cast(tl.program_id(0), tl.int64)
    b = tl.cast(tl.program_id(2), tl.int64)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_C = c_C < CHANNELS
    c_1C = c_C[None, :]
    real_1C = real_C[None, :]
    rows_ptr += b * stride_b
    taps = load_taps(weight_ptr, 0, c_C, real_C, W)
    rows = _load_rows_before(
        rows_ptr, before_ptr + n * (W - 1), stride_r, c_1C * stride_c, real_1C, W
    )
    for p in tl.static_range(W - 1):
        lead_1C = tl.zeros((1, BLOCK), tl.float32)
        for age in tl.static_range(1, W - p):
            lead_1C += taps[W - 1 - p - age] * rows[age - 1]
        at = lead_ptr + ((n * (W - 1) + p) * tl.num_programs(2) + b) * CHANNELS
        tl.store(at + c_1C, lead_1C, mask=real_1C)


# one variant for all numbers of columns
@triton.jit(do_not_specialize=["columns"])
def lead_in_backward_kernel(
    rows_ptr,
    weight_ptr,
    before_ptr,
    edge_ptr,
    d_lead_ptr,
    d_rows_ptr,
    partial_ptr,
    stride_r,
    stride_b,
    stride_c,
    columns,
    CHANNELS: tl.constexpr,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of the history's rows, and a part of the gradient of the conv
    weight; grid (N, blocks of channels, B).

    Reads the lead-in's gradient ``d_lead_ptr [N, W - 1, B, C]``. Writes the rows'
    gradients ``d_rows_ptr [R, B, C]``. Each piece of each batch row has one row of
    ``partial_ptr [N B, columns]``: columns 0 .. C W - 1 get partial sums of d(weight).
    ``edge_ptr``: the field `HistoryTable.edge_tokens`. The other arguments are those of
    :func:`lead_in_kernel`.
    """
    n = tl.cast(tl.program_id(0), tl.int64)
    b = tl.cast(tl.program_id(2), tl.int64)
    B = tl.num_programs(2)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real_C = c_C < CHANNELS
    c_1C = c_C[None, :]
    real_1C = real_C[None, :]
    rows_ptr += b * stride_b
    before_ptr += n * (W - 1)
    taps = load_taps(weight_ptr, 0, c_C, real_C, W)
    rows = _load_rows_before(
        rows_ptr, before_ptr, stride_r, c_1C * stride_c, real_1C, W
    )
    d_leads = ()
    for p in tl.static_range(W - 1):
        # A piece of p or fewer tokens has no token p, so no gradient was written here.
        token = tl.load(edge_ptr + n * (W - 1) + p)
        at = d_lead_ptr + ((n * (W - 1) + p) * B + b) * CHANNELS
        d_leads = d_leads + (
            tl.load(at + c_1C, mask=real_1C & (token >= 0), other=0.0),
        )
    for age in tl.static_range(1, W):
        d_row_1C = tl.zeros((1, BLOCK), tl.float32)
        for p in tl.static_range(W - age):
            d_row_1C += taps[W - 1 - p - age] * d_leads[p]
        index = tl.load(before_ptr + age - 1)
        at = d_rows_ptr + (tl.cast(index, tl.int64) * B + b) * CHANNELS
        tl.store(at + c_1C, d_row_1C, mask=real_1C & (index >= 0))
    partial_ptr += (n * B + b) * columns
    for tap in tl.static_range(W):
        d_tap_1C = tl.zeros((1, BLOCK), tl.float32)
        for age in tl.static_range(1, W - tap):
            d_tap_1C += d_leads[W - 1 - tap - age] * rows[age - 1]
        tl.store(partial_ptr + c_1C * W + tap, d_tap_1C, mask=real_1C)


# one variant for all tables
@triton.jit(do_not_specialize=["most"])
def add_rows_kernel(
    returned_ptr,
    additions_ptr,
    d_rows_ptr,
    most,
    stride_s,
    stride_b,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Add returned gradients ``returned_ptr [., B, C]`` to the tokens' gradients
    ``d_rows_ptr [s, B, C]``; grid (M, blocks of channels, B).

    Other ranks read rows of these tokens as history, and return the gradients of these
    rows.

    ``additions_ptr``: the field `HistoryTable.gradient_additions`, ``[M, 1 + most]``;
    ``most`` is the largest number of gradients that return for a token. A program adds
    the gradients of one line, in the line's order. The strides are those of
    ``d_rows_ptr``, whose channels are adjacent.
    """
    line_ptr = additions_ptr + tl.cast(tl.program_id(0), tl.int64) * (1 + most)
    b = tl.cast(tl.program_id(2), tl.int64)
    c_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.cast(tl.load(line_ptr), tl.int64)
    real_C = (c_C < CHANNELS) & (token >= 0)
    at_C = d_rows_ptr + token * stride_s + b * stride_b + c_C
    total_C = tl.load(at_C, mask=real_C).to(tl.float32)
    for number in tl.range(0, most):
        source = tl.cast(tl.load(line_ptr + 1 + number), tl.int64)
        row_C = returned_ptr + (source * tl.num_programs(2) + b) * CHANNELS + c_C
        total_C += tl.load(row_C, mask=real_C & (source >= 0), other=0.0)
    tl.store(at_C, total_C.to(d_rows_ptr.dtype.element_ty), mask=real_C)


def lead_in(
    history: History | None, weight: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The fp32 lead-in ``[N, W - 1, B, C]`` and ``table.edge_index``, for the front's
    kernels.

    Both are None if no piece has a history. ``weight``: ``[C, 1, W]``.
    """
    if history is None or not len(history.table.rows_before):
        return None, None
    rows = history.rows
    table = history.table
    B, C = rows.shape[1:]
    lead = rows.new_empty(table.rows_before.shape + (B, C), dtype=torch.float32)
    launch = _launch(
        lead_in_kernel,
        len(lead),
        B,
        C,
        rows.stride(2),
        *rows.stride(),
        W=weight.shape[-1],
    )
    launch(rows, weight, table.rows_before, lead)
    return lead, table.edge_index


def lead_in_backward(
    history: History, weight: Tensor, d_lead: Tensor, partial: Tensor
) -> None:
    """Write ``history.d_rows`` from ``d_lead [N, W - 1, B, C]``, the lead-in's
    gradient.

    Also fills ``partial`` ``[N B, columns]``: partial sums of d(weight) in the first
    C W columns, zeros in the others.
    """
    rows, table, d_rows = history
    columns = partial.shape[1]
    # The kernel writes only the columns of d(weight), but all columns are summed later.
    partial.zero_()
    N, _ = table.rows_before.shape
    B, C = rows.shape[1:]
    numbers = rows.stride() + (columns,)
    W = weight.shape[-1]
    launch = _launch(lead_in_backward_kernel, N, B, C, rows.stride(2), *numbers, W=W)
    launch(rows, weight, table.rows_before, table.edge_tokens, d_lead, d_rows, partial)


def add_rows(d_rows: Tensor, returned: Tensor, additions: Tensor) -> None:
    """Add the gradients ``returned [., B, C]`` to ``d_rows [s, B, C]``, as
    ``gradient_additions`` of :class:`.history.HistoryTable` says; sums are fp32."""
    M, columns = additions.shape
    B, C = returned.shape[1:]
    # the channels of a row are adjacent: stride 1
    launch = _launch(add_rows_kernel, M, B, C, 1, columns - 1, *d_rows.stride()[:2])
    launch(returned, additions, d_rows)


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _launch(
    kernel, lines: int, B: int, C: int, stride_c: int, *numbers: int, **constants: int
) -> Launch:
    """A launch of ``kernel``, one of this file's, on the grid (lines, blocks of
    channels, B).

    ``lines``: a number of pieces, or of lines of a table. ``stride_c``: elements from
    channel to channel. ``numbers``, ``constants``: the kernel's arguments after its
    tensors, without CHANNELS and BLOCK. Raises a ValueError if offsets of channels need
    more than 32 bits.
    """
    require_rows_within_grid(B)
    require_32_bits(
        "the number of channels times their distance", (C + _CHANNELS) * stride_c
    )
    require_32_bits("the number of batch rows times channels", B * (C + _CHANNELS))
    grid = lines, triton.cdiv(C, _CHANNELS), B
    return Launch(
        kernel, grid, *numbers, CHANNELS=C, BLOCK=_CHANNELS, num_warps=4, **constants
    )

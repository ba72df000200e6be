"""Triton kernels that carry columns between whole rows and the rows of each rank.

Legend: R rows of a tile, one per (token, batch row); D columns of a block.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _rows(ptr, t_R, b_R, stride_s, stride_b, ALIGN: tl.constexpr):
    """Where the whole rows of tokens t and batch rows b start; strides count ALIGN elements."""
    at_R = tl.cast(t_R, tl.int64) * stride_s + tl.cast(b_R, tl.int64) * stride_b
    return ptr + at_R * ALIGN


@triton.jit
def _carry_strip(
    whole_R, own_R, real_R, rank, STRIPS: tl.constexpr, AT: tl.constexpr, PACK: tl.constexpr
):
    whole_R += STRIPS[AT][0] + rank // STRIPS[AT][3] * STRIPS[AT][2]
    own_R += STRIPS[AT][1]
    BLOCK: tl.constexpr = STRIPS[AT][4]
    for block in tl.range(0, STRIPS[AT][5]):
        at_D = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        if PACK:
            tl.store(own_R + at_D, tl.load(whole_R + at_D, mask=real_R), mask=real_R)
        else:
            tl.store(whole_R + at_D, tl.load(own_R + at_D, mask=real_R), mask=real_R)


@triton.jit(do_not_specialize=["first", "skipped", "tokens", "tiles"])
def carry_columns_kernel(
    whole_ptr, own_ptr, full_ptr, place_ptr,
    first, skipped, tokens, batch, tiles, stride_s, stride_b,
    STRIPS: tl.constexpr, OWN_WIDTH: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    PLACED: tl.constexpr, KEPT: tl.constexpr, PACK: tl.constexpr,
):  # fmt: skip
    """Copy every strip of the ranks first, first + 1, .. but ``skipped``, a message for each.

    PACK copies from the whole rows to the messages, else the other way. PLACED: token t of the one
    message is its row ``place[t]``. KEPT: ``skipped`` is not left out, its token t is row
    ``place[t]`` of ``full``. grid (any number of programs); ``tiles`` of ROWS rows in all.
    """
    rows = tokens * batch
    tiles_per_rank = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        message = tile // tiles_per_rank
        rank = first + message
        if not KEPT:
            rank += (rank >= skipped).to(tl.int32)
        row_R = tile % tiles_per_rank * ROWS + tl.arange(0, ROWS)
        real_R = (row_R < rows)[:, None]
        t_R = row_R // batch
        b_R = row_R % batch
        if PLACED:
            place_R = tl.load(place_ptr + t_R, mask=row_R < rows, other=0)
            own_row_R = tl.cast(place_R, tl.int64) * batch + b_R
        else:
            if KEPT:
                message -= (rank > skipped).to(tl.int32)
            own_row_R = tl.cast(message, tl.int64) * rows + row_R
        whole_R = _rows(whole_ptr, t_R, b_R, stride_s, stride_b, ALIGN)[:, None]
        own_R = own_ptr + own_row_R * OWN_WIDTH
        if KEPT:  # noqa: SIM102 - a constant, and a number that only the GPU knows
            if rank == skipped:
                place_R = tl.load(place_ptr + t_R, mask=row_R < rows, other=0)
                own_R = full_ptr + (tl.cast(place_R, tl.int64) * batch + b_R) * OWN_WIDTH
        own_R = own_R[:, None]
        for strip in tl.static_range(len(STRIPS)):
            _carry_strip(whole_R, own_R, real_R, rank, STRIPS, strip, PACK)


@triton.jit
def _sum_strip(
    whole_R, message_R, mine_R, real_R, part, me, message_size,
    STRIPS: tl.constexpr, AT: tl.constexpr, COPIES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    whole_R += STRIPS[AT][0] + part * STRIPS[AT][2]
    message_R += STRIPS[AT][1]
    mine_R += STRIPS[AT][1]
    BLOCK: tl.constexpr = STRIPS[AT][4]
    for block in tl.range(0, STRIPS[AT][5]):
        at_D = block * BLOCK + tl.arange(0, BLOCK)[None, :]
        total_RD = tl.zeros((real_R.shape[0], BLOCK), WIDE)
        for copy in tl.static_range(COPIES):
            rank = part * COPIES + copy
            if rank == me:
                x_RD = tl.load(mine_R + at_D, mask=real_R, other=0.0)
            else:
                before = (rank - (rank > me).to(tl.int32)) * message_size
                x_RD = tl.load(message_R + before + at_D, mask=real_R, other=0.0)
            total_RD += x_RD.to(WIDE)
        tl.store(whole_R + at_D, total_RD.to(whole_R.dtype.element_ty), mask=real_R)


@triton.jit(do_not_specialize=["me", "tokens", "tiles"])
def sum_copies_kernel(
    whole_ptr, message_ptr, mine_ptr, place_ptr,
    me, tokens, batch, tiles, stride_s, stride_b,
    STRIPS: tl.constexpr, OWN_WIDTH: tl.constexpr, ALIGN: tl.constexpr, ROWS: tl.constexpr,
    COPIES: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Add up the COPIES of every strip in the order of their ranks, in WIDE, rounded once.

    A peer's rows lie in its message, this rank's (``me``) at ``place[t]`` of ``mine``.
    grid (any number of programs); ``tiles`` = tiles of ROWS rows times blocks (ranks / COPIES).
    """
    rows = tokens * batch
    tiles_per_block = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        part = tile // tiles_per_block
        row_R = tile % tiles_per_block * ROWS + tl.arange(0, ROWS)
        real_R = (row_R < rows)[:, None]
        t_R = row_R // batch
        b_R = row_R % batch
        place_R = tl.load(place_ptr + t_R, mask=row_R < rows, other=0)
        mine_R = (mine_ptr + (tl.cast(place_R, tl.int64) * batch + b_R) * OWN_WIDTH)[:, None]
        whole_R = _rows(whole_ptr, t_R, b_R, stride_s, stride_b, ALIGN)[:, None]
        message_R = (message_ptr + tl.cast(row_R, tl.int64) * OWN_WIDTH)[:, None]
        for strip in tl.static_range(len(STRIPS)):
            _sum_strip(
                whole_R, message_R, mine_R, real_R, part, me, tl.cast(rows, tl.int64) * OWN_WIDTH,
                STRIPS, strip, COPIES, WIDE,
            )  # fmt: skip

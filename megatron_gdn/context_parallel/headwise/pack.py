"""Triton kernels that pack rows into a message per rank, and unpack messages.

:mod:`.pack_torch` has the same functions in plain torch.

    whole rows  ``[s, B, P]``: this rank's tokens, all ranks' columns; s and B have any
                strides
    messages    ``[ranks - 1, s, B, p]``: one for each peer, in rank order without this
                rank
    full rows   ``[S, B, p]``: the tokens of all ranks, this rank's columns
    place       int32 ``[s]``: the row of ``full`` that holds token t

For its own tokens a rank copies its own columns from whole rows to full rows, without
sending.
Legend: R rows of a tile, one per (token, batch row); D columns of a block.
"""

from __future__ import annotations

from functools import cache, lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.kernels.launch import MOST_PLANS, Launch
from ...ops.kernels.tiles import require_32_bits
from .shares import HeadShares, Strip, alignment, strips

_WARPS = 8
_COLUMNS = 1024
_TILE_BYTES = 32 << 10  # a tile takes eight 16-byte loads per thread
_PER_PROCESSOR = 2  # programs that fit on a multiprocessor at the same time
# A kernel beside a transfer leaves 32 multiprocessors to NCCL, which takes up to 32.
_LEFT_TO_TRANSFERS = 32
# Places of a strip's fields, for kernels.
AT_WHOLE, AT_OWN, AT_STEP, AT_COPIES, AT_BLOCK, AT_REPEATS = map(
    tl.constexpr, range(len(Strip._fields))
)


def _programs(tiles: int, device: torch.device, beside_transfer: bool) -> int:
    """The number of programs for ``tiles`` tiles; fewer if NCCL sends
    (``beside_transfer``)."""
    if device.type != "cuda":
        return min(tiles, 3)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if beside_transfer:
        return min(tiles, max(1, processors - _LEFT_TO_TRANSFERS))
    return min(tiles, _PER_PROCESSOR * processors)


def _rows_of_tile(rows: int, element_size: int, cut: tuple[Strip, ...]) -> int:
    """How many rows a tile has: its widest block of the strips ``cut`` has <=
    _TILE_BYTES bytes."""
    if rows >= 4096:
        tile = _TILE_BYTES
    else:
        tile = _TILE_BYTES // 4
    widest = max(strip.block for strip in cut) * element_size
    return max(1, min(128, tile // widest))


def _require_32_bits(rows: int, tiles: int) -> None:
    """Raise a ValueError if a kernel could not count up to ``rows`` or up to
    ``tiles``."""
    require_32_bits("the number of tokens times batch rows", rows)
    require_32_bits("the number of tiles of a head exchange", tiles)


def _strides(whole: Tensor) -> tuple[int, int, int]:
    """Return s, b, n: tokens of ``whole`` are s * n elements apart, batch rows b * n
    elements."""
    assert whole.stride(2) == 1 or whole.shape[2] == 1
    s, b = (whole.stride(d) if whole.shape[d] > 1 else 0 for d in (0, 1))
    align = alignment(s, b)
    return s // align, b // align, align


def _launch_copy(
    whole: Tensor,
    rank_rows: Tensor,
    place: Tensor | None,
    cut: tuple[Strip, ...],
    *,
    message_count: int,
    first_rank: int = 0,
    skipped_rank: int | None = None,
    pack: bool,
    kept_rows: tuple[Tensor, Tensor] | None = None,
    beside_transfer: bool = False,
) -> None:
    """If ``pack``, copy columns of ``whole`` to messages ``rank_rows``, else copy them
    back.

    The messages are of ``message_count`` ranks from ``first_rank`` on. Columns of
    ``skipped_rank`` go to ``kept_rows`` (rows, places) or nowhere. ``place[t]`` is
    token t's row in a message.
    """
    tokens, batch, _ = whole.shape
    if not tokens * batch or not message_count or not cut:
        return
    full, place = (rank_rows, place) if kept_rows is None else kept_rows
    assert rank_rows.is_contiguous() and rank_rows.dtype == whole.dtype
    assert full.is_contiguous() and full.dtype == whole.dtype
    launch = _copy_launch(
        tokens,
        batch,
        _strides(whole),
        whole.element_size(),
        whole.device,
        cut,
        rank_rows.shape[-1],
        message_count,
        first_rank,
        first_rank + message_count if skipped_rank is None else skipped_rank,
        place is not None and kept_rows is None,
        kept_rows is not None,
        pack,
        beside_transfer,
    )
    launch(whole, rank_rows, full, place)


@lru_cache(maxsize=MOST_PLANS)
def _copy_launch(
    tokens: int,
    batch: int,
    strides: tuple[int, int, int],
    element_size: int,
    device: torch.device,
    cut: tuple[Strip, ...],
    rank_width: int,
    message_count: int,
    first_rank: int,
    skipped_rank: int,
    has_places: bool,
    kept: bool,
    pack: bool,
    beside_transfer: bool,
) -> Launch:
    """The launch of `copy_columns_kernel` for these arguments; `_strides` returns
    ``strides``."""
    stride_s, stride_b, align = strides
    at_once = _rows_of_tile(tokens * batch, element_size, cut)
    tiles = triton.cdiv(tokens * batch, at_once) * message_count
    programs = _programs(tiles, device, beside_transfer)
    _require_32_bits(tokens * batch + at_once, tiles + programs)
    return Launch(
        copy_columns_kernel,
        (programs,),
        first_rank,
        skipped_rank,
        tokens,
        batch,
        tiles,
        stride_s,
        stride_b,
        STRIPS=cut,
        RANK_WIDTH=rank_width,
        ALIGN=align,
        ROWS=at_once,
        PLACED=has_places,
        KEPT=kept,
        PACK=pack,
        num_warps=_WARPS,
    )


def pack_peers(
    whole: Tensor,
    messages: Tensor,
    shares: HeadShares,
    rank: int,
    *,
    kept_rows: tuple[Tensor, Tensor] | None = None,
    beside_transfer: bool = False,
) -> None:
    """Copy every peer's columns of ``whole`` to that peer's message.

    With ``kept_rows`` (full rows, places) this rank's columns are also copied to these
    full rows.
    """
    _launch_copy(
        whole,
        messages,
        None,
        strips(shares, _COLUMNS),
        message_count=shares.ranks - (kept_rows is None),
        skipped_rank=rank,
        pack=True,
        kept_rows=kept_rows,
        beside_transfer=beside_transfer,
    )


@cache
def _unshared_strips(shares: HeadShares) -> tuple[Strip, ...]:
    """The strips of columns that one rank alone holds."""
    return tuple(strip for strip in strips(shares, _COLUMNS) if strip.copies == 1)


def copy_kept_rows(
    whole: Tensor,
    full: Tensor,
    shares: HeadShares,
    rank: int,
    place: Tensor,
    *,
    to_full: bool,
) -> None:
    """If ``to_full``, copy ``rank``'s columns to ``full[place]``, else copy unshared
    ones back."""
    _launch_copy(
        whole,
        full,
        place,
        strips(shares, _COLUMNS) if to_full else _unshared_strips(shares),
        message_count=1,
        first_rank=rank,
        pack=to_full,
        beside_transfer=True,
    )


def unpack_peers(
    messages: Tensor,
    full: Tensor,
    whole: Tensor,
    shares: HeadShares,
    rank: int,
    place: Tensor,
    *,
    with_kept_rows: bool = False,
    beside_transfer: bool = False,
) -> None:
    """Write to ``whole`` the columns that peers hold. Columns that several ranks hold
    are summed.

    The sum adds ranks in ascending order, in fp32 (fp64 for fp64), and is rounded once.
    This rank's term comes from ``full``. If ``with_kept_rows``, own columns are also
    copied from ``full``.
    """
    _launch_copy(
        whole,
        messages,
        None,
        _unshared_strips(shares),
        message_count=shares.ranks - (not with_kept_rows),
        skipped_rank=rank,
        pack=False,
        kept_rows=(full, place) if with_kept_rows else None,
        beside_transfer=beside_transfer,
    )
    tokens, batch, _ = whole.shape
    launches = _sum_launches(
        tokens,
        batch,
        _strides(whole),
        whole.dtype,
        whole.device,
        shares,
        rank,
        full.shape[-1],
        beside_transfer,
    )
    for launch in launches:
        launch(whole, messages, full, place)


@lru_cache(maxsize=MOST_PLANS)
def _sum_launches(
    tokens: int,
    batch: int,
    strides: tuple[int, int, int],
    dtype: torch.dtype,
    device: torch.device,
    shares: HeadShares,
    rank: int,
    rank_width: int,
    beside_transfer: bool,
) -> tuple[Launch, ...]:
    """Launches of `sum_copies_kernel`, one per number of ranks that hold a copy of a
    column."""
    stride_s, stride_b, align = strides
    rows = tokens * batch
    launches = []
    for copies in sorted(set(shares.copies) - {1}):
        cut = tuple(
            strip for strip in strips(shares, _COLUMNS) if strip.copies == copies
        )
        # Sums are in a wider dtype than rows, so a tile of sums has half as many rows.
        at_once = max(1, _rows_of_tile(rows, dtype.itemsize, cut) // 2)
        tiles = triton.cdiv(rows, at_once) * (shares.ranks // copies)
        if tiles:
            programs = _programs(tiles, device, beside_transfer)
            _require_32_bits(rows + at_once, tiles + programs)
            launches.append(
                Launch(
                    sum_copies_kernel,
                    (programs,),
                    rank,
                    tokens,
                    batch,
                    tiles,
                    stride_s,
                    stride_b,
                    STRIPS=cut,
                    RANK_WIDTH=rank_width,
                    ALIGN=align,
                    ROWS=at_once,
                    COPIES=copies,
                    WIDE=tl.float64 if dtype == torch.float64 else tl.float32,
                    num_warps=_WARPS,
                )
            )
    return tuple(launches)


def move_rows(
    messages: Tensor,
    full: Tensor,
    place: Tensor,
    *,
    to_full: bool,
    beside_transfer: bool = False,
) -> None:
    """If ``to_full``, copy row t of the joined ``messages`` to ``full[place[t]]``, else
    back."""
    rows = messages.flatten(0, 1)
    cut = strips(HeadShares.even(1, messages.shape[-1:]), _COLUMNS)
    _launch_copy(
        rows,
        full,
        place,
        cut,
        message_count=1,
        pack=to_full,
        beside_transfer=beside_transfer,
    )


@triton.jit
def _row_pointers(whole_ptr, t_R, b_R, stride_s, stride_b, ALIGN: tl.constexpr):
    """Pointers to R whole rows (tokens ``t_R``, batch rows ``b_R``); strides in units
    of ALIGN."""
    at_R = tl.cast(t_R, tl.int64) * stride_s + tl.cast(b_R, tl.int64) * stride_b
    return whole_ptr + at_R * ALIGN


@triton.jit
def _copy_strip(
    whole_R,
    message_R,
    real_R,
    rank,
    STRIPS: tl.constexpr,
    AT: tl.constexpr,
    PACK: tl.constexpr,
):
    """If PACK, copy STRIPS[AT] of rows ``whole_R`` to ``message_R``, else back; mask
    ``real_R``."""
    whole_R += (
        STRIPS[AT][AT_WHOLE] + rank // STRIPS[AT][AT_COPIES] * STRIPS[AT][AT_STEP]
    )
    message_R += STRIPS[AT][AT_OWN]
    BLOCK: tl.constexpr = STRIPS[AT][AT_BLOCK]
    for repeat in tl.range(0, STRIPS[AT][AT_REPEATS]):
        at_D = repeat * BLOCK + tl.arange(0, BLOCK)[None, :]
        if PACK:
            tl.store(
                message_R + at_D, tl.load(whole_R + at_D, mask=real_R), mask=real_R
            )
        else:
            tl.store(
                whole_R + at_D, tl.load(message_R + at_D, mask=real_R), mask=real_R
            )


@triton.jit(do_not_specialize=["first_rank", "skipped_rank", "tokens", "tiles"])
def copy_columns_kernel(
    whole_ptr,
    message_ptr,
    full_ptr,
    place_ptr,
    first_rank,
    skipped_rank,
    tokens,
    batch,
    tiles,
    stride_s,
    stride_b,
    STRIPS: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    PLACED: tl.constexpr,
    KEPT: tl.constexpr,
    PACK: tl.constexpr,
):
    """Copy the STRIPS of ranks ``first_rank``, ``first_rank + 1``, ... without
    ``skipped_rank``.

    With PACK columns go from whole rows to messages of RANK_WIDTH columns at
    ``message_ptr``, else back. A tile has ROWS rows; the programs share the ``tiles``.
    With PLACED there is one message, whose row ``place[t]`` holds token t. With KEPT
    columns of ``skipped_rank`` are copied too: row ``place[t]`` of ``full`` holds token
    t.
    """
    rows = tokens * batch
    tiles_per_rank = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        message = tile // tiles_per_rank
        rank = first_rank + message
        if not KEPT:
            rank += (rank >= skipped_rank).to(tl.int32)
        row_R = tile % tiles_per_rank * ROWS + tl.arange(0, ROWS)
        real_R = (row_R < rows)[:, None]
        t_R = row_R // batch
        b_R = row_R % batch
        if PLACED:
            place_R = tl.load(place_ptr + t_R, mask=row_R < rows, other=0)
            message_row_R = tl.cast(place_R, tl.int64) * batch + b_R
        else:
            if KEPT:
                message -= (rank > skipped_rank).to(tl.int32)
            message_row_R = tl.cast(message, tl.int64) * rows + row_R
        whole_R = _row_pointers(whole_ptr, t_R, b_R, stride_s, stride_b, ALIGN)[:, None]
        message_R = message_ptr + message_row_R * RANK_WIDTH
        if KEPT:  # noqa: SIM102 - a constant, and a number that only the GPU knows
            if rank == skipped_rank:
                place_R = tl.load(place_ptr + t_R, mask=row_R < rows, other=0)
                message_R = (
                    full_ptr + (tl.cast(place_R, tl.int64) * batch + b_R) * RANK_WIDTH
                )
        message_R = message_R[:, None]
        for strip in tl.static_range(len(STRIPS)):
            _copy_strip(whole_R, message_R, real_R, rank, STRIPS, strip, PACK)


@triton.jit
def _sum_strip(
    whole_R,
    message_R,
    full_R,
    real_R,
    block_index,
    own_rank,
    message_size,
    STRIPS: tl.constexpr,
    AT: tl.constexpr,
    COPIES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write to ``whole_R`` the sum of block ``block_index`` of STRIPS[AT] over its
    COPIES ranks.

    ``full_R`` points to R rows of ``own_rank``, ``message_R`` to R rows of the first
    message; a message has ``message_size`` elements. ``real_R`` masks the rows. The sum
    is in dtype WIDE.
    """
    whole_R += STRIPS[AT][AT_WHOLE] + block_index * STRIPS[AT][AT_STEP]
    message_R += STRIPS[AT][AT_OWN]
    full_R += STRIPS[AT][AT_OWN]
    BLOCK: tl.constexpr = STRIPS[AT][AT_BLOCK]
    for repeat in tl.range(0, STRIPS[AT][AT_REPEATS]):
        at_D = repeat * BLOCK + tl.arange(0, BLOCK)[None, :]
        total_RD = tl.zeros((real_R.shape[0], BLOCK), WIDE)
        for copy in tl.static_range(COPIES):
            rank = block_index * COPIES + copy
            if rank == own_rank:
                x_RD = tl.load(full_R + at_D, mask=real_R, other=0.0)
            else:
                offset = (rank - (rank > own_rank).to(tl.int32)) * message_size
                x_RD = tl.load(message_R + offset + at_D, mask=real_R, other=0.0)
            total_RD += x_RD.to(WIDE)
        tl.store(whole_R + at_D, total_RD.to(whole_R.dtype.element_ty), mask=real_R)


@triton.jit(do_not_specialize=["own_rank", "tokens", "tiles"])
def sum_copies_kernel(
    whole_ptr,
    message_ptr,
    full_ptr,
    place_ptr,
    own_rank,
    tokens,
    batch,
    tiles,
    stride_s,
    stride_b,
    STRIPS: tl.constexpr,
    RANK_WIDTH: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    COPIES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Sum every strip over the COPIES ranks that hold it, in rank order and dtype WIDE.

    A peer's rows are in the peer's message. Token t of this rank (``own_rank``) is row
    ``place[t]`` of ``full``. COPIES successive ranks hold one block; programs share the
    ``tiles`` of all blocks.
    """
    rows = tokens * batch
    tiles_per_block = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        block_index = tile // tiles_per_block
        row_R = tile % tiles_per_block * ROWS + tl.arange(0, ROWS)
        real_R = (row_R < rows)[:, None]
        t_R = row_R // batch
        b_R = row_R % batch
        place_R = tl.load(place_ptr + t_R, mask=row_R < rows, other=0)
        full_R = (full_ptr + (tl.cast(place_R, tl.int64) * batch + b_R) * RANK_WIDTH)[
            :, None
        ]
        whole_R = _row_pointers(whole_ptr, t_R, b_R, stride_s, stride_b, ALIGN)[:, None]
        message_R = (message_ptr + tl.cast(row_R, tl.int64) * RANK_WIDTH)[:, None]
        for strip in tl.static_range(len(STRIPS)):
            _sum_strip(
                whole_R,
                message_R,
                full_R,
                real_R,
                block_index,
                own_rank,
                tl.cast(rows, tl.int64) * RANK_WIDTH,
                STRIPS,
                strip,
                COPIES,
                WIDE,
            )

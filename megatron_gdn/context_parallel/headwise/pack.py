"""Triton kernels that pack rows into a message per rank, and unpack messages.

:mod:`.pack_torch` has the same functions in plain torch.

    cp_rows    ``[s, B, P]``: the tokens of one rank, all columns (context-parallel);
               s and B have any strides
    hp_rows    ``[S, B, p]``: the tokens of all ranks, the columns of one rank's heads
               (hidden-parallel)
    messages   ``[ranks - 1, s, B, p]``: one for each peer, in rank order without this
               rank
    positions  int32 ``[s]``: the row of ``hp_rows`` that holds token t

A rank copies its own columns of its own tokens, the *kept rows*, from cp_rows to
hp_rows without a message.

A kernel's work is cut into *tiles*: some rows of one rank's columns. These columns are
cut into *strips* of adjacent columns (:class:`.shares.Strip`). A program copies a tile
strip by strip, and a strip in blocks of columns.

Legend: R rows of a tile, one per (token, batch row); D columns of a block.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...ops.kernels.launch import LAUNCH_CACHE_SIZE, Launch
from ...ops.kernels.tiles import require_32_bits
from .shares import HeadShares, Strip, alignment, strips_of

_WARPS = 8
_LARGEST_BLOCK_WIDTH = 1024  # columns that a program copies at a time
_TILE_BYTES = 32 << 10  # a tile takes eight 16-byte loads per thread
_PROGRAMS_PER_PROCESSOR = 2  # programs that fit on a multiprocessor at the same time
# A kernel that runs during a transfer leaves 32 multiprocessors to NCCL, the most that
# NCCL takes.
_PROCESSORS_FOR_NCCL = 32
# The index of each field of a `Strip`, since kernels read a strip as a plain tuple.
STRIP_FIRST_COLUMN = tl.constexpr(Strip._fields.index("first_column"))
STRIP_RANK_FIRST_COLUMN = tl.constexpr(Strip._fields.index("rank_first_column"))
STRIP_RANK_STEP = tl.constexpr(Strip._fields.index("rank_step"))
STRIP_COPIES = tl.constexpr(Strip._fields.index("copies"))
STRIP_BLOCK_WIDTH = tl.constexpr(Strip._fields.index("block_width"))
STRIP_BLOCK_COUNT = tl.constexpr(Strip._fields.index("block_count"))


class _RowStrides(NamedTuple):
    """Strides of cp_rows in units of ``alignment`` elements."""

    token: int
    batch_row: int
    alignment: int  # a power of two, at most 16


def _program_count(tiles: int, device: torch.device, beside_transfer: bool) -> int:
    """The number of programs of a kernel for ``tiles`` tiles; fewer if the kernel runs
    while NCCL sends messages (``beside_transfer``)."""
    if device.type != "cuda":
        # Triton's interpreter, in tests: few programs, so that each has several tiles
        return min(tiles, 3)
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if beside_transfer:
        return min(tiles, max(1, processors - _PROCESSORS_FOR_NCCL))
    return min(tiles, _PROGRAMS_PER_PROCESSOR * processors)


def _rows_per_tile(rows: int, element_size: int, strips: tuple[Strip, ...]) -> int:
    """The number of rows of a tile, so that the tile has at most _TILE_BYTES bytes of
    the widest block of ``strips``.

    ``rows``: the rows of all tiles together; ``element_size``: bytes of an element.
    """
    # With fewer rows, smaller tiles let more programs run at one time.
    if rows >= 4096:
        tile = _TILE_BYTES
    else:
        tile = _TILE_BYTES // 4
    widest = max(strip.block_width for strip in strips) * element_size
    return max(1, min(128, tile // widest))


def _require_32_bits(rows: int, tiles: int) -> None:
    """Raise a ValueError if a kernel could not count up to ``rows`` or up to
    ``tiles``."""
    require_32_bits("the number of tokens times batch rows", rows)
    require_32_bits("the number of tiles of a head exchange", tiles)


def _strides_of(cp_rows: Tensor) -> _RowStrides:
    """The strides of ``cp_rows``, in units of ``alignment`` elements.

    The kernels multiply the strides by the constant ``alignment``. So Triton knows that
    rows begin at multiples of ``alignment`` elements. A dimension of size 1 counts as
    stride 0, since torch gives it any stride.
    """
    assert cp_rows.stride(2) == 1 or cp_rows.shape[2] == 1
    token, batch_row = (
        cp_rows.stride(d) if cp_rows.shape[d] > 1 else 0 for d in (0, 1)
    )
    unit = alignment(token, batch_row)
    return _RowStrides(token // unit, batch_row // unit, unit)


def _launch_copy(
    cp_rows: Tensor,
    rank_rows: Tensor,
    positions: Tensor | None,
    strips: tuple[Strip, ...],
    *,
    message_count: int,
    first_rank: int = 0,
    skipped_rank: int | None = None,
    pack: bool,
    kept_rows: tuple[Tensor, Tensor] | None = None,
    beside_transfer: bool,
) -> None:
    """If ``pack``, copy the columns ``strips`` of ``cp_rows`` to ``rank_rows``, else
    copy them back.

    ``rank_rows`` has a message for each of the ``message_count`` ranks from
    ``first_rank`` on, without ``skipped_rank``. If ``positions`` is given,
    ``rank_rows`` is hp_rows, with only the columns of ``first_rank``.
    ``beside_transfer``: whether messages travel meanwhile; then fewer programs run.

    ``kept_rows`` is (hp_rows, positions) or None; callers give ``positions`` or
    ``kept_rows``, not both. With ``kept_rows``, the columns of ``skipped_rank`` are
    copied to (or from) hp_rows, and ``message_count`` counts this rank too.
    """
    tokens, batch, _ = cp_rows.shape
    if not tokens * batch or not message_count or not strips:
        return
    has_positions = positions is not None
    if kept_rows is None:
        hp_rows = rank_rows  # not read
    else:
        assert positions is None
        hp_rows, positions = kept_rows
    if skipped_rank is None:
        skipped_rank = first_rank + message_count  # no rank is skipped
    assert rank_rows.is_contiguous() and rank_rows.dtype == cp_rows.dtype
    assert hp_rows.is_contiguous() and hp_rows.dtype == cp_rows.dtype
    launch = _copy_launch(
        tokens,
        batch,
        _strides_of(cp_rows),
        cp_rows.element_size(),
        cp_rows.device,
        strips,
        rank_rows.shape[-1],
        message_count,
        first_rank,
        skipped_rank,
        has_positions,
        kept_rows is not None,
        pack,
        beside_transfer,
    )
    launch(cp_rows, rank_rows, hp_rows, positions)


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _copy_launch(
    tokens: int,
    batch: int,
    strides: _RowStrides,
    element_size: int,
    device: torch.device,
    strips: tuple[Strip, ...],
    rank_width: int,
    message_count: int,
    first_rank: int,
    skipped_rank: int,
    has_positions: bool,
    has_kept_rows: bool,
    pack: bool,
    beside_transfer: bool,
) -> Launch:
    """The launch of `copy_columns_kernel` for tensors of these sizes.

    ``tokens``, ``batch``, ``strides`` and ``element_size`` are those of cp_rows,
    ``rank_width`` is p. ``has_positions``, ``has_kept_rows``: whether `_launch_copy`
    got these tensors. The others are arguments of `_launch_copy`.
    """
    tile_rows = _rows_per_tile(tokens * batch, element_size, strips)
    tiles = triton.cdiv(tokens * batch, tile_rows) * message_count
    programs = _program_count(tiles, device, beside_transfer)
    # the kernel's loop counts past the last tile, by at most the number of programs
    _require_32_bits(tokens * batch + tile_rows, tiles + programs)
    return Launch(
        copy_columns_kernel,
        (programs,),
        first_rank,
        skipped_rank,
        tokens,
        batch,
        tiles,
        strides.token,
        strides.batch_row,
        STRIPS=strips,
        RANK_WIDTH=rank_width,
        ALIGN=strides.alignment,
        ROWS=tile_rows,
        HAS_POSITIONS=has_positions,
        HAS_KEPT_ROWS=has_kept_rows,
        PACK=pack,
        num_warps=_WARPS,
    )


def pack_peers(
    cp_rows: Tensor,
    messages: Tensor,
    shares: HeadShares,
    rank: int,
    *,
    kept_rows: tuple[Tensor, Tensor] | None = None,
    beside_transfer: bool = False,
) -> None:
    """Copy every peer's columns of ``cp_rows`` to that peer's message.

    With ``kept_rows``, (hp_rows, positions), this rank's columns are also copied to
    ``hp_rows[positions]``. ``beside_transfer``: whether messages travel meanwhile.
    """
    _launch_copy(
        cp_rows,
        messages,
        None,
        strips_of(shares, _LARGEST_BLOCK_WIDTH),
        # the kept rows count as this rank's message
        message_count=shares.rank_count - (kept_rows is None),
        skipped_rank=rank,
        pack=True,
        kept_rows=kept_rows,
        beside_transfer=beside_transfer,
    )


@cache
def _unshared_strips(shares: HeadShares) -> tuple[Strip, ...]:
    """The strips of columns that only one rank holds."""
    return tuple(
        strip for strip in strips_of(shares, _LARGEST_BLOCK_WIDTH) if strip.copies == 1
    )


def copy_kept_rows(
    cp_rows: Tensor,
    hp_rows: Tensor,
    shares: HeadShares,
    rank: int,
    positions: Tensor,
    *,
    to_hp: bool,
) -> None:
    """If ``to_hp``, copy ``rank``'s columns of ``cp_rows`` to ``hp_rows[positions]``,
    else copy back the columns that only ``rank`` holds. :func:`unpack_peers` sums the
    columns that several ranks hold."""
    _launch_copy(
        cp_rows,
        hp_rows,
        positions,
        strips_of(shares, _LARGEST_BLOCK_WIDTH) if to_hp else _unshared_strips(shares),
        message_count=1,
        first_rank=rank,
        pack=to_hp,
        beside_transfer=True,
    )


def unpack_peers(
    messages: Tensor,
    hp_rows: Tensor,
    cp_rows: Tensor,
    shares: HeadShares,
    rank: int,
    positions: Tensor,
    *,
    with_kept_rows: bool = False,
    beside_transfer: bool = False,
) -> None:
    """Write the columns of the peers' ``messages`` to ``cp_rows``; sum columns that
    several ranks hold.

    The sum adds ranks in ascending order, in fp32 (fp64 for fp64), and is rounded once.
    This rank's term comes from ``hp_rows[positions]``. If ``with_kept_rows``, the
    columns that only ``rank`` holds are also copied from ``hp_rows[positions]``.
    """
    _launch_copy(
        cp_rows,
        messages,
        None,
        _unshared_strips(shares),
        # the kept rows count as this rank's message
        message_count=shares.rank_count - (not with_kept_rows),
        skipped_rank=rank,
        pack=False,
        kept_rows=(hp_rows, positions) if with_kept_rows else None,
        beside_transfer=beside_transfer,
    )
    tokens, batch, _ = cp_rows.shape
    launches = _sum_launches(
        tokens,
        batch,
        _strides_of(cp_rows),
        cp_rows.dtype,
        cp_rows.device,
        shares,
        rank,
        hp_rows.shape[-1],
        beside_transfer,
    )
    for launch in launches:
        launch(cp_rows, messages, hp_rows, positions)


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _sum_launches(
    tokens: int,
    batch: int,
    strides: _RowStrides,
    dtype: torch.dtype,
    device: torch.device,
    shares: HeadShares,
    rank: int,
    rank_width: int,
    beside_transfer: bool,
) -> tuple[Launch, ...]:
    """The launches of `sum_copies_kernel`: one for each number c > 1 of ranks that hold
    the same columns of a section.

    ``tokens``, ``batch``, ``strides`` and ``dtype`` are those of cp_rows;
    ``rank_width`` is p. The others are arguments of :func:`unpack_peers`.
    """
    rows = tokens * batch
    launches = []
    for copies in sorted(set(shares.copies) - {1}):
        strips = tuple(
            strip
            for strip in strips_of(shares, _LARGEST_BLOCK_WIDTH)
            if strip.copies == copies
        )
        # Sums are in a wider dtype than rows, so a tile of sums has half as many rows.
        tile_rows = max(1, _rows_per_tile(rows, dtype.itemsize, strips) // 2)
        tiles = triton.cdiv(rows, tile_rows) * (shares.rank_count // copies)
        if tiles:
            programs = _program_count(tiles, device, beside_transfer)
            _require_32_bits(rows + tile_rows, tiles + programs)
            launches.append(
                Launch(
                    sum_copies_kernel,
                    (programs,),
                    rank,
                    tokens,
                    batch,
                    tiles,
                    strides.token,
                    strides.batch_row,
                    STRIPS=strips,
                    RANK_WIDTH=rank_width,
                    ALIGN=strides.alignment,
                    ROWS=tile_rows,
                    COPIES=copies,
                    WIDE=tl.float64 if dtype == torch.float64 else tl.float32,
                    num_warps=_WARPS,
                )
            )
    return tuple(launches)


def move_rows(
    messages: Tensor,
    hp_rows: Tensor,
    peer_positions: Tensor,
    *,
    to_hp: bool,
    beside_transfer: bool = False,
) -> None:
    """If ``to_hp``, copy row t of the joined ``messages`` to row ``peer_positions[t]``
    of ``hp_rows``, else copy it back. ``peer_positions`` has the rows of all peers'
    tokens."""
    rows = messages.flatten(0, 1)
    # all columns of a message are copied, as if a single rank held them
    strips = strips_of(HeadShares.even(1, messages.shape[-1:]), _LARGEST_BLOCK_WIDTH)
    _launch_copy(
        rows,
        hp_rows,
        peer_positions,
        strips,
        message_count=1,
        pack=to_hp,
        beside_transfer=beside_transfer,
    )


@triton.jit
def _row_pointers(cp_ptr, t_R, b_R, stride_s, stride_b, ALIGN: tl.constexpr):
    """Pointers to R rows of cp_rows (tokens ``t_R``, batch rows ``b_R``); strides in
    units of ALIGN elements."""
    offset_R = tl.cast(t_R, tl.int64) * stride_s + tl.cast(b_R, tl.int64) * stride_b
    return cp_ptr + offset_R * ALIGN


@triton.jit
def _copy_strip(
    cp_R,
    message_R,
    mask_R,
    rank,
    STRIPS: tl.constexpr,
    INDEX: tl.constexpr,
    PACK: tl.constexpr,
):
    """If PACK, copy ``rank``'s columns of STRIPS[INDEX] from rows ``cp_R`` to
    ``message_R``, else copy them back.

    ``cp_R``, ``message_R``: pointers to R rows ``[R, 1]``, of which ``mask_R`` exist.
    """
    # the number of the group of ranks that hold the same columns as ``rank``
    rank_group = rank // STRIPS[INDEX][STRIP_COPIES]
    cp_R += (
        STRIPS[INDEX][STRIP_FIRST_COLUMN] + rank_group * STRIPS[INDEX][STRIP_RANK_STEP]
    )
    message_R += STRIPS[INDEX][STRIP_RANK_FIRST_COLUMN]
    BLOCK: tl.constexpr = STRIPS[INDEX][STRIP_BLOCK_WIDTH]
    for repeat in tl.range(0, STRIPS[INDEX][STRIP_BLOCK_COUNT]):
        column_D = repeat * BLOCK + tl.arange(0, BLOCK)[None, :]
        if PACK:
            tl.store(
                message_R + column_D, tl.load(cp_R + column_D, mask=mask_R), mask=mask_R
            )
        else:
            tl.store(
                cp_R + column_D, tl.load(message_R + column_D, mask=mask_R), mask=mask_R
            )


# one variant for all lengths and ranks
@triton.jit(do_not_specialize=["first_rank", "skipped_rank", "tokens", "tiles"])
def copy_columns_kernel(
    cp_ptr,
    message_ptr,
    hp_ptr,
    positions_ptr,
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
    HAS_POSITIONS: tl.constexpr,
    HAS_KEPT_ROWS: tl.constexpr,
    PACK: tl.constexpr,
):
    """Copy the STRIPS of ranks ``first_rank``, ``first_rank + 1``, ... without
    ``skipped_rank``.

    If PACK, columns go from cp_rows to messages of RANK_WIDTH columns at
    ``message_ptr``, else back. A tile has ROWS rows; the programs share the ``tiles``.
    If HAS_POSITIONS, there is one message, and its row ``positions[t]`` holds token t.
    If HAS_KEPT_ROWS, columns of ``skipped_rank`` are copied too: row ``positions[t]``
    of hp_rows holds token t. ``stride_s``, ``stride_b``: of cp_rows, in ALIGN elements.
    """
    rows = tokens * batch
    tiles_per_rank = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        message = tile // tiles_per_rank
        rank = first_rank + message
        if not HAS_KEPT_ROWS:  # the skipped rank has no tiles
            rank += (rank >= skipped_rank).to(tl.int32)
        row_R = tile % tiles_per_rank * ROWS + tl.arange(0, ROWS)
        mask_R = (row_R < rows)[:, None]
        t_R = row_R // batch
        b_R = row_R % batch
        if HAS_POSITIONS:
            position_R = tl.load(positions_ptr + t_R, mask=row_R < rows)
            message_row_R = tl.cast(position_R, tl.int64) * batch + b_R
        else:
            if HAS_KEPT_ROWS:
                # ``message`` counts the skipped rank, but the messages lack it.
                message -= (rank > skipped_rank).to(tl.int32)
            message_row_R = tl.cast(message, tl.int64) * rows + row_R
        cp_R = _row_pointers(cp_ptr, t_R, b_R, stride_s, stride_b, ALIGN)[:, None]
        message_R = message_ptr + message_row_R * RANK_WIDTH
        # Two conditions, not one with ``and``: the first is a constant, so Triton leaves
        # the branch out if it is false. ``rank`` is a value on the GPU.
        if HAS_KEPT_ROWS:  # noqa: SIM102
            if rank == skipped_rank:
                position_R = tl.load(positions_ptr + t_R, mask=row_R < rows)
                message_R = (
                    hp_ptr + (tl.cast(position_R, tl.int64) * batch + b_R) * RANK_WIDTH
                )
        message_R = message_R[:, None]
        for strip in tl.static_range(len(STRIPS)):
            _copy_strip(cp_R, message_R, mask_R, rank, STRIPS, strip, PACK)


@triton.jit
def _sum_strip(
    cp_R,
    message_R,
    hp_R,
    mask_R,
    rank_group,
    own_rank,
    message_size,
    STRIPS: tl.constexpr,
    INDEX: tl.constexpr,
    COPIES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Write to ``cp_R`` the sum of STRIPS[INDEX] over the COPIES ranks of
    ``rank_group``, which hold the same columns.

    ``cp_R``, ``hp_R`` and ``message_R`` are pointers to R rows ``[R, 1]``, of which
    ``mask_R`` exist. ``hp_R`` has ``own_rank``'s term, ``message_R`` points into the
    first message; a message has ``message_size`` elements. The sum is in dtype WIDE.
    """
    cp_R += (
        STRIPS[INDEX][STRIP_FIRST_COLUMN] + rank_group * STRIPS[INDEX][STRIP_RANK_STEP]
    )
    message_R += STRIPS[INDEX][STRIP_RANK_FIRST_COLUMN]
    hp_R += STRIPS[INDEX][STRIP_RANK_FIRST_COLUMN]
    BLOCK: tl.constexpr = STRIPS[INDEX][STRIP_BLOCK_WIDTH]
    for repeat in tl.range(0, STRIPS[INDEX][STRIP_BLOCK_COUNT]):
        column_D = repeat * BLOCK + tl.arange(0, BLOCK)[None, :]
        total_RD = tl.zeros((mask_R.shape[0], BLOCK), WIDE)
        for copy in tl.static_range(COPIES):
            rank = rank_group * COPIES + copy
            if rank == own_rank:
                x_RD = tl.load(hp_R + column_D, mask=mask_R)
            else:
                offset = (rank - (rank > own_rank).to(tl.int32)) * message_size
                x_RD = tl.load(message_R + offset + column_D, mask=mask_R)
            total_RD += x_RD.to(WIDE)
        tl.store(cp_R + column_D, total_RD.to(cp_R.dtype.element_ty), mask=mask_R)


# one variant for all lengths and ranks
@triton.jit(do_not_specialize=["own_rank", "tokens", "tiles"])
def sum_copies_kernel(
    cp_ptr,
    message_ptr,
    hp_ptr,
    positions_ptr,
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
    """Sum every strip over the COPIES successive ranks that hold it, in rank order and
    dtype WIDE.

    A peer's rows are in the peer's message. Token t of this rank (``own_rank``) is row
    ``positions[t]`` of hp_rows. Programs share the ``tiles`` of all groups of ranks.
    ``stride_s``, ``stride_b``: of cp_rows, to which sums go, in ALIGN elements.
    """
    rows = tokens * batch
    tiles_per_group = tl.cdiv(rows, ROWS)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0)):
        rank_group = tile // tiles_per_group
        row_R = tile % tiles_per_group * ROWS + tl.arange(0, ROWS)
        mask_R = (row_R < rows)[:, None]
        t_R = row_R // batch
        b_R = row_R % batch
        position_R = tl.load(positions_ptr + t_R, mask=row_R < rows)
        hp_R = (hp_ptr + (tl.cast(position_R, tl.int64) * batch + b_R) * RANK_WIDTH)[
            :, None
        ]
        cp_R = _row_pointers(cp_ptr, t_R, b_R, stride_s, stride_b, ALIGN)[:, None]
        message_R = (message_ptr + tl.cast(row_R, tl.int64) * RANK_WIDTH)[:, None]
        for strip in tl.static_range(len(STRIPS)):
            _sum_strip(
                cp_R,
                message_R,
                hp_R,
                mask_R,
                rank_group,
                own_rank,
                tl.cast(rows, tl.int64) * RANK_WIDTH,
                STRIPS,
                strip,
                COPIES,
                WIDE,
            )

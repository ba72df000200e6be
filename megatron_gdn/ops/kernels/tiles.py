"""Tile shapes of the kernels, chosen by the shapes of tensors and never by a timing.

Tiles decide the order of sums. Tiles chosen by a timing could differ between runs or
ranks, and so could the bits of results.

A segment is here ``steps`` successive tokens of a front's tile (:class:`FrontTile`).
It is not a segment of a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_PROGRAMS = 65535  # the largest size of the second and the third axis of a grid
_FEWEST_STEPS = 8  # fewest tokens of a segment; a convolution has at most 8 taps
# the value of conv_forward.UNROLL; that file cannot be imported without Triton
_STEPS_OF_A_STAGE = 4
# The most bytes of shared memory for a program's prefetched rows. Two such programs fit
# on a multiprocessor of Hopper, one fits on a multiprocessor of a small GPU. A launch
# fails if a program asks for more shared memory than the GPU has.
_MOST_PREFETCHED_BYTES = 96 << 10


class FrontTile(NamedTuple):
    """The tile of a front's program: ``rows`` segments of ``steps`` tokens, computed
    side by side."""

    rows: int
    steps: int  # a multiple of 4
    warps: int
    # registers per thread; None leaves the number to the compiler
    registers: int | None = None
    stages: int = 3  # stages of prefetched loads; a stage loads four steps

    @property
    def tokens(self) -> int:
        return self.rows * self.steps


class RowTile(NamedTuple):
    """The tile of a readout's program: ``repeats * rows`` rows, of which ``rows`` are
    computed at a time."""

    rows: int
    repeats: int
    warps: int


def block_dim(dim: int) -> int:
    """``dim`` rounded up to a power of two, at least 16, as Triton's tiles require."""
    return max(16, 1 << (dim - 1).bit_length())


def front_forward_tile(tokens: int, widest_head: int) -> FrontTile:
    """The tile of the front's forward; ``widest_head`` is the number of columns of the
    widest head.

    ``tokens``: S times B. If there are few tokens, short segments give a GPU more
    programs. A thread computes four channels with few registers, so nine programs share
    a multiprocessor.
    """
    return FrontTile(
        _segments_per_program(widest_head), steps=32 if tokens >= 4096 else 8, warps=4
    )


def front_backward_tile(
    tokens: int, widest_head: int, has_history: bool = False
) -> FrontTile:
    """The tile of the front's backward, where a thread needs some twenty registers per
    channel. ``tokens``: S times B. ``widest_head``: the columns of the widest head.

    With at most 96 registers per thread, five programs of four warps fit on a
    multiprocessor; with 128, four fit. Code for a history (``has_history``) needs 128:
    with 96, each thread would store 55 numbers to memory and load 62, for every four
    tokens. Long segments compute fewer tokens twice; short segments give a GPU more
    programs.
    """
    if tokens >= 32768:
        steps = 128
    elif tokens >= 8192:
        steps = 64
    elif tokens >= 2048:
        steps = 32
    else:
        steps = 16
    registers = 128 if has_history else 96
    return FrontTile(
        _segments_per_program(widest_head), steps, warps=4, registers=registers
    )


def _segments_per_program(widest_head: int) -> int:
    """Segments per program, so that each thread of four warps computes four
    channels."""
    return max(1, 512 // block_dim(widest_head))


def tile_of_32_bit_offsets(
    tile: FrontTile, tokens: int, taps: int, strides: Sequence[int]
) -> FrontTile:
    """``tile``, with fewer tokens if offsets from its first token would not fit into 32
    bits.

    A program also reads ``taps - 1`` tokens on either side of its tile, within the
    ``tokens`` of a batch row. ``strides`` has, for each tensor, the number of elements
    from one token to the next. A stride of more than 32 bits is skipped, since Triton
    computes its offsets with 64 bits.

    Raises:
        ValueError: the offsets of the smallest tile do not fit.
    """
    stride = max((x for x in strides if x < 2**31), default=0)

    def fits(tile: FrontTile) -> bool:
        """Whether 32 bits hold the offsets inside ``tile``."""
        return (min(tile.tokens + taps - 1, tokens) - 1) * stride < 2**31

    while not fits(tile) and tile.steps > _FEWEST_STEPS:
        tile = tile._replace(steps=tile.steps // 2)
    while not fits(tile) and tile.rows > 1:
        tile = tile._replace(rows=tile.rows // 2)
    if not fits(tile):
        raise ValueError(
            f"tokens lie {stride} elements apart. The Triton kernels address "
            f"{tile.tokens} tokens and {taps} taps with offsets of 32 bits, so tokens "
            f"may lie at most {(2**31 - 1) // (tile.tokens + taps - 2)} elements "
            "apart. Use a smaller batch, or kernels='torch'."
        )
    return tile


def within_grid(tile: FrontTile, tokens: int, batch: int) -> FrontTile:
    """``tile``, with more steps if a batch row would have more tiles than a grid's axis
    takes. Raises a ValueError if the batch has too many rows."""
    require_rows_within_grid(batch)
    while -(-tokens // tile.tokens) > MOST_PROGRAMS:
        tile = tile._replace(steps=2 * tile.steps)
    return tile


def require_rows_within_grid(batch: int) -> None:
    """Raise a ValueError if a grid's second or third axis cannot count ``batch``
    rows."""
    if batch > MOST_PROGRAMS:
        raise ValueError(
            f"the batch has {batch} rows, but the Triton kernels take at most "
            f"{MOST_PROGRAMS}. Use a smaller batch, or lay the rows end to end as "
            "packed documents."
        )


def require_32_bits(what: str, number: int) -> None:
    """Raise a ValueError if ``number`` does not fit into the 32 bits that a kernel has
    for it."""
    if number >= 2**31:
        raise ValueError(
            f"{what} is {number}, which the Triton kernels count with 32 bits: at most "
            f"{2**31 - 1}. Use a smaller batch, fewer tokens, or kernels='torch'."
        )


def rows_need_64_bits(
    tile_rows: int, rows: int, heads: int, strides: Sequence[int], row_stride: int
) -> bool:
    """Whether offsets inside a readout's tile of ``tile_rows`` rows need 64 bits.

    Row ``s * heads + h`` is head h of token s; there are ``rows`` rows. ``strides``
    has, for each tensor of projection rows, the number of elements from token to token.
    ``row_stride`` is the number of elements from row to row of the rule's output. A
    stride of more than 32 bits is skipped, since its offsets are computed with 64 bits.
    """
    stride = max((x for x in strides if x < 2**31), default=0)
    # counted from the tile's first token
    last_token = (min(tile_rows, rows) + heads - 2) // heads
    last_token = min(last_token, max(rows // heads - 1, 0))
    in_projection_rows = last_token * stride + heads * row_stride
    in_output = min(tile_rows, rows) * row_stride
    return max(in_projection_rows, in_output, rows + tile_rows) >= 2**31


def within_shared_memory(tile: FrontTile, row_bytes: int) -> FrontTile:
    """``tile``, with fewer stages if the prefetched rows would not fit into shared
    memory.

    Triton keeps the loads of ``tile.stages - 1`` stages in shared memory. A segment
    prefetches ``row_bytes`` per token. For example, the backward of a key head with 32
    value heads in bf16 would need 264 KiB with all stages. Results do not depend on the
    stages.
    """
    stage_bytes = _STEPS_OF_A_STAGE * tile.rows * row_bytes
    most_stages = 1 + _MOST_PREFETCHED_BYTES // stage_bytes
    return tile._replace(stages=max(1, min(tile.stages, most_stages)))


def norm_forward_tile(width: int) -> RowTile:
    """The tile of a norm's forward; a row of ``width`` columns is one head or group of
    heads. A tile has 4096 elements; if a row has more, a tile is one row."""
    block = block_dim(width)
    return RowTile(rows=max(1, 4096 // block), repeats=1, warps=_norm_warps(block))


def norm_backward_tile(rows: int, width: int) -> RowTile:
    """The tile of a norm's backward for ``rows`` rows of ``width`` columns.

    All repeats of a program add to one row of partial d_gamma, so more repeats make
    fewer partial rows. If there are few rows, fewer repeats give a GPU more programs.
    """
    block = block_dim(width)
    size = max(1, 2048 // block)
    repeats = max(8 if rows >= 1 << 17 else 4, 16 // size)
    return RowTile(size, repeats, warps=_norm_warps(block))


def _norm_warps(block: int) -> int:
    """The number of warps for tiles of ``block`` columns; wide rows need many
    registers."""
    return min(16, max(4, block // 512))

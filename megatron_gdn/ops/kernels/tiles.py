"""Tile shapes of the kernels: a fixed table keyed by shape, never by a timing.

A timed choice, and with it the order of every sum, may differ between two runs or two ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MOST_PROGRAMS = 65535  # of the second and the third axis of a grid
_FEWEST_STEPS = 8  # a segment is no shorter than the halo of 8 taps
_STEPS_OF_A_STAGE = 4  # as conv_forward.UNROLL, which cannot be imported without Triton
# Bytes of shared memory for copies ahead: two programs of a Hopper multiprocessor have that much
# each, and one program of a small GPU. A launch that asks for more than there is fails.
_MOST_COPIED = 96 << 10


class Walk(NamedTuple):
    """A program walks ``steps`` tokens, a multiple of four, along each of ``rows`` segments."""

    rows: int
    steps: int
    warps: int
    registers: int | None = None  # per thread; None leaves the number to the compiler
    stages: int = 3  # of the pipeline of loads; each holds the loads of four steps

    @property
    def tokens(self) -> int:
        return self.rows * self.steps


class Block(NamedTuple):
    """A program handles ``rows`` rows at a time, ``repeats`` times over."""

    rows: int
    repeats: int
    warps: int


def block_dim(dim: int) -> int:
    """The next power of two: a Triton tile spans no other sizes."""
    return max(16, 1 << (dim - 1).bit_length())


def front_forward_tile(tokens: int, widest_head: int) -> Walk:
    """Four values per thread, so that nine programs of four warps share a multiprocessor."""
    return Walk(_rows_of(widest_head), steps=32 if tokens >= 4096 else 8, warps=4)


def front_backward_tile(tokens: int, widest_head: int) -> Walk:
    """Four values per thread: the walk keeps some twenty registers for each.

    With 96 registers five programs of four warps share a multiprocessor, not four. Long walks
    compute less of the halo twice; short ones make enough programs to fill the chip.
    """
    steps = 128 if tokens >= 32768 else 64 if tokens >= 8192 else 32 if tokens >= 2048 else 16
    return Walk(_rows_of(widest_head), steps, warps=4, registers=96)


def _rows_of(widest_head: int) -> int:
    return max(1, 512 // block_dim(widest_head))


def within_reach(tile: Walk, tokens: int, taps: int, strides: Sequence[int]) -> Walk:
    """``tile``, or one of fewer tokens if offsets from its first token would not fit 32 bits.

    A tile also touches ``taps`` - 1 tokens on either side, up to ``tokens``. ``strides`` are
    elements between tokens in every tensor; a stride of 64 bits is left out, since its offsets have
    64 bits.

    Raises:
        ValueError: the smallest tile is still too large.
    """
    stride = max((x for x in strides if x < 2**31), default=0)

    def fits(tile: Walk) -> bool:
        return (min(tile.tokens + taps - 1, tokens) - 1) * stride < 2**31

    while not fits(tile) and tile.steps > _FEWEST_STEPS:
        tile = tile._replace(steps=tile.steps // 2)
    while not fits(tile) and tile.rows > 1:
        tile = tile._replace(rows=tile.rows // 2)
    if not fits(tile):
        raise ValueError(
            f"tokens lie {stride} elements apart, and the Triton kernels reach {taps} taps beyond "
            f"{tile.tokens} tokens with offsets of 32 bits: at most "
            f"{(2**31 - 1) // (tile.tokens + taps - 2)} elements. Use a smaller batch, or "
            f"kernels='torch'."
        )
    return tile


def within_grid(tile: Walk, tokens: int, batch: int) -> Walk:
    """``tile``, or a longer one if a row would have more tiles than a grid takes.

    Raises:
        ValueError: more than 65535 rows.
    """
    if batch > MOST_PROGRAMS:
        raise ValueError(
            f"a batch of {batch} rows, where the Triton kernels take at most {MOST_PROGRAMS}. Use "
            f"a smaller batch, or lay the rows end to end as packed documents."
        )
    while -(-tokens // tile.tokens) > MOST_PROGRAMS:
        tile = tile._replace(steps=2 * tile.steps)
    return tile


def within_shared_memory(tile: Walk, row_bytes: int) -> Walk:
    """``tile``, or one of fewer stages where their copies would not fit into shared memory.

    A segment copies ``row_bytes`` for one token: 264 KiB in the backward of a key head with 32
    value heads in bf16. Stages change no result.
    """
    copied = _STEPS_OF_A_STAGE * tile.rows * row_bytes
    return tile._replace(stages=max(1, min(tile.stages, 1 + _MOST_COPIED // copied)))


def norm_forward_tile(value_dim: int) -> Block:
    return Block(rows=max(1, 4096 // block_dim(value_dim)), repeats=1, warps=4)


def norm_backward_tile(rows: int, value_dim: int) -> Block:
    """Each program leaves one partial row of d_gamma; it repeats, so that there are few rows."""
    size = max(1, 2048 // block_dim(value_dim))
    return Block(rows=size, repeats=8 if rows >= 1 << 17 else 4, warps=4)

"""Tile shapes of the kernels: a fixed table keyed by shape, never by a timing.

A timed choice may differ between two runs or two ranks and with it the order of every sum. These
depend on the number of tokens and the head dim alone, so the same shapes give the same bits.
"""

from __future__ import annotations

from typing import NamedTuple


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
    """The next power of two, which is what a Triton tile can span."""
    return max(16, 1 << (dim - 1).bit_length())


def prepare_forward_tile(tokens: int, widest_head: int) -> Walk:
    """Four values per thread, so that nine programs of four warps share a multiprocessor."""
    warps = 4
    rows = max(1, warps * 128 // block_dim(widest_head))
    return Walk(rows, steps=32 if tokens >= 4096 else 8, warps=warps)


def prepare_backward_tile(tokens: int, widest_head: int) -> Walk:
    """Four values per thread: the walk keeps some twenty registers for each.

    96 registers let five programs of four warps share a multiprocessor instead of four. Long walks
    repeat less of the halo, short ones make enough programs to fill the chip.
    """
    warps = 4
    rows = max(1, warps * 128 // block_dim(widest_head))
    steps = 128 if tokens >= 32768 else 64 if tokens >= 8192 else 32 if tokens >= 2048 else 16
    return Walk(rows, steps, warps, registers=96)


def norm_forward_tile(value_dim: int) -> Block:
    return Block(rows=max(1, 4096 // block_dim(value_dim)), repeats=1, warps=4)


def norm_backward_tile(rows: int, value_dim: int) -> Block:
    """Each program leaves one partial row of d_gamma, so it repeats to keep those few."""
    size = max(1, 2048 // block_dim(value_dim))
    return Block(rows=size, repeats=8 if rows >= 1 << 17 else 4, warps=4)

"""How the columns of a row are split over ranks, as plain numbers for the kernels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import gcd
from typing import NamedTuple


class ColumnBlock(NamedTuple):
    """Columns of one section on one rank; ``copies`` ranks hold the same columns."""

    whole: int  # where they start in the whole row
    own: int  # and in the rank's row
    width: int
    copies: int
    columns: slice  # of the whole row
    own_columns: slice


class HeadShares(NamedTuple):
    """Sections of a row, each cut into equal blocks of whole heads.

    A section of ``c`` copies is cut into ``ranks / c`` blocks, and rank r holds block ``r // c``. A
    rank's row is its blocks, in the order of the sections.
    """

    ranks: int
    sections: tuple[int, ...]  # widths in the whole row
    copies: tuple[int, ...]

    @classmethod
    def even(cls, ranks: int, sections: Sequence[int]) -> HeadShares:
        """Shares in which one rank alone holds each column."""
        return cls(ranks, tuple(sections), (1,) * len(sections))

    @property
    def widths(self) -> tuple[int, ...]:
        return tuple(w * c // self.ranks for w, c in zip(self.sections, self.copies, strict=True))

    @property
    def whole_width(self) -> int:
        return sum(self.sections)

    @property
    def rank_width(self) -> int:
        return sum(self.widths)

    def blocks(self, rank: int) -> tuple[ColumnBlock, ...]:
        return _blocks(self, rank)

    def peers(self, rank: int) -> list[int]:
        return [other for other in range(self.ranks) if other != rank]


@lru_cache(maxsize=1024)
def _blocks(shares: HeadShares, rank: int) -> tuple[ColumnBlock, ...]:
    blocks, whole, own = [], 0, 0
    for section, width, copies in zip(shares.sections, shares.widths, shares.copies, strict=True):
        first = whole + rank // copies * width
        columns, own_columns = slice(first, first + width), slice(own, own + width)
        blocks.append(ColumnBlock(first, own, width, copies, columns, own_columns))
        whole, own = whole + section, own + width
    return tuple(blocks)


class Strip(NamedTuple):
    """``repeats`` neighbouring blocks of columns, each a power of two wide.

    The first column is ``whole + (rank // copies) * step`` of the whole row, ``own`` of a rank's
    row.
    """

    whole: int
    own: int
    step: int
    copies: int
    block: int
    repeats: int


@lru_cache(maxsize=64)
def strips(shares: HeadShares, most: int) -> tuple[Strip, ...]:
    """A rank's columns in blocks of at most ``most`` columns, so that kernels need no masks."""
    cut = []
    for whole, own, width, copies, *_ in shares.blocks(0):
        done, block = 0, most
        while done < width:
            while block > width - done:
                block //= 2
            repeats = (width - done) // block
            cut.append(Strip(whole + done, own + done, width, copies, block, repeats))
            done += repeats * block
    return tuple(cut)


def alignment(*strides: int) -> int:
    """The largest power of two, at most 16, that divides every stride."""
    return gcd(16, *strides)

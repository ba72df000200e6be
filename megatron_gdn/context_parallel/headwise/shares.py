"""How a head exchange splits columns and tokens over ranks: tables, no communication here.

Columns are plain numbers for the kernels. Tables of tokens are built once per micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ..layouts import SequenceLayout, positions_of


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


class Fragment(NamedTuple):
    """Tokens that lie side by side both in a rank's order (in the wave) and in the sequence."""

    locally: slice
    in_sequence: slice


@dataclass(frozen=True, eq=False)
class Wave:
    """The same stretch of every rank's tokens, which travels at one time."""

    tokens: slice  # size of them
    own_place: Tensor  # int32 [size], sequence positions of this rank's tokens
    peer_place: Tensor  # int32 [(R - 1) * size], those of all peers' tokens, end to end
    # int64 [R, size] on the CPU, positions of every rank's tokens; None if only the device knows
    # them, and the wave then travels as one message per peer.
    positions: Tensor | None

    @cached_property
    def size(self) -> int:
        return self.tokens.stop - self.tokens.start

    @cached_property
    def mean_fragment(self) -> float:
        """Tokens per fragment on the rank with the highest mean: the same on every rank."""
        if self.positions is None:
            return 0.0
        breaks = (self.positions.diff(dim=1) != 1).sum(dim=1)
        return self.size / (1 + int(breaks.max()))

    @cached_property
    def fragments(self) -> tuple[tuple[Fragment, ...], ...]:
        """Every rank's fragments, as few as possible."""
        assert self.positions is not None
        return tuple(fragments_of(positions_s) for positions_s in self.positions)


def fragments_of(positions_s: Tensor) -> tuple[Fragment, ...]:
    """The runs of consecutive values of an index on the host."""
    if not positions_s.numel():
        return ()
    bounds = [0, *((positions_s.diff() != 1).nonzero().flatten() + 1).tolist(), len(positions_s)]
    firsts = positions_s[bounds[:-1]].tolist()
    return tuple(
        Fragment(slice(a, b), slice(first, first + b - a))
        for (a, b), first in zip(pairwise(bounds), firsts, strict=True)
    )


def route(
    cut: Documents, cp_size: int, cp_rank: int, layout: SequenceLayout, waves: int = 1
) -> tuple[Wave, ...]:
    """How rank ``cp_rank`` exchanges the tokens of a cut, in about equal waves."""
    key = (Wave, cp_size, cp_rank, layout, waves)
    return cut.plan(key, lambda: _route(key, cut, cp_size, cp_rank, layout, waves))


def _route(
    key: tuple, cut: Documents, cp_size: int, cp_rank: int, layout: SequenceLayout, waves: int
) -> tuple[Wave, ...]:
    stretches = _stretches(cut.total_tokens // cp_size, waves)
    table_Rs = positions_of(cut, cp_size, layout)

    def places(these: Documents) -> tuple[Tensor, ...]:
        table_Rs = positions_of(these, cp_size, layout)
        return tuple(chain(*(_places(table_Rs, cp_rank, tokens) for tokens in stretches)))

    made = cut.table(("places", *key), places)
    return tuple(
        Wave(tokens, own, others, table_Rs[:, tokens] if cut.known else None)
        for tokens, own, others in zip(stretches, made[::2], made[1::2], strict=True)
    )


def _stretches(tokens: int, waves: int) -> list[slice]:
    """Which of a rank's tokens travel in each wave; no wave is empty."""
    bounds = [tokens * wave // waves for wave in range(waves + 1)]
    return [slice(a, b) for a, b in pairwise(bounds) if a < b]


def _places(positions_Rs: Tensor, cp_rank: int, tokens: slice) -> tuple[Tensor, Tensor]:
    place_Rs = positions_Rs[:, tokens].to(torch.int32)
    others = torch.cat([place_Rs[:cp_rank], place_Rs[cp_rank + 1 :]])
    return place_Rs[cp_rank].contiguous(), others.flatten()

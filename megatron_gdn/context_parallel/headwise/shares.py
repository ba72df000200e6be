"""Tables of the columns and tokens that ranks exchange in a head exchange."""

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
    """The columns of one section that a rank holds; ``copies`` ranks hold the same
    columns."""

    whole: int  # the first column in the whole row
    own: int  # the first column in the rank's row
    width: int
    copies: int
    columns: slice  # of the whole row
    own_columns: slice  # of the rank's row


class HeadShares(NamedTuple):
    """Sections of a row, each cut into equal blocks of whole heads.

    If c ranks hold each column of a section, the section is cut into ``ranks / c``
    blocks, and rank r holds block ``r // c``. A rank's row has the rank's blocks in the
    order of the sections.
    """

    ranks: int
    sections: tuple[int, ...]  # widths in the whole row
    copies: tuple[int, ...]

    @classmethod
    def even(cls, ranks: int, sections: Sequence[int]) -> HeadShares:
        """Shares in which every column belongs to one rank."""
        return cls(ranks, tuple(sections), (1,) * len(sections))

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of each section in one rank's row."""
        return tuple(
            w * c // self.ranks for w, c in zip(self.sections, self.copies, strict=True)
        )

    @property
    def whole_width(self) -> int:
        """The number of columns of a whole row."""
        return sum(self.sections)

    @property
    def rank_width(self) -> int:
        return sum(self.widths)

    def blocks(self, rank: int) -> tuple[ColumnBlock, ...]:
        """The blocks that ``rank`` holds, one for each section."""
        return _blocks(self, rank)

    def peers(self, rank: int) -> list[int]:
        """All ranks but ``rank``."""
        return [other for other in range(self.ranks) if other != rank]


@lru_cache(maxsize=1024)
def _blocks(shares: HeadShares, rank: int) -> tuple[ColumnBlock, ...]:
    """Compute :meth:`HeadShares.blocks`, once for each ``rank``."""
    blocks = []
    whole = 0
    own = 0
    for section, width, copies in zip(
        shares.sections, shares.widths, shares.copies, strict=True
    ):
        first = whole + rank // copies * width
        columns = slice(first, first + width)
        own_columns = slice(own, own + width)
        blocks.append(ColumnBlock(first, own, width, copies, columns, own_columns))
        whole = whole + section
        own = own + width
    return tuple(blocks)


class Strip(NamedTuple):
    """``repeats`` adjacent blocks of columns; each has ``block`` columns, a power of
    two.

    The first column is ``whole + (rank // copies) * step`` in a whole row, ``own`` in a
    rank's row.
    """

    whole: int
    own: int
    step: int
    copies: int
    block: int
    repeats: int


@lru_cache(maxsize=64)
def strips(shares: HeadShares, largest_block: int) -> tuple[Strip, ...]:
    """A rank's columns as strips; a strip is a run of equal blocks, of at most
    ``largest_block`` columns each."""
    # Blocks are powers of two and cover the columns exactly, so kernels mask no
    # columns.
    cut = []
    for section in shares.blocks(0):
        width = section.width
        done = 0
        block = largest_block
        while done < width:
            while block > width - done:
                block //= 2
            repeats = (width - done) // block
            cut.append(
                Strip(
                    section.whole + done,
                    section.own + done,
                    width,
                    section.copies,
                    block,
                    repeats,
                )
            )
            done += repeats * block
    return tuple(cut)


def alignment(*strides: int) -> int:
    """The largest power of two, at most 16, that divides every stride."""
    return gcd(16, *strides)


class Fragment(NamedTuple):
    """Tokens that lie side by side both in a rank's wave and in the sequence."""

    locally: slice
    in_sequence: slice


@dataclass(frozen=True, eq=False)
class Wave:
    """The tokens that ranks exchange at one time: the same slice of each rank's
    tokens."""

    tokens: slice
    own_place: Tensor  # int32 [size], sequence positions of this rank's tokens
    # int32 [(R - 1) * size], sequence positions of all peers' tokens
    peer_place: Tensor
    # int64 [R, size] on the CPU, sequence positions of every rank's tokens. If only the
    # device knows positions, this is None and the wave travels in one message per peer.
    positions: Tensor | None

    @cached_property
    def size(self) -> int:
        return self.tokens.stop - self.tokens.start

    @cached_property
    def mean_fragment(self) -> float:
        """Mean tokens per fragment on the rank with the most fragments; equal on all
        ranks."""
        if self.positions is None:
            return 0.0
        breaks = (self.positions.diff(dim=1) != 1).sum(dim=1)
        return self.size / (1 + int(breaks.max()))

    @cached_property
    def fragments(self) -> tuple[tuple[Fragment, ...], ...]:
        """Every rank's fragments of this wave."""
        assert self.positions is not None
        return tuple(fragments_of(positions_s) for positions_s in self.positions)


def fragments_of(positions_s: Tensor) -> tuple[Fragment, ...]:
    """The fragments in ``positions_s``, a CPU tensor: its runs of consecutive
    positions."""
    if not positions_s.numel():
        return ()
    bounds = [
        0,
        *((positions_s.diff() != 1).nonzero().flatten() + 1).tolist(),
        len(positions_s),
    ]
    firsts = positions_s[bounds[:-1]].tolist()
    return tuple(
        Fragment(slice(a, b), slice(first, first + b - a))
        for (a, b), first in zip(pairwise(bounds), firsts, strict=True)
    )


def waves_of(
    cut: Documents, cp_size: int, cp_rank: int, layout: SequenceLayout, waves: int = 1
) -> tuple[Wave, ...]:
    """Cut rank ``cp_rank``'s exchange of ``cut`` into ``waves`` waves of about equal
    size."""
    return cut.keep(_make_waves, cp_size, cp_rank, layout, waves)


def _make_waves(
    cut: Documents, cp_size: int, cp_rank: int, layout: SequenceLayout, waves: int
) -> tuple[Wave, ...]:
    table_Rs = positions_of(cut, cp_size, layout)
    slices = _tokens_of_waves(cut.total_tokens // cp_size, waves)
    places = cut.keep_tensors(_places_of_waves, cp_size, cp_rank, layout, waves)
    return tuple(
        Wave(
            tokens,
            own_place,
            peer_place,
            table_Rs[:, tokens] if cut.known_on_host else None,
        )
        for tokens, own_place, peer_place in zip(
            slices, places[::2], places[1::2], strict=True
        )
    )


def _tokens_of_waves(tokens: int, waves: int) -> list[slice]:
    """The tokens of each wave; no wave is empty."""
    bounds = [tokens * wave // waves for wave in range(waves + 1)]
    return [slice(a, b) for a, b in pairwise(bounds) if a < b]


def _places_of_waves(
    cut: Documents, cp_size: int, cp_rank: int, layout: SequenceLayout, waves: int
) -> tuple[Tensor, ...]:
    """For each wave, the positions in ``cut`` of this rank's and its peers' tokens."""
    table_Rs = positions_of(cut, cp_size, layout)
    slices = _tokens_of_waves(cut.total_tokens // cp_size, waves)
    return tuple(
        chain(*(_split_places(table_Rs, cp_rank, tokens) for tokens in slices))
    )


def _split_places(
    positions_Rs: Tensor, cp_rank: int, tokens: slice
) -> tuple[Tensor, Tensor]:
    """From columns ``tokens`` of ``positions_Rs`` return row ``cp_rank``, then all
    other rows."""
    place_Rs = positions_Rs[:, tokens].to(torch.int32)
    peers = torch.cat([place_Rs[:cp_rank], place_Rs[cp_rank + 1 :]])
    return place_Rs[cp_rank].contiguous(), peers.flatten()

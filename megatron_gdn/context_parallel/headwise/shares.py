"""Tables of the columns and tokens that ranks exchange in a head exchange.

A *whole row* has the columns of all heads, a *rank's row* the columns of one rank's
heads.

Legend: R ranks, s tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ..layouts import SequenceLayout, positions_of


class ColumnBlock(NamedTuple):
    """The columns of one section that a rank holds; ``copies`` ranks hold the same
    columns."""

    first_column: int  # in the whole row
    rank_first_column: int  # in the rank's row
    width: int
    copies: int
    columns: slice  # of the whole row
    rank_columns: slice  # of the rank's row


class HeadShares(NamedTuple):
    """How ranks share the columns of a row: each section is cut into equal blocks of
    whole heads.

    If c ranks hold each column of a section, the section is cut into ``rank_count / c``
    blocks, and rank r holds block ``r // c``. A rank's row has the rank's blocks in the
    order of the sections.
    """

    rank_count: int
    sections: tuple[int, ...]  # the width of each section in the whole row
    copies: tuple[int, ...]  # how many ranks hold each column of the section

    @classmethod
    def even(cls, rank_count: int, sections: Sequence[int]) -> HeadShares:
        """Shares in which every column belongs to one rank."""
        return cls(rank_count, tuple(sections), (1,) * len(sections))

    @property
    def rank_widths(self) -> tuple[int, ...]:
        """The width of each section in one rank's row. ``copies`` ranks hold each
        column of a section; blocks are whole heads, so the division is exact."""
        return tuple(
            w * c // self.rank_count
            for w, c in zip(self.sections, self.copies, strict=True)
        )

    @property
    def width(self) -> int:
        """The number of columns of a whole row."""
        return sum(self.sections)

    @property
    def rank_width(self) -> int:
        """The number of columns of one rank's row."""
        return sum(self.rank_widths)

    def blocks(self, rank: int) -> tuple[ColumnBlock, ...]:
        """The blocks that ``rank`` holds, one for each section."""
        return _blocks(self, rank)

    def peers(self, rank: int) -> list[int]:
        """All ranks but ``rank``."""
        return [other for other in range(self.rank_count) if other != rank]


@lru_cache(maxsize=1024)
def _blocks(shares: HeadShares, rank: int) -> tuple[ColumnBlock, ...]:
    """Compute :meth:`HeadShares.blocks`; cached, since each exchange needs them."""
    blocks = []
    section_first = 0
    rank_first = 0
    for section, width, copies in zip(
        shares.sections, shares.rank_widths, shares.copies, strict=True
    ):
        first = section_first + rank // copies * width
        block = ColumnBlock(
            first_column=first,
            rank_first_column=rank_first,
            width=width,
            copies=copies,
            columns=slice(first, first + width),
            rank_columns=slice(rank_first, rank_first + width),
        )
        blocks.append(block)
        section_first = section_first + section
        rank_first = rank_first + width
    return tuple(blocks)


class Strip(NamedTuple):
    """Adjacent columns of one section: ``block_count`` blocks of ``block_width``
    columns. Ranks' strips differ only in their first column in a whole row.

    ``block_width``, the number of columns that a kernel copies at a time, is a power of
    two. The first column of ``rank`` in a whole row is
    ``first_column + (rank // copies) * rank_step``. In the rank's row it is
    ``rank_first_column``.
    """

    first_column: int
    rank_first_column: int
    rank_step: int
    copies: int  # the number of ranks that hold these columns
    block_width: int
    block_count: int


@lru_cache(maxsize=64)
def strips_of(shares: HeadShares, largest_block: int) -> tuple[Strip, ...]:
    """The strips that cover a rank's columns, with blocks of at most ``largest_block``
    columns."""
    # Block widths are powers of two and cover the columns exactly, so kernels mask no
    # columns. Rank 0's strips describe all ranks' strips, since a `Strip` has the step
    # from rank to rank.
    strips = []
    for section in shares.blocks(0):
        width = section.width
        covered = 0  # columns of the section that strips cover already
        block_width = largest_block
        while covered < width:
            while block_width > width - covered:
                block_width //= 2
            block_count = (width - covered) // block_width
            strip = Strip(
                first_column=section.first_column + covered,
                rank_first_column=section.rank_first_column + covered,
                rank_step=width,
                copies=section.copies,
                block_width=block_width,
                block_count=block_count,
            )
            strips.append(strip)
            covered += block_count * block_width
    return tuple(strips)


def alignment(*strides: int) -> int:
    """The largest power of two, at most 16, that divides every stride."""
    return gcd(16, *strides)


class WaveFragment(NamedTuple):
    """The part of a fragment in one wave: its tokens are neighbours in a rank's wave
    and in the sequence.

    Two neighbouring fragments of a rank count as one.
    """

    wave_slice: slice
    sequence_slice: slice


@dataclass(frozen=True, eq=False)
class Wave:
    """The tokens that ranks exchange at one time: the same slice of each rank's
    tokens."""

    tokens: slice
    own_positions: Tensor  # int32 [size], sequence positions of this rank's tokens
    # int32 [(R - 1) * size], sequence positions of all peers' tokens
    peer_positions: Tensor
    # int64 [R, size] on the CPU, sequence positions of every rank's tokens. If only the
    # device knows positions, this is None and the wave travels in one message per peer.
    positions: Tensor | None

    @cached_property
    def size(self) -> int:
        return self.tokens.stop - self.tokens.start

    @cached_property
    def mean_fragment_tokens(self) -> float:
        """The mean number of tokens of a fragment, on the rank with the most fragments.

        If the host does not know positions, the number is 0, so that no fragment
        becomes a message of its own. All ranks compute the same number, so they choose
        the same messages.
        """
        if self.positions is None:
            return 0.0
        breaks = (self.positions.diff(dim=1) != 1).sum(dim=1)
        return self.size / (1 + int(breaks.max()))

    @cached_property
    def fragments(self) -> tuple[tuple[WaveFragment, ...], ...]:
        """For each rank, the parts of its fragments in this wave."""
        assert self.positions is not None
        return tuple(fragments_in_wave(positions_s) for positions_s in self.positions)


def fragments_in_wave(positions_s: Tensor) -> tuple[WaveFragment, ...]:
    """The fragments of one rank's wave. ``positions_s``, a CPU tensor, has the sequence
    position of each token, at least one; in a fragment they are successive numbers."""
    breaks = (positions_s.diff() != 1).nonzero().flatten() + 1
    bounds = [0] + breaks.tolist() + [len(positions_s)]
    first_positions = positions_s[bounds[:-1]].tolist()
    fragments = []
    for (start, end), first in zip(pairwise(bounds), first_positions, strict=True):
        sequence_slice = slice(first, first + end - start)
        fragments.append(WaveFragment(slice(start, end), sequence_slice))
    return tuple(fragments)


def waves_of(
    units: Documents, cp_size: int, cp_rank: int, layout: SequenceLayout, waves: int = 1
) -> tuple[Wave, ...]:
    """The waves in which rank ``cp_rank`` of ``cp_size`` exchanges its tokens: at most
    ``waves``, of about equal size.

    ``units`` are what ``layout`` divides among ranks: documents or the buffer. The
    waves are stored on ``units``, for all layers.
    """
    return units.keep(_make_waves, cp_size, cp_rank, layout, waves)


def _make_waves(
    units: Documents, cp_size: int, cp_rank: int, layout: SequenceLayout, waves: int
) -> tuple[Wave, ...]:
    """Compute :func:`waves_of`; for fixed buffers each `Wave.positions` is None."""
    positions_Rs = positions_of(units, cp_size, layout)
    slices = _tokens_of_waves(units.total_tokens // cp_size, waves)
    # on the device, two tensors per wave; new boundaries overwrite them
    of_waves = units.keep_tensors(_positions_of_waves, cp_size, cp_rank, layout, waves)
    all_waves = []
    for number, tokens in enumerate(slices):
        host_positions = None
        if units.known_on_host:
            host_positions = positions_Rs[:, tokens]
        wave = Wave(
            tokens,
            own_positions=of_waves[2 * number],
            peer_positions=of_waves[2 * number + 1],
            positions=host_positions,
        )
        all_waves.append(wave)
    return tuple(all_waves)


def _tokens_of_waves(tokens: int, waves: int) -> list[slice]:
    """Divide the ``tokens`` tokens of a rank into slices, one per wave. Empty slices
    are left out, so there may be fewer than ``waves``."""
    bounds = [tokens * wave // waves for wave in range(waves + 1)]
    return [slice(a, b) for a, b in pairwise(bounds) if a < b]


def _positions_of_waves(
    units: Documents, cp_size: int, cp_rank: int, layout: SequenceLayout, waves: int
) -> tuple[Tensor, ...]:
    """For each wave two int32 tensors, which :class:`Wave` describes: its
    ``own_positions``, then its ``peer_positions`` (peers in rank order)."""
    positions_Rs = positions_of(units, cp_size, layout)
    of_waves = []
    for tokens in _tokens_of_waves(units.total_tokens // cp_size, waves):
        in_wave_Rs = positions_Rs[:, tokens].to(torch.int32)
        peers = torch.cat([in_wave_Rs[:cp_rank], in_wave_Rs[cp_rank + 1 :]])
        of_waves += [in_wave_Rs[cp_rank].contiguous(), peers.flatten()]
    return tuple(of_waves)

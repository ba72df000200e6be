"""Where tokens go in a head exchange: tables built once per micro-batch; no communication here."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ..layouts import SequenceLayout, positions_of


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

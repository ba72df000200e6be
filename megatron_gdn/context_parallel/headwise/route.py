"""Where tokens go in a head exchange: tables built once per micro-batch; no communication here.

Legend: R context-parallel ranks, T tokens of the buffer, s = T / R tokens of one rank.

Where the zigzag tokens of documents in fixed buffers go in a head exchange.

The tables are made on the device. (Layouts that cut the whole buffer do not depend on documents.)

Legend: R context-parallel ranks, T tokens of the buffer, s = T / R tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, pairwise

import torch
from torch import Tensor

from ...ops.host_tables import cached_by_stream, to_device
from ...ops.static_documents import StaticDocuments
from ..layouts import SequenceLayout, check_lengths, inverse, rank_order_of_sequence, zigzag_places


@dataclass(frozen=True)
class Fragment:
    """``tokens`` tokens that are side by side in a rank's order and also in the sequence.

    ``local`` and ``sequence``: the position of the first token, in the wave and in the sequence.
    """

    local: int
    sequence: int
    tokens: int

    @property
    def locally(self) -> slice:
        return slice(self.local, self.local + self.tokens)

    @property
    def in_sequence(self) -> slice:
        return slice(self.sequence, self.sequence + self.tokens)


@dataclass(frozen=True, eq=False)
class Wave:
    """One of the waves in which rows travel: the same stretch of every rank's tokens.

    Attributes:
        tokens: which of a rank's tokens, ``size`` of them.
        own_place: int32 ``[size]``, sequence positions of this rank's tokens.
        peer_place: int32 ``[(R - 1) * size]``, those of all peers' tokens, end to end.
        positions: int64 ``[R, size]`` on the CPU, those of every rank's tokens; None if only the
            device knows them. Such a wave travels as one message per peer.
    """

    tokens: slice
    own_place: Tensor
    peer_place: Tensor
    positions: Tensor | None

    @property
    def size(self) -> int:
        return self.tokens.stop - self.tokens.start

    @cached_property
    def mean_fragment(self) -> float:
        """Tokens per fragment, on the rank with the most of them: the same on every rank."""
        if self.positions is None:
            return 0.0
        breaks = (self.positions.diff(dim=1) != 1).sum(dim=1)
        return self.size / (1 + int(breaks.max()))

    @cached_property
    def fragments(self) -> tuple[tuple[Fragment, ...], ...]:
        """Every rank's fragments; ``local`` counts from the start of the wave."""
        assert self.positions is not None
        return tuple(_fragments(positions_s) for positions_s in self.positions)


def _fragments(positions_s: Tensor) -> tuple[Fragment, ...]:
    local, found = 0, []
    for position, tokens in stretches(positions_s):
        found.append(Fragment(local, position, tokens))
        local += tokens
    return tuple(found)


@lru_cache(maxsize=16)
def positions(lengths: tuple[int, ...], cp_size: int, layout: SequenceLayout) -> Tensor:
    """int64 ``[R, s]`` on the CPU: the sequence positions of every rank's tokens, in its order."""
    order = inverse(rank_order_of_sequence(lengths, cp_size, layout))
    return order.view(cp_size, -1)


@cached_by_stream(16)
def route(
    lengths: Sequence[int],
    cp_size: int,
    cp_rank: int,
    layout: SequenceLayout,
    device: torch.device,
    waves: int = 1,
) -> tuple[Wave, ...]:
    """How rank ``cp_rank`` exchanges the tokens of a buffer of documents.

    Args:
        lengths: tokens of each document (one entry when not packed).
        layout: how the buffer was cut.
        waves: how many waves of about equal size the tokens travel in.

    Raises:
        ValueError: a length that does not divide, see
            :func:`~megatron_gdn.context_parallel.layouts.check_lengths`.
    """
    table_Rs = positions(lengths, cp_size, layout)
    made = []
    for tokens in wave_tokens(table_Rs.shape[1], waves):
        own, others = places_of(table_Rs, cp_rank, tokens)
        part_Rs = table_Rs[:, tokens]
        made.append(Wave(tokens, to_device(own, device), to_device(others, device), part_Rs))
    return tuple(made)


def wave_tokens(tokens: int, waves: int) -> list[slice]:
    """Which of a rank's tokens travel in each wave; no wave is empty."""
    bounds = [tokens * wave // waves for wave in range(waves + 1)]
    return [slice(a, b) for a, b in pairwise(bounds) if a < b]


def places_of(positions_Rs: Tensor, cp_rank: int, tokens: slice) -> tuple[Tensor, Tensor]:
    """``own_place`` and ``peer_place`` of a wave."""
    place_Rs = positions_Rs[:, tokens].to(torch.int32)
    others = torch.cat([place_Rs[:cp_rank], place_Rs[cp_rank + 1 :]])
    return place_Rs[cp_rank].contiguous(), others.flatten()


def stretches(index: Tensor) -> list[tuple[int, int]]:
    """The runs of consecutive values of an index on the host, as (first value, length)."""
    if not index.numel():
        return []
    starts = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist()]
    ends = [*starts[1:], index.numel()]
    first = index[starts].tolist()
    return [(row, end - start) for row, start, end in zip(first, starts, ends, strict=True)]


def zigzag_positions(documents: StaticDocuments, cp_size: int) -> Tensor:
    """int64 ``[R, s]`` on the device: the sequence positions of every rank's tokens.

    Raises:
        ValueError: T is not a multiple of 2 * R; a document that is not fails on the device.
    """
    check_lengths((documents.total_tokens,), cp_size)
    return documents.table(("zigzag", cp_size), lambda these: _positions(these, cp_size))[0]


def _positions(documents: StaticDocuments, cp_size: int) -> tuple[Tensor]:
    start, document_T = documents.cu_seqlens.long(), documents.document_T()
    length = start.diff()
    require_fragments(documents, length, cp_size)
    places_T = zigzag_places(start[document_T], length[document_T], cp_size)
    return (inverse(places_T).view(cp_size, -1),)


def require_fragments(documents: StaticDocuments, length: Tensor, cp_size: int) -> None:
    """Fail on the device if ``length`` has one that zigzag cannot cut."""
    documents.require(
        (length % (2 * cp_size) == 0).all(),
        f"every document must be a multiple of {2 * cp_size} tokens: the 'zigzag' layout cuts it "
        f"into that many fragments for context_parallel_size={cp_size}. Pad it, and pass the "
        f"padded boundaries",
    )


def static_route(
    documents: StaticDocuments, cp_size: int, cp_rank: int, waves: int
) -> tuple[Wave, ...]:
    """As :func:`route`, in zigzag; every fill writes the tables again."""
    key = ("route", cp_size, cp_rank, waves)
    if key not in documents.plans:
        cut = wave_tokens(documents.total_tokens // cp_size, waves)

        def tables(these: StaticDocuments) -> tuple[Tensor, ...]:
            table_Rs = zigzag_positions(these, cp_size)
            return tuple(chain(*(places_of(table_Rs, cp_rank, tokens) for tokens in cut)))

        made = documents.table(key, tables)
        documents.plans[key] = tuple(
            Wave(tokens, own, others, None)
            for tokens, own, others in zip(cut, made[::2], made[1::2], strict=True)
        )
    return documents.plans[key]

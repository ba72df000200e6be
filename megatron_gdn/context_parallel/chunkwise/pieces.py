"""How a layout cuts documents into pieces, and which rows before a piece travel to its rank.

Every layout cuts the packed stream into *fragments*, whose tokens one rank holds side by side. A
document end inside a fragment cuts it into *pieces*, each of one document. So a document is a chain
of pieces on changing ranks. ``docs/glossary.md`` has a picture.

The convolution of a piece reads the W - 1 rows before it, its *history*. These belong to several
pieces if pieces are shorter than that. Their gradients travel back.
:mod:`megatron_gdn.ops.front.history` computes with the rows.

Legend: N pieces, T tokens of the stream, s this rank's tokens, B batch, C conv channels, W taps,
R rows received.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents
from ...ops.front.history import History, HistoryTable, ranges
from ...ops.host_tables import cached_by_stream, to_device
from ..layouts import SequenceLayout, rank_order_of_sequence
from . import fragments
from .map_exchange import exchange_rows


@dataclass(frozen=True, eq=False)
class Pieces:
    """All N non-empty pieces of a stream, in stream order; int64 tensors on the host."""

    start: Tensor  # in the stream
    length: Tensor  # at least 1
    seen: Tensor  # tokens of its document before it; 0 starts a document
    left: Tensor  # tokens of its document after it; 0 ends one
    fragment: Tensor  # counted along the stream; in zigzag 2 * cp for each non-empty document
    rank: Tensor  # who holds it
    local_start: Tensor  # where in that rank's tokens
    place: Tensor  # [T], every stream token's place in rank order
    tokens: int  # of each rank

    def held_by(self, rank: int) -> Tensor:
        """Indices of this rank's pieces, in the order it holds them."""
        mine = (self.rank == rank).nonzero().flatten()
        return mine[self.local_start[mine].argsort()]

    def documents(self, rank: int, rows: int, device: torch.device) -> Documents:
        """The boundaries of this rank's pieces, all batch rows laid end to end."""
        ends = self.length[self.held_by(rank)].repeat(rows).cumsum(0).tolist()
        return Documents((0, *(ends or [0])), device)

    @cached_property
    def any_continues(self) -> bool:
        """Whether any piece continues a document that another piece began."""
        return bool((self.seen > 0).any())


@lru_cache(maxsize=16)
def pieces_of(lengths: tuple[int, ...], cp_size: int, layout: SequenceLayout) -> Pieces:
    """Cut documents of these lengths; a ValueError says which length does not divide."""
    place = rank_order_of_sequence(lengths, cp_size, layout)
    total = sum(lengths)
    kept = torch.tensor([n for n in lengths if n], dtype=torch.int64, device="cpu")
    ends = kept.cumsum(0)
    starts = ends - kept
    if layout is SequenceLayout.ZIGZAG:
        number_2cp = torch.arange(2 * cp_size, device="cpu")
        tokens_N = kept // (2 * cp_size)
        fragment_start = (starts[:, None] + tokens_N[:, None] * number_2cp).flatten()
    else:
        count = cp_size if layout is SequenceLayout.CONTIGUOUS else 2 * cp_size
        fragment_start = torch.arange(count if total else 0, device="cpu") * (total // count)
    start = torch.cat([fragment_start, starts]).unique()  # sorted
    length = torch.diff(start, append=kept.new_tensor([total]))
    document = torch.searchsorted(starts, start, right=True) - 1
    tokens = total // cp_size
    return Pieces(
        start=start,
        length=length,
        seen=start - starts[document],
        left=ends[document] - start - length,
        fragment=torch.searchsorted(fragment_start, start, right=True) - 1,
        rank=place[start] // max(tokens, 1),
        local_start=place[start] % max(tokens, 1),
        place=place,
        tokens=tokens,
    )


def documents_of_pieces(
    lengths: tuple[int, ...], cp_size: int, layout: SequenceLayout, rank: int, device: torch.device
) -> Documents:
    """The boundaries of this rank's pieces in one batch row."""
    documents = Documents((0, *accumulate(lengths)), device)
    return fragments.pieces_of(documents, cp_size, layout, rank)


class HistoryRoute(NamedTuple):
    """What one rank sends and receives."""

    send_rows: Tensor  # local rows that ranks' pieces need, this rank's too, sorted by receiver
    send_counts: tuple[int, ...]  # for each rank
    receive_counts: tuple[int, ...]
    table: HistoryTable  # where received rows and gradients go


@cached_by_stream(16)
def history_route(
    lengths: tuple[int, ...],
    cp_size: int,
    layout: SequenceLayout,
    rank: int,
    taps: int,
    device: torch.device,
) -> HistoryRoute | None:
    """Built once per micro-batch, from host lengths; None when no rank needs any row."""
    pieces, reach = pieces_of(lengths, cp_size, layout), taps - 1
    if not (pieces.any_continues and reach):
        return None
    # Every piece asks for the rows start - reach .. start - 1, as far as its document goes back.
    wanted = pieces.start[:, None] - reach + torch.arange(reach, device="cpu")
    piece, column = (wanted >= (pieces.start - pieces.seen)[:, None]).nonzero(as_tuple=True)
    source = pieces.place[wanted[piece, column]]
    giver, row, taker = source // pieces.tokens, source % pieces.tokens, pieces.rank[piece]
    # Both ends list a message by the taker's pieces in its order, oldest row first.
    order = (pieces.local_start[piece] * reach + column).argsort()
    giver, row, taker, piece = giver[order], row[order], taker[order], piece[order]
    sent = (giver == rank).nonzero().flatten()
    sent = sent[taker[sent].argsort(stable=True)]
    taken = (taker == rank).nonzero().flatten()
    by_giver = giver[taken].argsort(stable=True)

    mine = pieces.held_by(rank)
    known = pieces.seen[mine].clamp(max=reach)
    mine, known = mine[known > 0], known[known > 0]
    # A piece's rows are neighbours in ``taken``, oldest first; rows arrive giver by giver.
    arrived = torch.empty_like(by_giver)
    arrived[by_giver] = torch.arange(len(by_giver), device="cpu")
    before = torch.full((len(mine), reach), -1, device="cpu")
    line = torch.arange(len(mine), device="cpu").repeat_interleave(known)
    age = ranges(torch.zeros_like(known), known)
    before[line, age] = arrived[(known.cumsum(0) - 1)[line] - age]
    first, count = pieces.local_start[mine], pieces.length[mine]
    return HistoryRoute(
        send_rows=to_device(row[sent], device),
        send_counts=tuple(taker[sent].bincount(minlength=cp_size).tolist()),
        receive_counts=tuple(giver[taken].bincount(minlength=cp_size).tolist()),
        table=HistoryTable.build(first, count, before, row[sent], pieces.tokens, device),
    )


class HistoryOfPieces:
    """The rows before this rank's pieces, from the ranks that hold them.

    A :class:`~megatron_gdn.ops.front.history.HistoryLink`.
    """

    def __init__(self, route: HistoryRoute, group: dist.ProcessGroup) -> None:
        self.table, self._route, self._group = route.table, route, group

    def fetch(self, rows_sBC: Tensor) -> History:
        rows = rows_sBC.index_select(0, self._route.send_rows)
        counts = self._route.send_counts, self._route.receive_counts
        return History(exchange_rows(rows, *counts, self._group), self.table)

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        counts = self._route.receive_counts, self._route.send_counts
        return exchange_rows(d_rows_RBC, *counts, self._group)

"""The convolution's history across ranks: which rows travel, and their gradients back.

A piece reads the W - 1 rows before it. These belong to several pieces if pieces are shorter than
that. :mod:`megatron_gdn.ops.front.edges` computes with the rows.

Legend: s this rank's tokens, B batch, C conv channels, W taps, R rows received.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.front.edges import HistoryTable, Transfer, ranges
from ...ops.host_tables import cached_by_stream, to_device
from ..layouts import SequenceLayout
from .map_exchange import exchange_rows
from .pieces import pieces_of


class HistoryRoute(NamedTuple):
    """What one rank sends and receives.

    Attributes:
        send_rows: local rows that other ranks or this rank's own later pieces need, sorted by
            receiver; an index on the device.
        send_counts, receive_counts: number of rows for each rank.
    """

    send_rows: Tensor
    send_counts: tuple[int, ...]
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
    first, redone = pieces.local_start[mine], pieces.length[mine].clamp(max=reach)
    return HistoryRoute(
        send_rows=to_device(row[sent], device),
        send_counts=tuple(taker[sent].bincount(minlength=cp_size).tolist()),
        receive_counts=tuple(giver[taken].bincount(minlength=cp_size).tolist()),
        table=HistoryTable.build(first, redone, before, row[sent], device),
    )


class HistoryOfPieces:
    """The rows before this rank's pieces, from the ranks that hold them.

    A :class:`~megatron_gdn.ops.front.edges.HistoryLink`.
    """

    def __init__(self, route: HistoryRoute, group: dist.ProcessGroup) -> None:
        self.table, self._route, self._group = route.table, route, group

    def fetch(self, rows_sBC: Tensor) -> tuple[Tensor, Transfer]:
        rows = rows_sBC.index_select(0, self._route.send_rows)
        return self._exchange(rows, self._route.send_counts, self._route.receive_counts)

    def give_back(self, d_history_RBC: Tensor) -> tuple[Tensor, Transfer]:
        return self._exchange(d_history_RBC, self._route.receive_counts, self._route.send_counts)

    def _exchange(
        self, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]
    ) -> tuple[Tensor, Transfer]:
        received, work = exchange_rows(rows, send, receive, self._group, async_op=True)
        assert work is not None
        return received, work

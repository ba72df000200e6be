"""The convolution's history across ranks: which rows travel.

A piece reads the W - 1 rows before it. These belong to several pieces if pieces are shorter than
that. The gradients of these rows travel back. :mod:`megatron_gdn.ops.front.history` computes with
the rows.

Legend: s this rank's tokens, B batch, C conv channels, W taps, R rows received.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops import Documents
from ...ops.front.history import HistoryTable, Transfer
from ...ops.host_tables import cached_by_stream, to_device
from ...ops.rows import rows_at, stretches
from ..layouts import SequenceLayout
from .map_exchange import exchange_rows
from .pieces import pieces_of

_FEW = 4  # stretches that are added to one by one rather than gathered


class HistoryRoute(NamedTuple):
    """What one rank sends and receives.

    Attributes:
        send_rows: local rows that other ranks or this rank's own later pieces need, sorted by
            receiver; an index on the device.
        send_counts, receive_counts: number of rows for each rank.
        table: where received rows and gradients go.
    """

    send_rows: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    table: HistoryTable


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
    history = pieces.seen[mine].clamp(max=reach)
    mine, history = mine[history > 0], history[history > 0]
    redone = pieces.length[mine].clamp(max=reach)
    edge_length = history + redone
    edge_start = edge_length.cumsum(0) - edge_length
    history_slots = _ranges(edge_start, history)
    redone_slots = _ranges(edge_start + history, redone)
    redone_rows = _ranges(pieces.local_start[mine], redone)

    edge_rows = int(edge_length.sum())
    rows, sources = _by_row(
        torch.cat([redone_rows, row[sent]]),
        torch.cat([redone_slots, edge_rows + torch.arange(len(sent), device="cpu")]),
        filler=edge_rows + len(sent),
    )
    sent_from = tuple(stretches(row[sent]))
    edges = None
    if len(mine):
        edges = Documents((0, *edge_length.cumsum(0).tolist()), device)
    table = HistoryTable(
        edges=edges,
        history_at=rows_at(history_slots[by_giver], device),
        redone_at=rows_at(redone_rows, device),
        again_at=rows_at(redone_slots, device),
        gradient_rows=to_device(rows, device),
        gradient_sources=to_device(sources, device),
        sent_from=sent_from if sources.shape[1] < 2 and len(sent_from) <= _FEW else None,
    )
    return HistoryRoute(
        send_rows=to_device(row[sent], device),
        send_counts=tuple(taker[sent].bincount(minlength=cp_size).tolist()),
        receive_counts=tuple(giver[taken].bincount(minlength=cp_size).tolist()),
        table=table,
    )


def _ranges(start: Tensor, count: Tensor) -> Tensor:
    """``start[0] .. start[0] + count[0] - 1, start[1] .., ...``"""
    first = count.cumsum(0) - count
    return torch.arange(int(count.sum()), device="cpu") + (start - first).repeat_interleave(count)


def _by_row(rows: Tensor, sources: Tensor, filler: int) -> tuple[Tensor, Tensor]:
    """Group (row, source) pairs by row: the distinct rows, and their sources padded to a table."""
    order = rows.argsort(stable=True)
    rows, count = rows[order].unique_consecutive(return_counts=True)
    table = sources.new_full((len(rows), int(count.max()) if len(rows) else 0), filler)
    line = torch.arange(len(rows), device="cpu").repeat_interleave(count)
    table[line, _ranges(torch.zeros_like(count), count)] = sources[order]
    return rows, table


class HistoryOfPieces:
    """The rows before this rank's pieces, from the ranks that hold them.

    A :class:`~megatron_gdn.ops.front.history.HistoryLink`.
    """

    def __init__(self, route: HistoryRoute, group: dist.ProcessGroup) -> None:
        self.table, self._route, self._group = route.table, route, group

    def fetch(self, rows_sBC: Tensor) -> tuple[Tensor, Transfer]:
        route = self._route
        rows = rows_sBC.index_select(0, route.send_rows)
        return self._exchange(rows, route.send_counts, route.receive_counts)

    def give_back(self, d_history_RBC: Tensor) -> tuple[Tensor, Transfer]:
        route = self._route
        return self._exchange(d_history_RBC, route.receive_counts, route.send_counts)

    def _exchange(
        self, rows: Tensor, send: tuple[int, ...], receive: tuple[int, ...]
    ) -> tuple[Tensor, Transfer]:
        received, work = exchange_rows(rows, send, receive, self._group, async_op=True)
        assert work is not None
        return received, work

"""The exchange of the rows that a piece's convolution reads from other ranks.

The convolution of a piece reads the W - 1 rows before the piece, its *history*. A piece that
continues a document begins a fragment, so its history lies in earlier fragments (nodes) of a chain:

    node j - k sends its last W - k rows to node j,   k = 1 .. W - 1

The gradients of these rows travel back. If the host knows the documents, messages have only the
rows that pieces need, else all rows of this rule.

Legend: R ranks, C chains, h nodes of a chain on this rank, k distance of two nodes, m distance of a
row from its fragment's end (1 is the last row).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents
from ...ops.front.history import History, HistoryTable
from ...ops.host_tables import to_device
from ..layouts import SequenceLayout
from .fragments import any_continues, fragments_of, nodes_of
from .map_exchange import Nodes, chain_nodes, exchange_rows


class HistoryRoute(NamedTuple):
    """The rows that one rank sends and receives."""

    send_rows: Tensor  # indices of the local rows to send, sorted by receiving rank
    send_counts: tuple[int, ...]  # the number of rows for each rank
    receive_counts: tuple[int, ...]
    table: HistoryTable  # the places of received rows and gradients


def history_route(
    documents: Documents, cp_size: int, layout: SequenceLayout, rank: int, taps: int
) -> HistoryRoute | None:
    """The route of a micro-batch; None when no rank needs any row."""
    where = (cp_size, layout, rank)
    key = (HistoryRoute, *where, taps)
    return documents.plan(key, lambda: _route(documents, *where, taps - 1))


class _Rows(NamedTuple):
    """Rows that may travel, int64; sender and receiver list the rows in the same order."""

    chain: Tensor
    slot: Tensor  # the index of the fragment among this rank's fragments of the chain
    k: Tensor
    m: Tensor
    receiver: Tensor  # the node that needs the row
    peer: Tensor  # the rank at the other end


class _Tables(NamedTuple):
    """Tensors of :class:`HistoryRoute` and, in the middle, of :class:`HistoryTable`."""

    send_rows: Tensor
    before: Tensor
    edge: Tensor
    place: Tensor
    additions: Tensor
    send_counts: Tensor  # [R]
    receive_counts: Tensor  # [R]


def _route(
    documents: Documents, cp_size: int, layout: SequenceLayout, rank: int, reach: int
) -> HistoryRoute | None:
    if not (reach and any_continues(documents, cp_size, layout)):
        return None
    nodes = chain_nodes(cp_size, layout)
    chains = documents.most if layout is SequenceLayout.ZIGZAG else 1
    listed = [_list_rows(rank, nodes, chains, reach, sending) for sending in (True, False)]
    counts = [rows.peer.bincount(minlength=cp_size) for rows in listed]
    device = documents.starts.device
    sent, received = (_Rows(*(to_device(x, device) for x in rows)) for rows in listed)
    tables = documents.table(
        (_Tables, cp_size, layout, rank, reach),
        lambda given: _build_tables(given, cp_size, layout, rank, reach, sent, received),
        move=False,
    )
    if documents.known:
        counts = [tables.send_counts, tables.receive_counts]
    send_rows, *table = (to_device(x, documents.device) for x in tables[:5])
    send_counts, receive_counts = (tuple(x.tolist()) for x in counts)
    return HistoryRoute(send_rows, send_counts, receive_counts, HistoryTable(*table))


def _list_rows(rank: int, nodes: Nodes, chains: int, reach: int, sending: bool) -> _Rows:
    """The rows that ``rank`` may send if ``sending``, else may receive, sorted by peer."""
    messages: list[list[tuple[int, ...]]] = [[] for _ in nodes.hosts]
    for receiver in range(len(nodes.hosts)):
        for k in range(min(reach, receiver), 0, -1):
            own, other = (receiver - k, receiver) if sending else (receiver, receiver - k)
            if nodes.hosts[own] == rank:
                peer, slot = nodes.hosts[other], nodes.slots[own]
                distances = range(reach - k + 1, 0, -1)
                messages[peer] += [(slot, k, m, receiver, peer) for m in distances]
    of_all_peers = []
    for message in messages:
        rows = torch.tensor(message, dtype=torch.int64, device="cpu").view(-1, 5).repeat(chains, 1)
        chain = torch.arange(chains, device="cpu").repeat_interleave(len(message))
        of_all_peers.append(torch.cat([chain[:, None], rows], 1))
    return _Rows(*torch.cat(of_all_peers).T.contiguous().unbind())


def _build_tables(
    documents: Documents,
    cp_size: int,
    layout: SequenceLayout,
    rank: int,
    reach: int,
    sent: _Rows,
    received: _Rows,
) -> _Tables:
    fragments, own = fragments_of(documents, cp_size, layout), nodes_of(rank, cp_size, layout)
    seen = torch.where(fragments.enters, fragments.begin - fragments.first, 0).clamp(max=reach)
    length = fragments.end - fragments.begin
    local, tokens = fragments.local[own], documents.total_tokens // cp_size

    def needed(rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        """For each row: whether the row travels, its number or -1, its distance before a piece."""
        tokens = length[rows.receiver, rows.chain]
        distance = (rows.k - 1) * tokens + rows.m
        travels = (rows.m <= tokens) & (distance <= seen[rows.receiver, rows.chain])
        number = torch.arange(len(tokens), device=tokens.device)
        if documents.known:
            number = travels.cumsum(0) - 1
        return travels, torch.where(travels, number, -1), distance

    def by_piece(x: Tensor) -> Tensor:
        """``[h, C]`` flattened chain by chain, without first nodes, which have no history."""
        return x[rank == 0 :].T.flatten()

    h, C = local.shape
    travels, number, distance = needed(received)
    slots, slot = (h - 1, received.slot - 1) if rank == 0 else (h, received.slot)
    place = (received.chain * slots + slot) * reach + distance - 1
    before = _scatter(torch.where(travels, place, -1), number, C * slots * reach).view(-1, reach)
    receive_counts = _count_by_peer(received, travels, cp_size)

    ahead = torch.arange(reach, device=local.device)
    end = torch.minimum(fragments.end, fragments.first_end)[own] - fragments.begin[own] + local
    continues = by_piece(seen[own]) > 0
    token = by_piece(local)[:, None] + ahead
    edge = torch.where(continues[:, None] & (token < by_piece(end)[:, None]), token, -1)

    travels, number, _ = needed(sent)
    row = local[sent.slot, sent.chain] + length[sent.receiver, sent.chain] - sent.m
    send_rows = row.clamp(0, max(tokens - 1, 0))
    W = reach + 1
    place = ((sent.chain * h + sent.slot) * W + sent.m) * W + sent.k
    sources = _scatter(place, number, C * h * W * W).view(C * h, W, W)[:, 1:, 1:]
    # Sources are sorted, so that gradients are added in the order of their numbers.
    sources = torch.where(sources < 0, len(place), sources).sort(-1).values
    row = local.T.flatten()[:, None] + length[own].T.flatten()[:, None] - 1 - ahead
    row = torch.where(sources[..., 0] < len(place), row, -1)
    sources = torch.where(sources < len(place), sources, -1)
    additions = torch.cat([row[..., None], sources], -1).flatten(0, 1)
    if documents.known:
        before, edge, send_rows = before[continues], edge[continues], send_rows[travels]
        additions = additions[additions[:, 0] >= 0]
        additions = additions[:, : 1 + int((additions[:, 1:] >= 0).any(0).sum())]
    place = _scatter(edge.flatten(), torch.arange(edge.numel(), device=edge.device), tokens)
    return _Tables(
        send_rows, before.int(), edge.int(), place.int(), additions.int(),
        _count_by_peer(sent, travels, cp_size), receive_counts,
    )  # fmt: skip


def _scatter(place: Tensor, values: Tensor, size: int) -> Tensor:
    """A table ``[size]`` with ``values`` at each ``place`` (-1 is skipped), and -1 elsewhere."""
    table = torch.full((size + 1,), -1, dtype=torch.int64, device=place.device)
    table[torch.where(place < 0, size, place)] = values
    return table[:size]


def _count_by_peer(rows: _Rows, travels: Tensor, cp_size: int) -> Tensor:
    """The number of travelling rows for each rank, int64 ``[R]``."""
    counts = torch.zeros(cp_size, dtype=torch.int64, device=travels.device)
    return counts.index_add(0, rows.peer, travels.long())


class HistoryOfPieces:
    """A :class:`~megatron_gdn.ops.front.history.HistoryLink` that fetches rows of other ranks."""

    def __init__(self, route: HistoryRoute, group: dist.ProcessGroup) -> None:
        self._route, self._group = route, group

    def fetch(self, rows_sBC: Tensor) -> History:
        send_rows, send, receive, table = self._route
        sent = rows_sBC.index_select(0, send_rows)
        return History(exchange_rows(sent, send, receive, self._group), table)

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        _, send, receive, _ = self._route
        return exchange_rows(d_rows_RBC, receive, send, self._group)

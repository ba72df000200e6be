"""Which rows before a piece travel to its rank.

The convolution of a piece reads the W - 1 rows before it, its *history*. A piece that continues a
document begins a fragment, so its history lies in the fragments (nodes) before:

    node j gets from node j - k its last W - k rows,   k = 1 .. W - 1

Gradients of these rows travel back. If the host knows the documents, messages have only the rows
that a piece needs; else they have all of these rows.

Legend: R ranks, C chains, h nodes of a chain on this rank, k nodes back, m rows from a fragment's
end (1 is its last), P pieces that may have a history, s this rank's tokens.
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
    """What one rank sends and receives."""

    send_rows: Tensor  # local rows that a rank's pieces need, sorted by receiver
    send_counts: tuple[int, ...]  # for each rank
    receive_counts: tuple[int, ...]
    table: HistoryTable  # where received rows and gradients go


def history_route(
    documents: Documents, cp_size: int, layout: SequenceLayout, rank: int, taps: int
) -> HistoryRoute | None:
    """The route of a micro-batch; None when no rank needs any row."""
    where = (cp_size, layout, rank)
    key = (HistoryRoute, *where, taps)
    return documents.plan(key, lambda: _route(documents, *where, taps - 1))


class _Rows(NamedTuple):
    """Rows that may travel, int64; sender and receiver list them in the same order."""

    chain: Tensor
    slot: Tensor  # of this rank
    k: Tensor
    m: Tensor
    taker: Tensor  # the node
    message: Tensor  # the other rank


class _Tables(NamedTuple):
    send_rows: Tensor
    before: Tensor  # this and the next as :class:`HistoryTable` has them
    edge: Tensor
    place: Tensor
    additions: Tensor
    sent: Tensor  # [R], how many rows each rank is sent
    taken: Tensor


def _route(
    documents: Documents, cp_size: int, layout: SequenceLayout, rank: int, reach: int
) -> HistoryRoute | None:
    if not (reach and any_continues(documents, cp_size, layout)):
        return None
    nodes = chain_nodes(cp_size, layout)
    chains = documents.most if layout is SequenceLayout.ZIGZAG else 1
    listed = [_rows_of(rank, nodes, chains, reach, gives) for gives in (True, False)]
    counts = [rows.message.bincount(minlength=cp_size) for rows in listed]
    device = documents.starts.device
    sent, taken = (_Rows(*(to_device(x, device) for x in rows)) for rows in listed)
    made = documents.table(
        (_Tables, cp_size, layout, rank, reach),
        lambda these: _tables(these, cp_size, layout, rank, reach, sent, taken),
        move=False,
    )
    if documents.known:
        counts = [made.sent, made.taken]
    send_rows, *table = (to_device(x, documents.device) for x in made[:5])
    to, of = (tuple(x.tolist()) for x in counts)
    return HistoryRoute(send_rows, to, of, HistoryTable(*table))


def _rows_of(rank: int, nodes: Nodes, chains: int, reach: int, gives: bool) -> _Rows:
    messages: list[list[tuple[int, ...]]] = [[] for _ in nodes.hosts]
    for taker in range(len(nodes.hosts)):
        for k in range(min(reach, taker), 0, -1):
            own, other = (taker - k, taker) if gives else (taker, taker - k)
            if nodes.hosts[own] == rank:
                host, slot = nodes.hosts[other], nodes.slots[own]
                messages[host] += [(slot, k, m, taker, host) for m in range(reach - k + 1, 0, -1)]
    of_all = []
    for message in messages:
        rows = torch.tensor(message, dtype=torch.int64, device="cpu").view(-1, 5).repeat(chains, 1)
        chain = torch.arange(chains, device="cpu").repeat_interleave(len(message))
        of_all.append(torch.cat([chain[:, None], rows], 1))
    return _Rows(*torch.cat(of_all).T.contiguous().unbind())


def _tables(
    documents: Documents,
    cp_size: int,
    layout: SequenceLayout,
    rank: int,
    reach: int,
    sent: _Rows,
    taken: _Rows,
) -> _Tables:
    fragments, own = fragments_of(documents, cp_size, layout), nodes_of(rank, cp_size, layout)
    seen = torch.where(fragments.enters, fragments.begin - fragments.first, 0).clamp(max=reach)
    length = fragments.end - fragments.begin
    local, tokens = fragments.local[own], documents.total_tokens // cp_size

    def needed(rows: _Rows) -> tuple[Tensor, Tensor, Tensor]:
        """Which rows travel, their numbers or -1, and their distance before the piece."""
        of = length[rows.taker, rows.chain]
        age = (rows.k - 1) * of + rows.m
        there = (rows.m <= of) & (age <= seen[rows.taker, rows.chain])
        number = there.cumsum(0) - 1 if documents.known else torch.arange(len(of), device=of.device)
        return there, torch.where(there, number, -1), age

    def of_pieces(x: Tensor) -> Tensor:
        """``[h, C]`` by piece; nothing lies before the first node of a chain."""
        return x[rank == 0 :].T.flatten()

    h, C = local.shape
    there, number, age = needed(taken)
    slots, slot = (h - 1, taken.slot - 1) if rank == 0 else (h, taken.slot)
    at = (taken.chain * slots + slot) * reach + age - 1
    before = _scattered(torch.where(there, at, -1), number, C * slots * reach).view(-1, reach)
    taken_counts = _counted(taken, there, cp_size)

    ahead = torch.arange(reach, device=local.device)
    end = torch.minimum(fragments.end, fragments.first_end)[own] - fragments.begin[own] + local
    continues = of_pieces(seen[own]) > 0
    token = of_pieces(local)[:, None] + ahead
    edge = torch.where(continues[:, None] & (token < of_pieces(end)[:, None]), token, -1)

    there, number, _ = needed(sent)
    row = local[sent.slot, sent.chain] + length[sent.taker, sent.chain] - sent.m
    send_rows = row.clamp(0, max(tokens - 1, 0))
    W = reach + 1
    at = ((sent.chain * h + sent.slot) * W + sent.m) * W + sent.k
    sources = _scattered(at, number, C * h * W * W).view(C * h, W, W)[:, 1:, 1:]
    sources = torch.where(sources < 0, len(at), sources).sort(-1).values  # in their order
    given = local.T.flatten()[:, None] + length[own].T.flatten()[:, None] - 1 - ahead
    given = torch.where(sources[..., 0] < len(at), given, -1)
    sources = torch.where(sources < len(at), sources, -1)
    additions = torch.cat([given[..., None], sources], -1).flatten(0, 1)
    if documents.known:
        before, edge, send_rows = before[continues], edge[continues], send_rows[there]
        additions = additions[additions[:, 0] >= 0]
        additions = additions[:, : 1 + int((additions[:, 1:] >= 0).any(0).sum())]
    place = _scattered(edge.flatten(), torch.arange(edge.numel(), device=edge.device), tokens)
    return _Tables(
        send_rows, before.int(), edge.int(), place.int(), additions.int(),
        _counted(sent, there, cp_size), taken_counts,
    )  # fmt: skip


def _scattered(at: Tensor, values: Tensor, size: int) -> Tensor:
    """A table ``[size]`` with the values at their places and -1 elsewhere; place -1 is skipped."""
    made = torch.full((size + 1,), -1, dtype=torch.int64, device=at.device)
    made[torch.where(at < 0, size, at)] = values
    return made[:size]


def _counted(rows: _Rows, there: Tensor, cp_size: int) -> Tensor:
    return torch.zeros(cp_size, dtype=torch.int64, device=there.device).index_add(
        0, rows.message, there.long()
    )


class HistoryOfPieces:
    """A :class:`~megatron_gdn.ops.front.history.HistoryLink` that fetches from other ranks."""

    def __init__(self, route: HistoryRoute, group: dist.ProcessGroup) -> None:
        self._route, self._group = route, group

    def fetch(self, rows_sBC: Tensor) -> History:
        send_rows, send, receive, table = self._route
        sent = rows_sBC.index_select(0, send_rows)
        return History(exchange_rows(sent, send, receive, self._group), table)

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        _, send, receive, _ = self._route
        return exchange_rows(d_rows_RBC, receive, send, self._group)

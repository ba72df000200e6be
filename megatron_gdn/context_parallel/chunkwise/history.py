"""Exchanges the rows that the convolution of a piece reads from other ranks.

A convolution of W taps reads the W - 1 rows before a piece, the piece's *history*. A
piece that continues a document begins a fragment, so its history lies in earlier
fragments (nodes) of a chain:

    node j - k sends its last W - k rows to node j,   k = 1 .. W - 1

The gradients of the sent rows travel back. If the host knows the documents, only the
rows that pieces need are sent, else all rows of the formula above.

Legend: C chains (in ``rows_sBC``: channels), R rows from other ranks, h nodes of a
chain on this rank; k: the receiving node is k nodes after the row's node; m: the row is
the m-th from its fragment's end (1 is the last row).
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
from .fragments import Cutting, any_document_is_cut, fragments_of
from .map_exchange import exchange_rows


class HistoryRoute(NamedTuple):
    """The projection rows that one rank sends and receives as history of pieces."""

    send_rows: Tensor  # indices of the local rows to send, sorted by receiving rank
    send_counts: tuple[int, ...]  # the number of rows sent to each rank
    receive_counts: tuple[int, ...]
    table: HistoryTable  # maps received rows to pieces, and gradients to sent rows


class _TravellingRows(NamedTuple):
    """Int64 fields with one entry per row that may travel, in the same order on both
    ranks."""

    chain: Tensor
    slot: Tensor  # the index of the fragment among this rank's fragments of the chain
    k: Tensor
    m: Tensor
    receiver: Tensor  # the node that needs the row
    peer: Tensor  # the other rank, which receives or sends the row


def history_route(
    documents: Documents, cutting: Cutting, taps: int
) -> HistoryRoute | None:
    """The rows to exchange for a convolution of ``taps`` taps; None if no rank needs
    any row."""
    return documents.keep(_make_history_route, cutting, taps)


def _make_history_route(
    documents: Documents, cutting: Cutting, taps: int
) -> HistoryRoute | None:
    history_len = taps - 1  # the number of rows before a piece
    if not (history_len and any_document_is_cut(documents, cutting)):
        return None
    if cutting.layout is SequenceLayout.ZIGZAG:
        chains = documents.max_filled
    else:
        chains = 1
    listed = [
        _list_rows(cutting, chains, history_len, sending) for sending in (True, False)
    ]
    device = documents.starts.device
    sendable, receivable = (
        _TravellingRows._make(to_device(x, device) for x in rows) for rows in listed
    )
    tables = documents.keep_tensors(
        _build_tables, cutting, history_len, sendable, receivable, move=False
    )
    counts = []
    for rows, travels in zip(listed, tables[-2:], strict=True):
        if documents.known_on_host:
            peers = rows.peer[travels]
        else:
            peers = rows.peer
        counts.append(tuple(peers.bincount(minlength=cutting.cp_size).tolist()))
    send_counts, receive_counts = counts
    on_device = [to_device(x, documents.device) for x in tables[:-2]]
    table = HistoryTable(*on_device[1:])
    return HistoryRoute(on_device[0], send_counts, receive_counts, table)


def _list_rows(
    cutting: Cutting, chains: int, history_len: int, sending: bool
) -> _TravellingRows:
    """The rows that this rank may send, if ``sending``, or else receive, in ``chains``
    chains."""
    nodes = cutting.nodes
    rank = cutting.rank
    messages: list[list[tuple[int, ...]]] = [[] for _ in nodes.hosts]
    for receiver in range(len(nodes.hosts)):
        for k in range(min(history_len, receiver), 0, -1):
            own_node, other_node = (
                (receiver - k, receiver) if sending else (receiver, receiver - k)
            )
            if nodes.hosts[own_node] == rank:
                peer = nodes.hosts[other_node]
                slot = nodes.slots[own_node]
                distances = range(history_len - k + 1, 0, -1)
                messages[peer] += [(slot, k, m, receiver, peer) for m in distances]
    of_all_peers = []
    for message in messages:
        rows = (
            torch.tensor(message, dtype=torch.int64, device="cpu")
            .view(-1, 5)
            .repeat(chains, 1)
        )
        chain = torch.arange(chains, device="cpu").repeat_interleave(len(message))
        of_all_peers.append(torch.cat([chain[:, None], rows], 1))
    return _TravellingRows._make(torch.cat(of_all_peers).T.contiguous().unbind())


def _build_tables(
    documents: Documents,
    cutting: Cutting,
    history_len: int,
    sendable: _TravellingRows,
    receivable: _TravellingRows,
) -> tuple[Tensor, ...]:
    """Return ``send_rows``, the fields of :class:`HistoryTable`, and two masks of rows
    that travel.

    The masks tell which rows of ``sendable`` and which of ``receivable`` travel. If the
    host knows the documents, rows that do not travel are left out of the tables.
    """
    fragments = fragments_of(documents, cutting)
    own = cutting.own
    rank = cutting.rank
    history_tokens = torch.where(
        fragments.enters, fragments.begin - fragments.first, 0
    ).clamp(max=history_len)
    length = fragments.end - fragments.begin
    local = fragments.local[own]
    tokens = documents.total_tokens // cutting.cp_size

    def travelling_rows(rows: _TravellingRows) -> tuple[Tensor, Tensor, Tensor]:
        """Per row: whether it travels, its index in messages or -1, its distance to the
        piece."""
        sender = rows.receiver - rows.k
        tokens = length[sender, rows.chain]
        between = (
            fragments.begin[rows.receiver, rows.chain]
            - fragments.end[sender, rows.chain]
        )
        distance = between + rows.m
        travels = (rows.m <= tokens) & (
            distance <= history_tokens[rows.receiver, rows.chain]
        )
        number = torch.arange(len(tokens), device=tokens.device)
        if documents.known_on_host:
            number = travels.cumsum(0) - 1
        return travels, torch.where(travels, number, -1), distance

    def by_piece(x: Tensor) -> Tensor:
        """Flatten ``x [nodes here, chains]`` by chain, without chains' first nodes (no
        history)."""
        with_history = x[1:] if rank == 0 else x
        return with_history.T.flatten()

    h, C = local.shape
    arrives, number, distance = travelling_rows(receivable)
    slots, slot = (h - 1, receivable.slot - 1) if rank == 0 else (h, receivable.slot)
    place = (receivable.chain * slots + slot) * history_len + distance - 1
    before = _scatter(
        torch.where(arrives, place, -1), number, C * slots * history_len
    ).view(-1, history_len)

    ahead = torch.arange(history_len, device=local.device)
    end = (
        torch.minimum(fragments.end, fragments.first_end)[own]
        - fragments.begin[own]
        + local
    )
    continues = by_piece(history_tokens[own]) > 0
    token = by_piece(local)[:, None] + ahead
    edge = torch.where(continues[:, None] & (token < by_piece(end)[:, None]), token, -1)

    travels, number, _ = travelling_rows(sendable)
    chain, slot, k, m, receiver, _ = sendable
    row = local[slot, chain] + length[receiver - k, chain] - m
    send_rows = row.clamp(0, max(tokens - 1, 0))
    W = history_len + 1
    place = ((chain * h + slot) * W + m) * W + k
    sources = _scatter(place, number, C * h * W * W).view(C * h, W, W)[:, 1:, 1:]
    # Sort the sources, so that the gradients of a row are added in a fixed order.
    sources = torch.where(sources < 0, len(place), sources).sort(-1).values
    row = local.T.flatten()[:, None] + length[own].T.flatten()[:, None] - 1 - ahead
    row = torch.where(sources[..., 0] < len(place), row, -1)
    sources = torch.where(sources < len(place), sources, -1)
    additions = torch.cat([row[..., None], sources], -1).flatten(0, 1)
    if documents.known_on_host:
        before = before[continues]
        edge = edge[continues]
        send_rows = send_rows[travels]
        additions = additions[additions[:, 0] >= 0]
        additions = additions[:, : 1 + int((additions[:, 1:] >= 0).any(0).sum())]
    place = _scatter(
        edge.flatten(), torch.arange(edge.numel(), device=edge.device), tokens
    )
    tables = (x.int() for x in (before, edge, place, additions))
    return send_rows, *tables, travels, arrives


def _scatter(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """A table ``[size]`` of -1 with ``values[i]`` at ``indices[i]``; indices of -1 are
    skipped."""
    table = torch.full((size + 1,), -1, dtype=torch.int64, device=indices.device)
    table[torch.where(indices < 0, size, indices)] = values
    return table[:size]


class HistoryOfPieces:
    """A :class:`~megatron_gdn.ops.front.history.HistoryLink` that fetches rows of other
    ranks."""

    def __init__(self, route: HistoryRoute, group: dist.ProcessGroup) -> None:
        """``route``: which rows go to and come from which ranks of ``group``."""
        self._route = route
        self._group = group

    def fetch(self, rows_sBC: Tensor) -> History:
        """Send projection rows ``[s, B, C]`` where needed; return this rank's
        history."""
        send_rows, send, receive, table = self._route
        sent = rows_sBC.index_select(0, send_rows)
        return History(exchange_rows(sent, send, receive, self._group), table)

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        """Send back gradients ``[R, B, C]`` of fetched rows; return those of rows sent
        before."""
        _, send, receive, _ = self._route
        return exchange_rows(d_rows_RBC, receive, send, self._group)

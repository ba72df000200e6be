"""Exchanges the rows that the convolution of a piece reads from other ranks.

A convolution of W taps reads the W - 1 rows before a piece, the piece's *history*. A
piece that continues a document begins a fragment, so its history is in earlier
fragments (*nodes*) of the same *chain* (:mod:`.fragments`):

    node j - k sends its last W - k rows to node j,   k = 1 .. W - 1

Each of the k - 1 nodes between these two has at least one row, so node j reads at most
W - k rows of node j - k. The gradients of the sent rows travel back. If the host knows
the documents, only the rows that pieces need are sent, else all rows of the formula
above.

Legend: n nodes of a chain, h of them on this rank, C chains (in ``rows_sBC``:
channels), R rows from other ranks, s tokens of this rank.
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
from .fragments import SequencePartition, any_document_is_cut, fragments_of
from .map_exchange import exchange_rows


class HistoryRoute(NamedTuple):
    """The projection rows that one rank sends to other ranks, and receives from them,
    as the history of pieces."""

    send_rows: Tensor  # int64, indices of the local rows to send, by receiving rank
    send_counts: tuple[int, ...]  # the number of rows sent to each rank
    receive_counts: tuple[int, ...]  # the number of rows received from each rank
    # which received rows each piece reads, and which returned gradients are added to
    # each sent row's gradient
    history_table: HistoryTable


class _CandidateRows(NamedTuple):
    """Rows that may have to be sent: each field is int64 with an entry per row.

    The sending and the receiving rank list the rows of a message in the same order.
    """

    chain: Tensor
    # 0: this rank's first fragment of the chain, 1: this rank's second fragment
    own_fragment: Tensor
    hops: Tensor  # k above: receiving node minus sending node
    # 1: the last row of the sending node, 2: the row before, ...
    number_from_end: Tensor
    receiving_node: Tensor  # the node that needs the row
    peer_rank: Tensor  # the rank to which, or from which, the row is sent


class _RouteTables(NamedTuple):
    """The tensors of a :class:`HistoryRoute`.

    If the host knows the documents, the tensors have only the needed rows, else all
    candidate rows.
    """

    send_rows: Tensor
    # the fields of HistoryTable
    rows_before: Tensor
    edge_tokens: Tensor
    edge_index: Tensor
    gradient_additions: Tensor
    # bool, for each candidate that this rank may send or receive: whether it is needed
    is_sent: Tensor
    is_received: Tensor


def history_route(
    documents: Documents, partition: SequencePartition, taps: int
) -> HistoryRoute | None:
    """The rows to exchange for a convolution of ``taps`` taps; None if no rank needs
    any row. The result is stored on ``documents``, for all layers."""
    return documents.keep(_make_history_route, partition, taps)


def _make_history_route(
    documents: Documents, partition: SequencePartition, taps: int
) -> HistoryRoute | None:
    """Compute :func:`history_route`.

    The all-to-all needs the counts of rows on the host. For fixed buffers all candidate
    rows are exchanged, because only the device knows which rows are needed.
    """
    history_len = taps - 1  # W - 1
    if not (history_len and any_document_is_cut(documents, partition)):
        return None
    if partition.layout is SequenceLayout.ZIGZAG:
        chains = documents.max_filled  # each document is a chain
    else:
        chains = 1
    sendable = _candidate_rows(partition, chains, history_len, sending=True)
    receivable = _candidate_rows(partition, chains, history_len, sending=False)
    tables_device = documents.starts.device  # the host, or the GPU of fixed buffers
    tables = documents.keep_tensors(
        _build_tables,
        partition,
        history_len,
        _CandidateRows._make(to_device(x, tables_device) for x in sendable),
        _CandidateRows._make(to_device(x, tables_device) for x in receivable),
        move=False,
    )
    to_ranks = sendable.peer_rank
    from_ranks = receivable.peer_rank
    if documents.known_on_host:
        to_ranks = to_ranks[tables.is_sent]
        from_ranks = from_ranks[tables.is_received]
    cp_size = partition.cp_size
    device = documents.device
    return HistoryRoute(
        send_rows=to_device(tables.send_rows, device),
        send_counts=tuple(to_ranks.bincount(minlength=cp_size).tolist()),
        receive_counts=tuple(from_ranks.bincount(minlength=cp_size).tolist()),
        history_table=HistoryTable(
            rows_before=to_device(tables.rows_before, device),
            edge_tokens=to_device(tables.edge_tokens, device),
            edge_index=to_device(tables.edge_index, device),
            gradient_additions=to_device(tables.gradient_additions, device),
        ),
    )


def _candidate_rows(
    partition: SequencePartition, chains: int, history_len: int, sending: bool
) -> _CandidateRows:
    """The rows that this rank may send (if ``sending``) or receive, on the CPU, sorted
    by ``peer_rank``.

    The rows of a message are in sequence order. Candidate rows do not depend on the
    documents' lengths; :func:`_build_tables` finds which of these rows are needed.
    """
    nodes = partition.nodes
    rank = partition.rank
    # for each other rank, the rows of one chain: all fields of _CandidateRows but
    # ``chain``
    messages: list[list[tuple[int, ...]]] = [[] for _ in nodes.ranks]
    for receiver in range(len(nodes.ranks)):
        for hops in range(min(history_len, receiver), 0, -1):
            if sending:
                own_node = receiver - hops
                other_node = receiver
            else:
                own_node = receiver
                other_node = receiver - hops
            if nodes.ranks[own_node] == rank:
                peer = nodes.ranks[other_node]
                own_fragment = nodes.fragment_numbers[own_node]
                for from_end in range(history_len - hops + 1, 0, -1):
                    row = (own_fragment, hops, from_end, receiver, peer)
                    messages[peer].append(row)
    of_all_peers = []
    for message in messages:
        rows = (
            torch.tensor(message, dtype=torch.int64, device="cpu")
            .view(-1, 5)
            .repeat(chains, 1)
        )
        chain = torch.arange(chains, device="cpu").repeat_interleave(len(message))
        of_all_peers.append(torch.cat([chain[:, None], rows], 1))
    return _CandidateRows._make(torch.cat(of_all_peers).T.contiguous().unbind())


def _build_tables(
    documents: Documents,
    partition: SequencePartition,
    history_len: int,
    sendable: _CandidateRows,
    receivable: _CandidateRows,
) -> _RouteTables:
    """Compute which candidate rows are needed, and the tables of the needed rows.

    ``sendable``, ``receivable``: :func:`_candidate_rows` of this rank; ``history_len``:
    W - 1. If the host knows the documents, the tables leave out rows that no piece
    needs, and pieces without history.
    """
    fragments = fragments_of(documents, partition)
    own = partition.own_nodes
    rank = partition.rank
    # [n, C]: how many rows of history the first piece of each fragment has
    history_tokens = torch.where(
        fragments.state_enters, fragments.begin - fragments.first_document_begin, 0
    ).clamp(max=history_len)
    length = fragments.end - fragments.begin
    local_begin = fragments.local_begin[own]
    tokens = documents.total_tokens // partition.cp_size

    def needed_rows(rows: _CandidateRows) -> tuple[Tensor, Tensor, Tensor]:
        """Per row: whether a piece needs it, its index among the exchanged rows or -1,
        and how many tokens before the piece's first row it is."""
        sender = rows.receiving_node - rows.hops
        sender_tokens = length[sender, rows.chain]
        between = (
            fragments.begin[rows.receiving_node, rows.chain]
            - fragments.end[sender, rows.chain]
        )
        distance = between + rows.number_from_end
        is_needed = (rows.number_from_end <= sender_tokens) & (
            distance <= history_tokens[rows.receiving_node, rows.chain]
        )
        number = torch.arange(len(sender_tokens), device=sender_tokens.device)
        if documents.known_on_host:
            number = is_needed.cumsum(0) - 1
        return is_needed, torch.where(is_needed, number, -1), distance

    def of_pieces(x: Tensor) -> Tensor:
        """``x [h, C]`` as a flat tensor, chain by chain. On rank 0 it lacks the first
        node of each chain, which has no history."""
        with_history = x[1:] if rank == 0 else x
        return with_history.T.flatten()

    # HistoryTable.rows_before: the indices of each piece's history in the received
    # rows. ``target`` is an index in the flattened table [C, pieces, W - 1].
    h, C = local_begin.shape
    is_received, number, distance = needed_rows(receivable)
    pieces_per_chain = h
    piece = receivable.own_fragment
    if rank == 0:
        pieces_per_chain = h - 1
        piece = piece - 1
    target = (receivable.chain * pieces_per_chain + piece) * history_len + distance - 1
    before = _scatter(
        torch.where(is_received, target, -1),
        number,
        C * pieces_per_chain * history_len,
    ).view(-1, history_len)

    # HistoryTable.edge_tokens: the first W - 1 tokens of each piece with a history
    ahead = torch.arange(history_len, device=local_begin.device)  # 0 .. W - 2
    first_piece_end = torch.minimum(fragments.end, fragments.first_document_end)[own]
    local_end = first_piece_end - fragments.begin[own] + local_begin
    has_history = of_pieces(history_tokens[own]) > 0
    token = of_pieces(local_begin)[:, None] + ahead
    inside_piece = token < of_pieces(local_end)[:, None]
    edge = torch.where(has_history[:, None] & inside_piece, token, -1)

    # HistoryTable.gradient_additions: for each of the last W - 1 rows of this rank's
    # fragments, the returned gradients that are added to the row's gradient
    is_sent, number, _ = needed_rows(sendable)
    chain = sendable.chain
    fragment = sendable.own_fragment
    sender = sendable.receiving_node - sendable.hops
    row = (
        local_begin[fragment, chain] + length[sender, chain] - sendable.number_from_end
    )
    send_rows = row.clamp(0, max(tokens - 1, 0))
    W = history_len + 1
    # index in a table [C, h, W, W] by chain, fragment, from_end and hops
    target = ((chain * h + fragment) * W + sendable.number_from_end) * W + sendable.hops
    sources = _scatter(target, number, C * h * W * W).view(C * h, W, W)[:, 1:, 1:]
    # Sort the sources, so that the gradients of a row are added in a fixed order.
    sources = torch.where(sources < 0, len(target), sources).sort(-1).values
    fragment_end = local_begin.T.flatten() + length[own].T.flatten()
    row = fragment_end[:, None] - 1 - ahead
    row = torch.where(sources[..., 0] < len(target), row, -1)
    sources = torch.where(sources < len(target), sources, -1)
    additions = torch.cat([row[..., None], sources], -1).flatten(0, 1)
    if documents.known_on_host:
        before = before[has_history]
        edge = edge[has_history]
        send_rows = send_rows[is_sent]
        additions = additions[additions[:, 0] >= 0]
        additions = additions[:, : 1 + int((additions[:, 1:] >= 0).any(0).sum())]
    edge_index = _scatter(
        edge.flatten(), torch.arange(edge.numel(), device=edge.device), tokens
    )
    return _RouteTables(
        send_rows=send_rows,
        rows_before=before.int(),
        edge_tokens=edge.int(),
        edge_index=edge_index.int(),
        gradient_additions=additions.int(),
        is_sent=is_sent,
        is_received=is_received,
    )


def _scatter(indices: Tensor, values: Tensor, size: int) -> Tensor:
    """A table ``[size]`` of -1, with ``values[i]`` at ``indices[i]`` for every index
    but -1."""
    # One more entry takes the values of index -1. Indexing by a mask would make the
    # host wait for the device.
    table = torch.full((size + 1,), -1, dtype=torch.int64, device=indices.device)
    table[torch.where(indices < 0, size, indices)] = values
    return table[:size]


class HistoryExchange:
    """A :class:`~megatron_gdn.ops.front.history.HistoryLink` that exchanges rows
    between ranks; both methods are collectives."""

    def __init__(self, route: HistoryRoute, group: dist.ProcessGroup) -> None:
        """``route``: which rows go to and come from which ranks of ``group``."""
        self._route = route
        self._group = group

    def fetch(self, rows_sBC: Tensor) -> History:
        """Send rows of ``rows_sBC``, the convolution's columns of projection rows;
        return this rank's history."""
        route = self._route
        sent = rows_sBC.index_select(0, route.send_rows)
        received = exchange_rows(
            sent, route.send_counts, route.receive_counts, self._group
        )
        return History(received, route.history_table)

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        """Send back the gradients of received rows; return the gradients of the rows
        that `fetch` sent."""
        route = self._route
        return exchange_rows(
            d_rows_RBC, route.receive_counts, route.send_counts, self._group
        )

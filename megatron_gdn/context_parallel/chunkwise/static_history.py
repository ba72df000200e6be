"""Documents in fixed buffers, in zigzag: their pieces, chains of states and rows of history.

In zigzag a rank holds two fragments of each document, whatever its length. So the number of pieces,
the ranks of a chain and the messages are those of the most documents, and the host knows them. The
device alone knows lengths. Empty documents have empty pieces, behind the others. (The layouts that
cut the whole buffer have pieces where documents end, which the host plans.)

A piece reads the W - 1 rows before it. They are the last rows of the fragment before it, or of
several if fragments are shorter than that. So fragment j may get

    from fragment j - k its last W - k rows,   k = 1 .. W - 1

and messages have all these rows. Those that are not among the W - 1 before a piece are not read.

Legend: N documents at most, R ranks, P pieces of this rank that may have a history, W taps,
k fragments back, m rows from a fragment's end (1 is its last), slot 0 or 1: which of the two
fragments of a document that a rank holds.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ...ops.front.history import HistoryTable
from ...ops.host_tables import to_device
from ...ops.static_documents import StaticDocuments
from ..layouts import SequenceLayout
from .fragments import pieces_of
from .pieces import HistoryRoute


def static_pieces(documents: StaticDocuments, cp_size: int, layout: SequenceLayout) -> Documents:
    return pieces_of(documents, cp_size, layout, 0)


def static_history_route(
    documents: Any,
    R: int,
    rank: int,
    taps: int,
    layout: SequenceLayout = SequenceLayout.ZIGZAG,
) -> HistoryRoute | None:
    """As :func:`.pieces.history_route`; every fill writes the tables again."""
    if layout is not SequenceLayout.ZIGZAG:
        raise NotImplementedError(
            f"linear_cp_mode='chunkwise' takes documents in fixed buffers (StaticDocuments, for "
            f"CUDA graphs) with cp_layout='zigzag', not {layout.value!r}: there the host plans "
            f"which pieces of documents lie where. Use linear_cp_mode='headwise', or cut every "
            f"document in zigzag."
        )
    if taps == 1:
        return None
    key = (HistoryRoute, R, rank, taps)
    if key not in documents.plans:
        documents.plans[key] = _build(documents, R, rank, taps - 1)
    return documents.plans[key]


def _build(documents: StaticDocuments, R: int, rank: int, reach: int) -> HistoryRoute:
    N, device = documents.max_documents, documents.device
    send_counts, sent = _rows_of(rank, R, N, reach, by_giver=True)
    receive_counts, taken = _rows_of(rank, R, N, reach, by_giver=False)
    exchanged = (sent, _numbers(sent, N, reach), _numbers(taken, N, reach))
    fixed = _Fixed(rank, R, reach, int(rank == 0), *(to_device(x, device) for x in exchanged))
    key = ("history", R, rank, reach)
    made = documents.table(key, lambda these: _tables(these, fixed))
    return HistoryRoute(made.send_rows, send_counts, receive_counts, HistoryTable(*made[1:]))


def _rows_of(
    rank: int, R: int, N: int, reach: int, by_giver: bool
) -> tuple[tuple[int, ...], Tensor]:
    """How many rows this rank sends to each rank (else: receives from it), and these rows.

    int64 ``[4, rows]``: document, slot on this rank, k, m. Both ends of a message list its rows by
    document, then by the taker's slot, then oldest first.
    """
    of_one: list[list[tuple[int, int, int]]] = [[] for _ in range(R)]
    for taker in range(R):
        for taker_slot, j in enumerate((taker, 2 * R - 1 - taker)):
            for k in range(min(reach, j), 0, -1):
                giver, giver_slot = (j - k, 0) if j - k < R else (2 * R - 1 - (j - k), 1)
                own, other, slot = giver, taker, giver_slot
                if not by_giver:
                    own, other, slot = taker, giver, taker_slot
                if own == rank:
                    of_one[other] += [(slot, k, m) for m in range(reach - k + 1, 0, -1)]
    rows = [(n, *row) for message in of_one for n in range(N) for row in message]
    counts = tuple(N * len(message) for message in of_one)
    return counts, torch.tensor(rows, device="cpu").T.contiguous()


def _numbers(rows: Tensor, N: int, reach: int) -> Tensor:
    """int64 ``[2, W, W, N]`` by slot, k, m and document: the number of that row; -1: no such."""
    document, slot, k, m = rows
    found = torch.full((2, reach + 1, reach + 1, N), -1, device="cpu")
    found[slot, k, m, document] = torch.arange(rows.shape[1], device="cpu")
    return found


class _Fixed(NamedTuple):
    """What does not depend on the documents; tensors int64 on the device."""

    rank: int
    R: int
    reach: int  # W - 1
    skipped: int  # slots without a history: rank 0 holds the first fragment of every document
    sent: Tensor  # see _rows_of
    number_sent: Tensor  # see _numbers
    number_taken: Tensor


class _Tables(NamedTuple):
    """What every fill writes: the rows to send, and a :class:`HistoryTable`."""

    send_rows: Tensor
    before: Tensor
    edge: Tensor
    place: Tensor
    additions: Tensor


def _tables(documents: StaticDocuments, fixed: _Fixed) -> _Tables:
    R, tokens = fixed.R, documents.total_tokens // fixed.R
    offsets = documents.cu_seqlens[: documents.max_documents + 1].long()
    start, length = offsets[:-1] // R, offsets.diff() // (2 * R)  # of fragments on this rank
    sent, slot, _, from_end = fixed.sent
    row = start[sent] + slot * length[sent] + (length[sent] - from_end).clamp(min=0)
    before, edge = _pieces(start, length, fixed)
    flat = torch.where(edge < 0, tokens, edge).flatten()  # the place behind the last is for none
    place = torch.full((tokens + 1,), -1, device=documents.device)
    place[flat] = torch.arange(flat.numel(), device=documents.device)
    additions = _additions(start, length, fixed)
    found = (x.int() for x in (before, edge, place[:tokens], additions))
    return _Tables(row.clamp(max=tokens - 1), *found)


def _pieces(start: Tensor, length: Tensor, fixed: _Fixed) -> tuple[Tensor, Tensor]:
    """``before`` and ``edge`` of :class:`~megatron_gdn.ops.front.history.HistoryTable`."""
    number = torch.arange(len(start), device=start.device).view(-1, 1, 1)
    slot = torch.arange(fixed.skipped, 2, device=start.device).view(1, -1, 1)
    age = torch.arange(1, fixed.reach + 1, device=start.device)
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    fragment = fixed.rank + slot * (2 * fixed.R - 1 - 2 * fixed.rank)
    some = length.clamp(min=1)
    k = (age + some - 1) // some
    row = fixed.number_taken[slot, k, age - (k - 1) * some, number]
    before = torch.where(age <= fragment * length, row, -1)
    edge = torch.where(age <= length, start + slot * length + age - 1, -1)
    return before.flatten(0, 1), edge.flatten(0, 1)


def _additions(start: Tensor, length: Tensor, fixed: _Fixed) -> Tensor:
    """``[2 N (W - 1), W]``: the last W - 1 tokens of all 2 N pieces, -1 where there is none."""
    reach, device = fixed.reach, start.device
    number = torch.arange(len(start), device=device).view(-1, 1, 1)
    slot = torch.arange(2, device=device).view(1, 2, 1)
    start, length = start.view(-1, 1, 1), length.view(-1, 1, 1)
    from_end = torch.arange(reach, 0, -1, device=device)
    there = (from_end <= length).expand(-1, 2, -1)
    sources = []
    for k in range(1, reach + 1):
        needed = there & ((k - 1) * length + from_end <= reach)
        row = fixed.number_sent[slot, k, from_end, number]
        sources.append(torch.where(needed & (row >= 0), row, _NONE))
    source = torch.stack(sources, -1).sort(-1).values  # in the order of messages
    token = torch.where(there, start + slot * length + length - from_end, -1)
    return torch.cat([token[..., None], torch.where(source == _NONE, -1, source)], -1).flatten(0, 2)


_NONE = 2**62

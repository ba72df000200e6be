"""The pieces of documents in fixed buffers, and the chains of states between them; zigzag alone.

In zigzag a rank holds two fragments of each document, whatever its length. So the number of pieces,
the ranks of a chain and the messages are those of the most documents, and the host knows them. The
device alone knows lengths. Empty documents have empty pieces, behind the others.

(The layouts that cut the whole buffer have pieces where documents end, which the host plans.)

Legend: N documents at most, R context-parallel ranks.

The convolution's history across ranks for documents in fixed buffers; zigzag alone.

A piece reads the W - 1 rows before it. They are the last rows of the fragment before it, or of
several if fragments are shorter than that. So fragment j may get

    from fragment j - k its last W - k rows,   k = 1 .. W - 1

and messages of all these rows have sizes that the host knows. The device knows the length of a
fragment, and with it which rows are the W - 1 before a piece. The others are sent and not read.

Legend: N documents at most, R ranks, P pieces of this rank that may have a history, W taps,
k fragments back, m rows from a fragment's end (1 is its last), s this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ...ops.front.edges import Places, StaticHistoryTable
from ...ops.host_tables import to_device
from ...ops.static_documents import StaticDocuments
from ..headwise.route import require_fragments
from ..layouts import SequenceLayout, check_lengths
from .history import HistoryRoute
from .states import StateTable, chain_nodes


class StaticPieces(StaticDocuments):
    """The 2 N pieces that every rank holds. Each fill of ``whole`` writes their tables again.

    Piece 2 n + i is fragment i of the rank's two fragments of document n.
    """

    def __init__(self, whole: StaticDocuments, cp_size: int) -> None:
        key = ("pieces", cp_size)
        (boundaries,) = whole.table(key, lambda these: _boundaries(these, cp_size))
        vars(self).update(
            device=whole.device, max_documents=2 * whole.max_documents, boundaries=boundaries,
            plans={}, longest=whole.longest // (2 * cp_size), _whole=whole, _key=key,
            _tokens=whole.total_tokens // cp_size,
        )  # fmt: skip

    _whole: StaticDocuments
    _key: tuple[str, int]

    @property
    def stamp(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._whole.stamp

    def require_unchanged(self, stamp: Tensor, saved: Tensor) -> None:
        self._whole.require_unchanged(stamp, saved)

    def table[Made: tuple[Tensor, ...]](
        self, key: Any, make: Callable[[StaticDocuments], Made]
    ) -> Made:
        return self._whole.table((self._key, key), lambda _: make(self))


def _boundaries(documents: StaticDocuments, cp_size: int) -> tuple[Tensor]:
    length = documents.cu_seqlens[: documents.max_documents + 1].diff()
    require_fragments(documents, length, cp_size)
    ends = (length // (2 * cp_size))[:, None].expand(-1, 2).flatten().cumsum(0, dtype=torch.int32)
    return (torch.cat([ends.new_zeros(1), ends]),)


def static_pieces(documents: StaticDocuments, cp_size: int, layout: SequenceLayout) -> StaticPieces:
    """Made once for these buffers.

    Raises:
        NotImplementedError: another layout than zigzag.
        ValueError: the buffer does not divide; a document that does not fails on the device.
    """
    if layout is not SequenceLayout.ZIGZAG:
        raise NotImplementedError(
            f"linear_cp_mode='chunkwise' takes documents in fixed buffers (StaticDocuments, for "
            f"CUDA graphs) with cp_layout='zigzag', not {layout.value!r}: there the host plans "
            f"which pieces of documents lie where. Use linear_cp_mode='headwise', or cut every "
            f"document in zigzag."
        )
    key = (StaticPieces, cp_size)
    if key not in documents.plans:
        check_lengths((documents.total_tokens,), cp_size)
        documents.plans[key] = StaticPieces(documents, cp_size)
    return documents.plans[key]


def static_state_table(pieces: StaticPieces, cp_size: int) -> StateTable:
    """As :func:`.states.state_table`: N chains of 2 R nodes, one piece each.

    The maps of empty pieces are masked: kernels do not write them.
    """
    by_slot = torch.arange(pieces.max_documents, device="cpu").view(-1, 2).T.flatten()
    index = to_device(by_slot, pieces.device)
    (filled,) = pieces.table("filled", _filled)
    return StateTable(
        sequences=pieces, nodes=chain_nodes(cp_size, SequenceLayout.ZIGZAG), node_count=2,
        first=index, last=index, leavers=None, enters=filled, leaves=filled, passes=filled,
    )  # fmt: skip


def _filled(pieces: StaticDocuments) -> tuple[Tensor]:
    return ((pieces.boundaries.diff() > 0).view(-1, 2).T.reshape(-1, 1, 1, 1),)


class _Message(NamedTuple):
    """One row of each document: m rows from the end of the giver's fragment, for the taker's."""

    giver: int
    giver_slot: int  # which of the giver's two fragments
    taker: int
    taker_slot: int
    k: int
    m: int


@cache
def _messages(R: int, reach: int) -> tuple[_Message, ...]:
    """Of one document; by taker, its slot, and oldest row first."""

    def place(fragment: int) -> tuple[int, int]:
        return (fragment, 0) if fragment < R else (2 * R - 1 - fragment, 1)

    return tuple(
        _Message(*place(j - k), taker, slot, k, m)
        for taker in range(R)
        for slot, j in enumerate((taker, 2 * R - 1 - taker))
        for k in range(min(reach, j), 0, -1)
        for m in range(reach - k + 1, 0, -1)
    )


class _Rows(NamedTuple):
    """The rows that one rank sends, or receives.

    For each other rank, and then for each of the N documents: one row of every message.
    """

    groups: tuple[tuple[_Message, ...], ...]  # for each other rank, the messages of one document
    N: int

    @classmethod
    def grouped(
        cls, messages: list[_Message], by: Callable[[_Message], int], R: int, N: int
    ) -> _Rows:
        return cls(tuple(tuple(x for x in messages if by(x) == rank) for rank in range(R)), N)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(self.N * len(group) for group in self.groups)

    def columns(self, *names: str) -> Tensor:
        """int64 ``[1 + names, rows]``: the document of every row, and fields of its message."""
        rows = [
            (n, *(getattr(message, name) for name in names))
            for group in self.groups
            for n in range(self.N)
            for message in group
        ]
        return torch.tensor(rows, device="cpu").T

    def places(self, slot: str, reach: int) -> Tensor:
        """int64 ``[2, W, W, 2]`` by slot, k and m: where the rows of that message are.

        The row of document 0, and how many rows further that of the next document is; -1 if there
        is no such message.
        """
        found = torch.full((2, reach + 1, reach + 1, 2), -1, device="cpu")
        begin = 0
        for group in self.groups:
            for number, one in enumerate(group, begin):
                place = torch.tensor((number, len(group)), device="cpu")
                found[getattr(one, slot), one.k, one.m] = place
            begin += self.N * len(group)
        return found


def static_history_route(
    documents: StaticDocuments, R: int, rank: int, taps: int
) -> HistoryRoute | None:
    """As :func:`.history.history_route`; every fill writes the tables again."""
    if taps == 1:
        return None
    key = (HistoryRoute, R, rank, taps)
    if key not in documents.plans:
        documents.plans[key] = _build(documents, R, rank, taps - 1)
    return documents.plans[key]


def _build(documents: StaticDocuments, R: int, rank: int, reach: int) -> HistoryRoute:
    N, device = documents.max_documents, documents.device
    messages = _messages(R, reach)
    sent = _Rows.grouped([x for x in messages if x.giver == rank], lambda x: x.taker, R, N)
    taken = _Rows.grouped([x for x in messages if x.taker == rank], lambda x: x.giver, R, N)
    # The first fragment of a document has no history.
    slots = (0, 1) if rank else (1,)
    fixed = _Fixed.build(sent, taken, slots, rank, R, N, reach, device)
    key = ("history", R, rank, reach)
    made = documents.table(key, lambda these: _tables(these, fixed, R, reach))
    pieces = len(slots) * N
    buffer = Places(
        documents=Documents(tuple(range(0, (pieces + 1) * 2 * reach, 2 * reach)), device),
        history=fixed.history, arrived=made.arrived, again=fixed.again, redone=made.redone,
        slots=fixed.slots, read=made.read, received=made.received,
        known=made.known, real=made.real, used=made.used,
    )  # fmt: skip
    table = StaticHistoryTable(
        lines=torch.empty(pieces, reach + 2, dtype=torch.int64, device="meta"),
        pieces=made.pieces, additions=made.additions, places=buffer, distinct=made.distinct,
    )  # fmt: skip
    return HistoryRoute(made.send_rows, sent.counts, taken.counts, table)


class _Fixed(NamedTuple):
    """What does not depend on the documents, on the device.

    Attributes:
        sent: int64 ``[3, rows]`` of every row that is sent: document, slot, m.
        taken: int64 ``[4, rows]`` of every row received: document, piece of this rank, k, m.
        arrivals: where received rows lie, see :meth:`_Rows.places`; by the taker's slot.
        returns: where sent rows lie, likewise; by the giver's slot.
        slot: int64 ``[P / N]``, of the pieces of one document.
        fragment: int64 ``[P / N]``, likewise.
        with_history: bool ``[2]``, whether the pieces in a slot are among the P.
        history, again: rows of the small buffer, see :class:`~megatron_gdn.ops.front.edges.Places`.
        slots: int64 ``[P (W - 1)]``.
    """

    sent: Tensor
    taken: Tensor
    arrivals: Tensor
    returns: Tensor
    slot: Tensor
    fragment: Tensor
    with_history: Tensor
    history: Tensor
    again: Tensor
    slots: Tensor

    @classmethod
    def build(
        cls, sent: _Rows, taken: _Rows, slots: tuple[int, ...], rank: int, R: int, N: int,
        reach: int, device: torch.device,
    ) -> _Fixed:  # fmt: skip
        document, slot, k, m = taken.columns("taker_slot", "k", "m")
        piece = document * len(slots) + slot - slots[0]
        rows = torch.arange(len(slots) * N * 2 * reach, device="cpu").view(-1, 2, reach)
        fixed = cls(
            sent.columns("giver_slot", "m"),
            torch.stack([document, piece, k, m]),
            taken.places("taker_slot", reach),
            sent.places("giver_slot", reach),
            torch.tensor(slots, device="cpu"),
            torch.tensor([(rank, 2 * R - 1 - rank)[slot] for slot in slots], device="cpu"),
            torch.tensor([slot in slots for slot in (0, 1)], device="cpu"),
            rows[:, 0].flatten(),
            rows[:, 1].flatten(),
            torch.arange(len(slots) * N * reach, device="cpu"),
        )
        return cls(*(to_device(x.contiguous(), device) for x in fixed))


class _Tables(NamedTuple):
    """What every fill writes; see the classes that hold them."""

    pieces: Tensor
    additions: Tensor
    distinct: Tensor
    send_rows: Tensor
    arrived: Tensor
    known: Tensor
    redone: Tensor
    read: Tensor
    real: Tensor
    received: Tensor
    used: Tensor


def _tables(documents: StaticDocuments, fixed: _Fixed, R: int, reach: int) -> _Tables:
    offsets = documents.cu_seqlens[: documents.max_documents + 1].long()
    start, length = offsets[:-1] // R, offsets.diff() // (2 * R)  # of fragments on this rank
    pieces, history = _pieces(start, length, fixed, reach)
    additions = _additions(start, length, fixed, reach)
    arrived = history.flip(-1).flatten()  # oldest first, as rows follow each other in the buffer
    first, again = pieces[:, :1], torch.arange(reach, device=documents.device)
    real = (again < pieces[:, 1:2]).flatten()
    document, piece, k, m = fixed.taken
    age = (k - 1) * length[document] + m
    used = (m <= length[document]) & (age <= reach)
    sent, slot, from_end = fixed.sent
    row = start[sent] + slot * length[sent] + (length[sent] - from_end).clamp(min=0)
    return _Tables(
        pieces=pieces.int(),
        additions=additions.int(),
        # What is left out repeats the first, which document 0 always has, and writes the same.
        distinct=torch.where(
            additions[:, 0] < 0, 0, torch.arange(len(additions), device=row.device)
        ),
        send_rows=row.clamp(max=documents.total_tokens // R - 1),
        arrived=arrived.clamp(min=0),
        known=(arrived >= 0).view(-1, 1, 1),
        redone=torch.where(real, (first + again).flatten(), first[0]),
        read=torch.where(real, fixed.again, fixed.again[:1]),
        real=real.view(-1, 1, 1),
        received=torch.where(used, (2 * piece + 1) * reach - age, 0),
        used=used.view(-1, 1, 1),
    )


def _pieces(start: Tensor, length: Tensor, fixed: _Fixed, reach: int) -> tuple[Tensor, Tensor]:
    """Lines of :class:`~megatron_gdn.ops.front.edges.HistoryTable`, and their rows of history."""
    N, pieces = len(start), len(fixed.slot)
    age = torch.arange(1, reach + 1, device=start.device)
    some_N11 = length.clamp(min=1)[:, None, None]
    k = (age + some_N11 - 1) // some_N11
    m = age - (k - 1) * some_N11
    at, step = fixed.arrivals[fixed.slot[:, None], k, m].unbind(-1)
    row = at + step * torch.arange(N, device=start.device)[:, None, None]
    exists = age <= fixed.fragment[:, None] * length[:, None, None]
    history = torch.where(exists, row, -1).view(N * pieces, reach)
    first = (start[:, None] + fixed.slot * length[:, None]).view(-1, 1)
    redone = length.clamp(max=reach)[:, None].expand(N, pieces).reshape(-1, 1)
    return torch.cat([first, redone, history], 1), history


def _additions(start: Tensor, length: Tensor, fixed: _Fixed, reach: int) -> Tensor:
    """int64 ``[4 N (W - 1), 1 + W]``: the first and the last W - 1 tokens of all 2 N pieces.

    A token is -1 if it is in no piece, or among the first tokens too.
    """
    N, device = len(start), start.device
    number, slot = torch.arange(N, device=device).view(-1, 1, 1), torch.arange(2, device=device)
    slot, some = slot.view(1, 2, 1), length.view(-1, 1, 1)
    ahead = torch.arange(reach, device=device)
    offset = torch.cat([ahead.expand(N, 1, reach), some - reach + ahead], 2).expand(N, 2, -1)
    is_first = torch.arange(2 * reach, device=device) < reach
    there = torch.where(is_first, offset < some, offset >= reach)
    # Redone tokens: places of the pieces with a history follow each other.
    before = fixed.with_history.cumsum(0) - fixed.with_history.long()
    count = fixed.slot.numel()
    again = (number * count + before[slot]) * reach + offset
    sources = [torch.where(there & is_first & fixed.with_history[slot], again, _NONE)]
    from_end = some - offset
    for k in range(1, reach + 1):
        needed = there & ((k - 1) * some + from_end <= reach)
        at, step = fixed.returns[slot, k, from_end.clamp(0, reach)].unbind(-1)
        row = count * N * reach + at + step * number
        sources.append(torch.where(needed & (at >= 0), row, _NONE))
    source = torch.stack(sources, -1).sort(-1).values  # in the order of messages
    token = torch.where(there, start.view(-1, 1, 1) + slot * some + offset, -1)
    return torch.cat([token[..., None], torch.where(source == _NONE, -1, source)], -1).flatten(0, 2)


_NONE = 2**62

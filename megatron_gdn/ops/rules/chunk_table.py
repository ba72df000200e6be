"""Tables of the chunks of a batch and of groups of chunks, and the walk over a group.

The walk carries the state from chunk to chunk. At a chunk where a sequence begins, the
sequence's initial state replaces the carried state. In fixed buffers only the device
knows where sequences begin, so the walk includes the empty chunks at the end.

Legend: N sequences (in fixed buffers also the empty sequences), n chunks, C tokens of a
chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..documents import Documents, chunk_places_of
from ..host_tables import to_device

CHUNK = 64  # tokens
# Chunks times heads of a group: enough products of 64 x 64 to fill a GPU. The number is
# not a power of two, since documents in a buffer of 2^15 tokens have a few more chunks
# than 2^15 / 64, and these few chunks would need another group.
_PRODUCTS_PER_GROUP = 1536


def chunks_at_once(heads: int) -> int:
    """The number of chunks of a group, which are computed together, for ``heads``
    heads."""
    return max(1, _PRODUCTS_PER_GROUP // heads)


def fills_last_group(device: torch.device) -> bool:
    """Whether on ``device`` empty chunks give the last group the size of the other
    groups."""
    return device.type == "cuda"


@dataclass(frozen=True, eq=False)
class ChunkGroup:
    """Consecutive chunks that are computed together; each chunk has C slots for
    tokens."""

    slots: slice  # the group's slots in the table
    chunks: int  # the number of chunks that :meth:`walk` visits; later chunks are empty
    # int64, the token in each slot; empty slots repeat some token
    token: Tensor | slice
    empty: Tensor | None  # bool, whether each slot is empty; None: no slot is empty
    # the group's tokens in the buffer; None: only the device knows
    tokens: slice | None = None
    slot: Tensor | None = None  # int64, the slot of each token; None: no slot is empty
    # int64: the chunks in which a sequence begins (ends), and the numbers of those
    # sequences.
    begin_index: tuple[Tensor, Tensor] | None = None
    end_index: tuple[Tensor, Tensor] | None = None
    begins: tuple[int, ...] = ()  # begin_index[0] on the host
    ends: tuple[int, ...] = ()  # end_index[0] on the host

    def taken(self, states: Tensor, *, ends: bool = False) -> Tensor:
        """The ``states`` of the sequences that begin (with ``ends``: that end) in the
        group."""
        if ends:
            index = self.end_index
        else:
            index = self.begin_index
        if index is None:
            return states[:0]
        return states.index_select(0, index[1])

    def put(self, states: Tensor, new: Tensor, *, begins: bool = False) -> None:
        """Set the states of sequences that end (with ``begins``: begin) in the group to
        ``new``."""
        if begins:
            index = self.begin_index
        else:
            index = self.end_index
        if index is not None:
            states.index_copy_(0, index[1], new)

    def walk(
        self,
        through: Tensor,
        states: Tensor,
        carried: Tensor | None,
        given: Tensor,
        back: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Apply ``S -> through @ S + added`` to each chunk in order; ``back``: in reverse
        order.

        Args:
            through: ``[n, H, K, K]``; or ``[n, H, K or 1, 1]``, a factor of each row.
            states: ``[n + 1, H, K, V]``, overwritten; ``added`` of the n chunks is in
                ``states[1:]`` (``back``: in ``states[:-1]``).
            carried: ``[H, K, V]``, the state from the group before (``back``: the group
                after); None if a sequence begins with the group.
            given: what :meth:`taken` returns; ``back``: what ``taken(.., ends=True)``
                returns.

        Returns:
            The state that enters every chunk ``[n, H, K, V]``, the state that leaves
            the group, and the states ``new`` for :meth:`put`.
        """
        entering, leaving = (
            (states[1:], states[:-1]) if back else (states[:-1], states[1:])
        )
        opens = self.begin_index
        closes = self.end_index
        closing = self.ends
        if back:
            opens, closes, closing = closes, opens, self.begins
        # A sequence's final state and the next sequence's initial state have the same
        # place in ``states``, so final states have a buffer of their own. This buffer
        # has only this group's sequences: in a buffer of all sequences a state's
        # alignment, and so its last bits on a CPU, would depend on other sequences.
        if closes is None:
            left = leaving[:0]
        else:
            left = leaving.index_select(0, closes[0])
        if carried is not None:
            entering[self.chunks - 1 if back else 0].copy_(carried)
        if opens is not None:
            entering.index_copy_(0, opens[0], given)
        into = entering.unbind(0)
        out_of = leaving.unbind(0)
        factors = through.unbind(0)
        places = {c: place for place, c in enumerate(closing)}
        step = _multiply_add(through)
        for c in self._order(back):
            step(left[places[c]] if c in places else out_of[c], factors[c], into[c])
        return entering, out_of[0 if back else self.chunks - 1].clone(), left

    def _order(self, back: bool) -> range:
        """The numbers of the chunks in the order of the walk."""
        if back:
            return range(self.chunks)[::-1]
        return range(self.chunks)


def _multiply_add(through: Tensor) -> Callable:
    """torch's in-place method that adds ``through S``, for matrices or row factors
    ``through``."""
    if through.shape[-1] > 1:
        return torch.Tensor.baddbmm_
    return torch.Tensor.addcmul_


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupOnDevice(ChunkGroup):
    """A group in fixed buffers: only the device knows which chunk belongs to which
    sequence."""

    sequence: Tensor  # int64 [n], the sequence of each chunk
    begin: Tensor  # bool [n], whether a sequence begins with the chunk
    end: Tensor  # bool [n], whether a sequence ends with the chunk
    # int64 [N], each sequence's first chunk, clamped to the group's chunks
    first: Tensor
    last: Tensor  # int64 [N], each sequence's last chunk, clamped to the group's chunks
    # bool [N, 1, 1, 1], whether the sequence's first chunk is in the group
    first_here: Tensor
    # bool [N, 1, 1, 1], whether the sequence's last chunk is in the group
    last_here: Tensor

    def taken(self, states: Tensor, *, ends: bool = False) -> Tensor:
        return states

    def put(self, states: Tensor, new: Tensor, *, begins: bool = False) -> None:
        states.copy_(
            torch.where(self.first_here if begins else self.last_here, new, states)
        )

    def walk(
        self,
        through: Tensor,
        states: Tensor,
        carried: Tensor | None,
        given: Tensor,
        back: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        if back:
            leaving = states[:-1]
        else:
            leaving = states[1:]
        step = _multiply_add(through)
        opens, closes = (self.end, self.first) if back else (self.begin, self.last)
        entering = given.index_select(0, self.sequence)
        if carried is None:
            S = torch.zeros_like(given[0])
        else:
            S = carried
        for c in self._order(back):
            S = entering[c].copy_(torch.where(opens[c], entering[c], S))
            S = step(leaving[c], through[c], S)
        return entering, S.clone(), leaving.index_select(0, closes)


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The chunks of N sequences, sequence after sequence.

    On a GPU all groups have one size; empty chunks fill up the last group. So the
    products have the same shapes in every batch, and a sequence's bits do not depend on
    other sequences.
    """

    chunk_size: int
    sequences: int
    groups: tuple[ChunkGroup, ...]
    # int64 [T], each token's slot; None if the groups have ``tokens``
    slot: Tensor | None

    @cached_property
    def one_chunk_per_sequence(self) -> bool:
        """Whether every chunk is a whole sequence, as in a decode step on the grid."""
        return all(len(group.begins) == group.chunks for group in self.groups)

    @staticmethod
    def of(
        documents: Documents,
        chunk_size: int,
        heads: int,
        one_chunk_groups: bool = False,
    ) -> ChunkTable:
        """The cached table; with ``one_chunk_groups`` a group on a CPU has one
        chunk."""
        fill_up = fills_last_group(documents.device)
        if one_chunk_groups and not fill_up:
            chunks_per_group = 1
        else:
            chunks_per_group = chunks_at_once(heads)
        return documents.keep(_build_table, chunk_size, chunks_per_group, fill_up)

    def chunks_in(self, group: ChunkGroup) -> int:
        """The number of chunks of the group, including empty chunks."""
        return (group.slots.stop - group.slots.start) // self.chunk_size

    def to_chunks(
        self,
        x: Tensor,
        group: ChunkGroup,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """Copy the group's tokens of ``x [B, T, H, ...]`` to chunks
        ``[n, H, C, ...]``."""
        rows = x.flatten(0, 1)[group.token]
        if group.empty is not None:  # zeros neither change nor decay a state
            rows.masked_fill_(group.empty.view((-1,) + (1,) * (rows.dim() - 1)), 0)
        chunks = rows.unflatten(0, (-1, self.chunk_size)).movedim(1, 2)
        if out is None:
            out = torch.empty(chunks.shape, dtype=dtype, device=x.device)
        return out.copy_(chunks)

    def rows_like(self, x: Tensor) -> Tensor:
        """An uninitialised tensor for :meth:`put`, with the heads and dtype of
        ``x``."""
        if self.groups:
            last = self.groups[-1]
        else:
            last = None
        if last is None:
            count = 0
        else:
            count = (last.tokens or last.slots).stop
        return x.new_empty((count,) + x.shape[2:])

    def put(self, rows: Tensor, group: ChunkGroup, chunks: Tensor) -> None:
        """Write chunks ``[n * H, C]`` or ``[n * H, C, D]`` to the group's tokens in
        ``rows``."""
        self.put_tokens(
            rows, group, chunks.unflatten(0, (-1, rows.shape[1])).movedim(2, 1)
        )

    def put_tokens(self, rows: Tensor, group: ChunkGroup, chunks: Tensor) -> None:
        """Write chunks ``[n, C, ...]`` to the group's tokens in ``rows``."""
        # the group has empty slots, which this copy leaves out
        if group.slot is not None:
            rows[group.tokens] = (
                chunks.flatten(0, 1).index_select(0, group.slot).to(rows.dtype)
            )
            return
        to = rows[group.slots if group.tokens is None else group.tokens]
        to.unflatten(0, (-1, self.chunk_size)).copy_(chunks)

    def to_tokens(self, rows: Tensor, like: Tensor) -> Tensor:
        """The ``rows`` that :meth:`put` wrote, in token order and in the shape of
        ``like``."""
        return (rows if self.slot is None else rows.index_select(0, self.slot)).view(
            like.shape
        )


class _TokenPlaces(NamedTuple):
    """The places of tokens in n chunks; on a GPU empty chunks at the end fill up the
    last group."""

    slot: Tensor  # int64 [T], the slot of each token
    # int64 [n * C], the token in each slot; empty slots repeat some token
    token: Tensor
    empty: Tensor  # bool [n * C]
    sequence: Tensor  # int64 [n]
    begins: Tensor  # bool [n], whether the chunk is the first of its sequence
    ends: Tensor  # bool [n], whether the chunk is the last of its sequence
    first: Tensor  # int64 [N], the first chunk of each sequence
    last: Tensor  # int64 [N], the last chunk of each sequence
    filled: Tensor  # bool [N], whether the sequence has tokens


def _token_places(documents: Documents, C: int, chunk_count: int) -> _TokenPlaces:
    """The tokens' places in ``chunk_count`` chunks of C tokens, with empty chunks at
    the end."""
    starts = documents.starts.long()
    document_T = documents.document_T()
    offset, indices = (x.long() for x in chunk_places_of(documents, C))
    device = starts.device
    T = documents.total_tokens
    sequence, place = F.pad(indices, (0, 0, 0, chunk_count - len(indices))).unbind(1)
    number = torch.arange(chunk_count, device=device)
    real = number < offset[-1]
    sequence = torch.where(real, sequence, documents.sequences - 1)
    token = (starts[sequence] + place * C)[:, None] + torch.arange(C, device=device)
    position_T = torch.arange(T, device=device) - starts[document_T]
    return _TokenPlaces(
        slot=offset[document_T] * C + position_T,
        token=token.clamp(max=T - 1).flatten(),
        empty=(~real[:, None] | (token >= starts[sequence + 1][:, None])).flatten(),
        sequence=sequence,
        begins=real & (number == offset[sequence]),
        ends=real & (number + 1 == offset[sequence + 1]),
        first=offset[:-1],
        last=offset[1:] - 1,
        filled=offset[1:] > offset[:-1],
    )


def _build_table(
    documents: Documents, C: int, chunks_per_group: int, fill_up: bool
) -> ChunkTable:
    """The table in groups of ``chunks_per_group``; ``fill_up``: fill the last with
    empty chunks."""
    n, N = documents.max_chunks(C), max(documents.sequences, 1)
    if n == 0:
        return ChunkTable(C, N, (), None)
    if fill_up:
        chunk_count = -(-n // chunks_per_group) * chunks_per_group
    else:
        chunk_count = n
    places = documents.keep_tensors(_token_places, C, chunk_count, move=False)
    groups = []
    for start in range(0, n, chunks_per_group):
        stop = min(start + chunks_per_group, chunk_count)
        if documents.known_on_host:
            groups.append(
                _group(places, C, start, stop, min(stop, n), documents.device)
            )
        else:
            groups.append(
                _group_on_device(documents, places, C, chunk_count, start, stop)
            )
    return ChunkTable(
        C, N, tuple(groups), None if documents.known_on_host else places.slot
    )


def _group(
    places: _TokenPlaces,
    C: int,
    start: int,
    stop: int,
    first_empty: int,
    device: torch.device,
) -> ChunkGroup:
    """The group of chunks ``start`` to ``stop``; chunks number ``first_empty`` and on
    are empty."""
    slots = slice(start * C, stop * C)
    chunks = slice(start, stop)
    token = places.token[slots]
    empty = places.empty[slots]
    of_tokens = (~empty).nonzero()[:, 0]
    first = int(token[0])
    full = len(of_tokens) == len(token)
    tokens = slice(first, first + len(of_tokens))

    def index(here: Tensor) -> tuple[tuple[int, ...], tuple[Tensor, Tensor] | None]:
        """Chunks where ``here`` is True, as ints; these chunks and their sequences, as
        tensors."""
        chunk = here[chunks].nonzero()[:, 0]
        if not len(chunk):
            return (), None
        chunks_and_sequences = torch.stack([chunk, places.sequence[chunks][chunk]])
        of, sequences = to_device(chunks_and_sequences, device)
        return tuple(chunk.tolist()), (of, sequences)

    begins, begin_index = index(places.begins)
    ends, end_index = index(places.ends)
    return ChunkGroup(
        slots=slots,
        chunks=first_empty - start,
        token=tokens if full else to_device(token, device),
        empty=None if full else to_device(empty, device),
        tokens=tokens,
        slot=None if full else to_device(of_tokens, device),
        begin_index=begin_index,
        end_index=end_index,
        begins=begins,
        ends=ends,
    )


def _sequences_of_group(
    documents: Documents, C: int, chunk_count: int, start: int, stop: int
) -> tuple[Tensor, ...]:
    """A group's fields ``first``, ``last``, ``first_here`` and ``last_here``."""
    places = documents.keep_tensors(_token_places, C, chunk_count, move=False)
    both = places.first, places.last
    inside = [(chunk - start).clamp(0, stop - start - 1) for chunk in both]
    here = [places.filled & (chunk >= start) & (chunk < stop) for chunk in both]
    return tuple(inside + [x.view(-1, 1, 1, 1) for x in here])


def _group_on_device(
    documents: Documents,
    places: _TokenPlaces,
    C: int,
    chunk_count: int,
    start: int,
    stop: int,
) -> ChunkGroup:
    """The group of chunks ``start`` to ``stop`` of fixed buffers."""
    slots = slice(start * C, stop * C)
    chunks = slice(start, stop)
    first, last, first_here, last_here = documents.keep_tensors(
        _sequences_of_group, C, chunk_count, start, stop
    )
    return GroupOnDevice(
        slots,
        stop - start,
        places.token[slots],
        places.empty[slots],
        sequence=places.sequence[chunks],
        begin=places.begins[chunks],
        end=places.ends[chunks],
        first=first,
        last=last,
        first_here=first_here,
        last_here=last_here,
    )

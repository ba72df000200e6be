"""Tables of a batch's chunks, and the states before and after each chunk.

The tables divide the chunks into groups. A group is computed at one time, so its size
bounds the memory. Each chunk has C places for tokens; the places after the last token
of a sequence are empty. :meth:`ChunkGroup.pass_states` passes the state from chunk to
chunk. Where a sequence begins, its initial state replaces the passed state. In fixed
buffers only the device knows where sequences begin, so the empty chunks at the end are
computed too.

Legend: N sequences (in fixed buffers also the empty sequences), n chunks of a group, C
tokens of a chunk, T tokens of the buffer, H heads.
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
# not a power of two: documents in a buffer of 2^15 tokens have a few more chunks than
# 2^15 / 64. With a power of two these few chunks would need another group.
_PRODUCTS_PER_GROUP = 1536


def chunks_at_once(heads: int) -> int:
    """How many chunks a group has if there are ``heads`` heads."""
    return max(1, _PRODUCTS_PER_GROUP // heads)


def fills_last_group(device: torch.device) -> bool:
    """Whether, on this device, empty chunks are added until the last group has the size
    of the other groups. :class:`ChunkTable` says why."""
    return device.type == "cuda"


class ChunkSequences(NamedTuple):
    """The chunks of a group in which sequences begin (or end), and these sequences."""

    chunks: Tensor  # int64, the number of each chunk in the group
    sequences: Tensor  # int64, the sequence that begins (or ends) in each chunk


class PassedStates(NamedTuple):
    """The result of :meth:`ChunkGroup.pass_states`."""

    entering_states: Tensor  # [n, H, K, V], the state that enters each chunk
    carried_state: Tensor  # [H, K, V], the state that leaves the group
    final_states: Tensor  # the states that leave the sequences which end in the group


@dataclass(frozen=True, eq=False)
class ChunkGroup:
    """Successive chunks that are computed together; each chunk has C places for
    tokens."""

    places: slice  # the group's places in the table
    # the number of chunks that :meth:`pass_states` visits; later chunks are empty
    visited_chunk_count: int
    # int64, the token at each place; an empty place has the index of some token
    token_of_place: Tensor | slice
    # bool, whether each place is empty; None: no place is empty
    empty_places: Tensor | None
    # the group's tokens in the buffer; None: the host does not know them
    tokens: slice | None = None
    # int64, the place of each token in the group; None: no place is empty
    place_of_token: Tensor | None = None
    # None: no sequence begins (or ends) in the group
    beginnings: ChunkSequences | None = None
    endings: ChunkSequences | None = None
    beginnings_on_host: tuple[int, ...] = ()  # ``beginnings.chunks`` on the host
    endings_on_host: tuple[int, ...] = ()  # ``endings.chunks`` on the host

    def select_states(self, states: Tensor, *, ends: bool = False) -> Tensor:
        """The entries of ``states [N, ...]`` for the sequences that begin in the group.

        With ``ends``, for the sequences that end in the group.
        """
        if ends:
            found = self.endings
        else:
            found = self.beginnings
        if found is None:
            return states[:0]
        return states.index_select(0, found.sequences)

    def write_states(
        self, states: Tensor, new: Tensor, *, begins: bool = False
    ) -> None:
        """Write ``new`` to ``states [N, ...]`` for the sequences that end in the group.

        With ``begins``, for the sequences that begin in the group.
        """
        if begins:
            found = self.beginnings
        else:
            found = self.endings
        if found is not None:
            states.index_copy_(0, found.sequences, new)

    def pass_states(
        self,
        through: Tensor,
        states: Tensor,
        carried: Tensor | None,
        given: Tensor,
        back: bool = False,
    ) -> PassedStates:
        """Apply ``S -> through @ S + added`` chunk after chunk, for all heads.

        With ``back`` the last chunk is first, as for the gradients of states.

        Args:
            through: ``[n, H, K, K]``; or ``[n, H, K or 1, 1]``, a factor of each row or
                of the whole state.
            states: ``[n + 1, H, K, V]``, overwritten. At first ``states[1:]`` holds
                ``added`` of the chunks; with ``back`` ``states[:-1]`` does.
            carried: ``[H, K, V]``, the state from the group before; with ``back`` from
                the group after. None: no group is there.
            given: the states with which sequences begin, ``select_states(initial)``;
                with ``back`` the gradients of the states with which sequences end,
                ``select_states(d_final, ends=True)``.
        """
        if back:
            entering = states[1:]
            leaving = states[:-1]
            starting = self.endings
            stopping = self.beginnings
            stop_chunks = self.beginnings_on_host
            first = self.visited_chunk_count - 1
            last = 0
        else:
            entering = states[:-1]
            leaving = states[1:]
            starting = self.beginnings
            stopping = self.endings
            stop_chunks = self.endings_on_host
            first = 0
            last = self.visited_chunk_count - 1
        # A sequence's final state and the next sequence's initial state have the same
        # index in ``states``, so final states have a buffer of their own. It has only
        # this group's sequences. In a buffer of all sequences a state's alignment, and
        # so its last bits on a CPU, would depend on other sequences.
        if stopping is None:
            final = leaving[:0]
        else:
            final = leaving.index_select(0, stopping.chunks)
        if carried is not None:
            entering[first].copy_(carried)
        if starting is not None:
            entering.index_copy_(0, starting.chunks, given)
        state_into = entering.unbind(0)
        state_out_of = leaving.unbind(0)
        factors = through.unbind(0)
        index_in_final = {chunk: index for index, chunk in enumerate(stop_chunks)}
        add_product = _method_that_adds_product(through)
        for c in self._chunk_order(back):
            if c in index_in_final:
                target = final[index_in_final[c]]
            else:
                target = state_out_of[c]
            add_product(target, factors[c], state_into[c])
        return PassedStates(entering, state_out_of[last].clone(), final)

    def _chunk_order(self, back: bool) -> range:
        """The numbers of the chunks, in the order in which a state passes them."""
        if back:
            return range(self.visited_chunk_count)[::-1]
        return range(self.visited_chunk_count)


def _method_that_adds_product(through: Tensor) -> Callable:
    """torch's in-place method that adds ``through S``: ``baddbmm_`` if ``through`` has
    matrices, ``addcmul_`` if it has row factors."""
    if through.shape[-1] > 1:
        return torch.Tensor.baddbmm_
    return torch.Tensor.addcmul_


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupOnDevice(ChunkGroup):
    """A group in fixed buffers: only the device knows which chunk belongs to which
    sequence."""

    sequence_of_chunk: Tensor  # int64 [n]
    begins_sequence: Tensor  # bool [n], whether a sequence begins with the chunk
    ends_sequence: Tensor  # bool [n], whether a sequence ends with the chunk
    # int64 [N], the first and the last chunk of each sequence, clamped to the group
    first_chunk: Tensor
    last_chunk: Tensor
    # bool [N, 1, 1, 1], whether the sequence's first (last) chunk is in the group
    has_first_chunk: Tensor
    has_last_chunk: Tensor

    def select_states(self, states: Tensor, *, ends: bool = False) -> Tensor:
        """All of ``states [N, ...]``: the host does not know which sequences begin
        here."""
        return states

    def write_states(
        self, states: Tensor, new: Tensor, *, begins: bool = False
    ) -> None:
        """Write ``new [N, ...]`` to ``states`` for the sequences that end in the group
        (with ``begins``, for the sequences that begin in it)."""
        if begins:
            is_here = self.has_first_chunk
        else:
            is_here = self.has_last_chunk
        states.copy_(torch.where(is_here, new, states))

    def pass_states(
        self,
        through: Tensor,
        states: Tensor,
        carried: Tensor | None,
        given: Tensor,
        back: bool = False,
    ) -> PassedStates:
        """As :meth:`ChunkGroup.pass_states`, for ``given`` states ``[N, H, K, V]`` of
        all sequences. The device chooses in each chunk between the carried and the
        given state.

        ``final_states`` of the result has one state for each of the N sequences. Only
        the states of the sequences that end in the group (with ``back``, begin in it)
        are meaningful.
        """
        if back:
            leaving = states[:-1]
            starts = self.ends_sequence
            stop_chunk = self.first_chunk
        else:
            leaving = states[1:]
            starts = self.begins_sequence
            stop_chunk = self.last_chunk
        add_product = _method_that_adds_product(through)
        # At first ``entering`` holds, for each chunk, the given state of its sequence.
        entering = given.index_select(0, self.sequence_of_chunk)
        if carried is None:
            S = torch.zeros_like(given[0])
        else:
            S = carried
        for c in self._chunk_order(back):
            S = entering[c].copy_(torch.where(starts[c], entering[c], S))
            S = add_product(leaving[c], through[c], S)
        return PassedStates(entering, S.clone(), leaving.index_select(0, stop_chunk))


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The chunks of N sequences, sequence after sequence.

    On a GPU all groups have one size; empty chunks fill up the last group. So the
    products have the same shapes in every batch, and a sequence's bits do not depend on
    other sequences.
    """

    chunk_size: int
    sequence_count: int
    groups: tuple[ChunkGroup, ...]
    # int64 [T], the place of each token; None if the groups have ``tokens``
    place_of_token: Tensor | None

    @cached_property
    def one_chunk_per_sequence(self) -> bool:
        """Whether every chunk is a whole sequence, as in a decode step on the grid."""
        return all(
            len(group.beginnings_on_host) == group.visited_chunk_count
            for group in self.groups
        )

    @staticmethod
    def of(
        documents: Documents,
        chunk_size: int,
        heads: int,
        one_chunk_groups: bool = False,
    ) -> ChunkTable:
        """The table of ``documents``, which have a token, in chunks of ``chunk_size``
        tokens. It is stored on ``documents``.

        The number of ``heads`` decides how many chunks a group has. With
        ``one_chunk_groups`` a group on a CPU has one chunk. On a CPU, the rounding of
        one matrix in a batched product depends on the matrix's address, and so on the
        other chunks of its group.
        """
        fill_up = fills_last_group(documents.device)
        if one_chunk_groups and not fill_up:
            chunks_per_group = 1
        else:
            chunks_per_group = chunks_at_once(heads)
        return documents.keep(_build_table, chunk_size, chunks_per_group, fill_up)

    def chunks_in(self, group: ChunkGroup) -> int:
        """The number of chunks of the group, including empty chunks."""
        return (group.places.stop - group.places.start) // self.chunk_size

    def to_chunks(
        self,
        x: Tensor,
        group: ChunkGroup,
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """Copy the group's tokens of ``x [B, T, H, ...]`` to chunks ``[n, H, C, ...]``
        in ``dtype``, or to ``out``; empty places get zeros."""
        rows = x.flatten(0, 1)[group.token_of_place]
        if group.empty_places is not None:  # zeros neither change nor decay a state
            one_per_row = (-1,) + (1,) * (rows.dim() - 1)
            rows.masked_fill_(group.empty_places.view(one_per_row), 0)
        chunks = rows.unflatten(0, (-1, self.chunk_size)).movedim(1, 2)
        if out is None:
            out = torch.empty(chunks.shape, dtype=dtype, device=x.device)
        return out.copy_(chunks)

    def new_rows(self, x: Tensor) -> Tensor:
        """Uninitialised rows for :meth:`write_chunks`, one per token or per place.
        Heads and dtype are those of ``x [B, T, H, ...]``."""
        last = self.groups[-1]
        # rows of tokens, or of places if only the device knows the tokens
        count = (last.tokens or last.places).stop
        return x.new_empty((count,) + x.shape[2:])

    def write_head_chunks(
        self, rows: Tensor, group: ChunkGroup, chunks: Tensor
    ) -> None:
        """Write chunks ``[n * H, C, ...]`` to the group's tokens in ``rows``."""
        by_head = chunks.unflatten(0, (-1, rows.shape[1]))
        self.write_chunks(rows, group, by_head.movedim(2, 1))

    def write_chunks(self, rows: Tensor, group: ChunkGroup, chunks: Tensor) -> None:
        """Write chunks ``[n, C, ...]`` to the group's tokens in ``rows``."""
        if group.place_of_token is not None:  # some places are empty: leave them out
            of_tokens = chunks.flatten(0, 1).index_select(0, group.place_of_token)
            rows[group.tokens] = of_tokens.to(rows.dtype)
            return
        if group.tokens is None:  # fixed buffers: ``rows`` has a row per place
            target = rows[group.places]
        else:
            target = rows[group.tokens]
        target.unflatten(0, (-1, self.chunk_size)).copy_(chunks)

    def to_tokens(self, rows: Tensor, like: Tensor) -> Tensor:
        """The ``rows`` that :meth:`write_chunks` wrote, in token order and in the shape
        of ``like``."""
        if self.place_of_token is not None:
            rows = rows.index_select(0, self.place_of_token)
        return rows.view(like.shape)


class _TokenPlaces(NamedTuple):
    """The places of tokens in n chunks; on a GPU empty chunks at the end fill up the
    last group."""

    place_of_token: Tensor  # int64 [T]
    # int64 [n * C], the token at each place; an empty place has the index of some token
    token_of_place: Tensor
    empty_places: Tensor  # bool [n * C]
    sequence_of_chunk: Tensor  # int64 [n]
    begins_sequence: Tensor  # bool [n], whether the chunk is the first of its sequence
    ends_sequence: Tensor  # bool [n], whether the chunk is the last of its sequence
    first_chunk: Tensor  # int64 [N], the first chunk of each sequence
    last_chunk: Tensor  # int64 [N], the last chunk of each sequence
    has_tokens: Tensor  # bool [N], whether the sequence has tokens


def _find_token_places(documents: Documents, C: int, chunk_count: int) -> _TokenPlaces:
    """The tokens' places in ``chunk_count`` chunks of C tokens, with empty chunks at
    the end."""
    starts = documents.starts.long()
    document_T = documents.document_T()
    # offset: each sequence's first chunk; indices: each chunk's sequence and number
    offset, indices = (x.long() for x in chunk_places_of(documents, C))
    device = starts.device
    T = documents.total_tokens
    missing = chunk_count - len(indices)  # chunks that only fill up the last group
    sequence, number_in_sequence = F.pad(indices, (0, 0, 0, missing)).unbind(1)
    number = torch.arange(chunk_count, device=device)
    real = number < offset[-1]  # whether the chunk has tokens
    first_token = starts[sequence] + number_in_sequence * C
    token = first_token[:, None] + torch.arange(C, device=device)
    after_sequence = token >= starts[sequence + 1][:, None]
    position_T = torch.arange(T, device=device) - starts[document_T]
    return _TokenPlaces(
        place_of_token=offset[document_T] * C + position_T,
        token_of_place=token.clamp(max=T - 1).flatten(),
        empty_places=(~real[:, None] | after_sequence).flatten(),
        sequence_of_chunk=sequence,
        begins_sequence=real & (number == offset[sequence]),
        ends_sequence=real & (number + 1 == offset[sequence + 1]),
        first_chunk=offset[:-1],
        last_chunk=offset[1:] - 1,
        has_tokens=offset[1:] > offset[:-1],
    )


def _build_table(
    documents: Documents, C: int, chunks_per_group: int, fill_up: bool
) -> ChunkTable:
    """The table in groups of ``chunks_per_group`` chunks; with ``fill_up`` empty chunks
    give the last group this size too."""
    n = documents.max_chunks(C)
    if fill_up:
        chunk_count = -(-n // chunks_per_group) * chunks_per_group
    else:
        chunk_count = n
    # The places are on the host, which reads them; in fixed buffers they are on the
    # device.
    places = documents.keep_tensors(_find_token_places, C, chunk_count, move=False)
    groups = []
    for start in range(0, n, chunks_per_group):
        stop = min(start + chunks_per_group, chunk_count)
        if documents.known_on_host:
            group = _build_group(places, C, start, stop, min(stop, n), documents.device)
        else:
            group = _build_group_on_device(
                documents, places, C, chunk_count, start, stop
            )
        groups.append(group)
    place_of_token = None
    if not documents.known_on_host:  # the groups do not have ``tokens``
        place_of_token = places.place_of_token
    return ChunkTable(C, documents.sequences, tuple(groups), place_of_token)


def _build_group(
    places: _TokenPlaces,
    C: int,
    start: int,
    stop: int,
    first_empty: int,
    device: torch.device,
) -> ChunkGroup:
    """The group of chunks ``start`` to ``stop``, for documents that the host knows.
    From number ``first_empty`` on, chunks are empty. ``places`` are the places of all
    chunks."""
    of_group = slice(start * C, stop * C)
    token = places.token_of_place[of_group]
    empty = places.empty_places[of_group]
    place_of_token = (~empty).nonzero()[:, 0]
    first = int(token[0])  # a group begins with a chunk that has tokens
    tokens = slice(first, first + len(place_of_token))
    beginnings_on_host, beginnings = _chunks_where(
        places.begins_sequence, places, start, stop, device
    )
    endings_on_host, endings = _chunks_where(
        places.ends_sequence, places, start, stop, device
    )
    is_full = len(place_of_token) == len(token)
    return ChunkGroup(
        places=of_group,
        visited_chunk_count=first_empty - start,
        token_of_place=tokens if is_full else to_device(token, device),
        empty_places=None if is_full else to_device(empty, device),
        tokens=tokens,
        place_of_token=None if is_full else to_device(place_of_token, device),
        beginnings=beginnings,
        endings=endings,
        beginnings_on_host=beginnings_on_host,
        endings_on_host=endings_on_host,
    )


def _chunks_where(
    selected: Tensor, places: _TokenPlaces, start: int, stop: int, device: torch.device
) -> tuple[tuple[int, ...], ChunkSequences | None]:
    """The chunks of a group, ``start`` to ``stop``, where ``selected [n]`` is True.

    The first result has their numbers in the group on the host, the second their
    numbers and sequences on ``device`` (None if there are none).
    """
    chunk = selected[start:stop].nonzero()[:, 0]
    if not len(chunk):
        return (), None
    sequence = places.sequence_of_chunk[start:stop][chunk]
    # one copy to the device for both
    chunks, sequences = to_device(torch.stack([chunk, sequence]), device)
    return tuple(chunk.tolist()), ChunkSequences(chunks, sequences)


def _sequences_of_group(
    documents: Documents, C: int, chunk_count: int, start: int, stop: int
) -> tuple[Tensor, ...]:
    """The fields ``first_chunk``, ``last_chunk``, ``has_first_chunk`` and
    ``has_last_chunk`` of a group in fixed buffers.

    ``keep_tensors`` calls this function again after every new fill of the buffers, so
    the fields are up to date.
    """
    places = documents.keep_tensors(_find_token_places, C, chunk_count)
    clamped = []
    is_here = []
    for chunk in (places.first_chunk, places.last_chunk):
        clamped.append((chunk - start).clamp(0, stop - start - 1))
        inside = places.has_tokens & (chunk >= start) & (chunk < stop)
        is_here.append(inside.view(-1, 1, 1, 1))
    return tuple(clamped + is_here)


def _build_group_on_device(
    documents: Documents,
    places: _TokenPlaces,
    C: int,
    chunk_count: int,
    start: int,
    stop: int,
) -> ChunkGroup:
    """The group of chunks ``start`` to ``stop`` in fixed buffers, with views of
    ``places``, the tensors of all ``chunk_count`` chunks."""
    of_group = slice(start * C, stop * C)
    chunks = slice(start, stop)
    first_chunk, last_chunk, has_first_chunk, has_last_chunk = documents.keep_tensors(
        _sequences_of_group, C, chunk_count, start, stop
    )
    return GroupOnDevice(
        of_group,
        stop - start,
        places.token_of_place[of_group],
        places.empty_places[of_group],
        sequence_of_chunk=places.sequence_of_chunk[chunks],
        begins_sequence=places.begins_sequence[chunks],
        ends_sequence=places.ends_sequence[chunks],
        first_chunk=first_chunk,
        last_chunk=last_chunk,
        has_first_chunk=has_first_chunk,
        has_last_chunk=has_last_chunk,
    )

"""Where states enter and leave a group of chunks, and the walk between.

On documents in fixed buffers the device alone knows which chunks end sequences. Every chunk is then
walked, also those without tokens at the end; the others have the same sums and products.

Legend: N sequences (in fixed buffers empty ones keep their states), n chunks, C tokens of a chunk,
T tokens, H heads, K rows of a state, V columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..rules import chunk_table
from ..rules.chunk_table import ChunkGroup, ChunkTable, chunks_at_once
from ..static_documents import StaticDocuments


class _Places(NamedTuple):
    """Tables of all n chunks, filled up to whole groups on a GPU."""

    slot: Tensor  # int64 [T], the slot of each token
    token: Tensor  # int64 [n * C], the token in each slot; empty slots repeat the last token
    empty: Tensor  # bool [n * C]
    sequence: Tensor  # int64 [n]
    begins: Tensor  # bool [n], whether the chunk is the first of its sequence
    ends: Tensor  # bool [n], whether it is the last
    first: Tensor  # int64 [N], the first chunk of a sequence
    last: Tensor  # int64 [N]
    filled: Tensor  # bool [N], whether it has tokens


@dataclass(frozen=True, eq=False)
class StaticChunkGroup(ChunkGroup):
    """Consecutive chunks, some without tokens; ``begins`` and ``ends`` of the base stay empty."""

    sequence: Tensor  # int64 [n]
    begin: Tensor  # bool [n], whether a sequence begins with the chunk
    end: Tensor
    # int64 [N], the first chunk of a sequence, counted in the group and clamped to it.
    first: Tensor
    last: Tensor
    first_here: Tensor  # bool [N, 1, 1, 1], whether that chunk is in the group
    last_here: Tensor


def static_chunk_table(documents: StaticDocuments, C: int, heads: int) -> ChunkTable:
    """The table of these documents; made once, and written again by every fill."""
    at_once = chunks_at_once(heads)
    key = (ChunkTable, C, at_once)
    if key in documents.plans:
        return documents.plans[key]
    n = documents.most_chunks(C)
    padded = -(-n // at_once) * at_once if chunk_table.fills_up(documents.device) else n
    places = documents.table(("places", C, padded), lambda these: _places(these, C, padded))
    groups = []
    for start in range(0, padded, at_once):
        stop = min(start + at_once, padded)
        slots = slice(start * C, stop * C)
        first, last, first_here, last_here = documents.table(
            ("ends in group", C, start, stop),
            lambda these, start=start, stop=stop, places=places: _in_group(places, start, stop),
        )
        chunks = slice(start, stop)
        group = StaticChunkGroup(
            slots, places.token[slots], places.empty[slots], tokens=None, slot=None, begins={},
            ends={}, begin_index=None, end_index=None, chunks=stop - start,
            sequence=places.sequence[chunks], begin=places.begins[chunks], end=places.ends[chunks],
            first=first, last=last, first_here=first_here, last_here=last_here,
        )  # fmt: skip
        groups.append(group)
    table = ChunkTable(C, documents.sequences, tuple(groups), places.slot)
    documents.plans[key] = table
    return table


def _places(documents: StaticDocuments, C: int, padded: int) -> _Places:
    offsets, indices = documents.chunks(C)
    offset, starts = offsets.long(), documents.cu_seqlens.long()
    missing = padded - len(indices)
    sequence, place = torch.nn.functional.pad(indices.long(), (0, 0, 0, missing)).unbind(1)
    number = torch.arange(padded, device=documents.device)
    real = number < offset[-1]
    sequence = torch.where(real, sequence, documents.sequences - 1)
    token = (starts[sequence] + place * C)[:, None] + torch.arange(C, device=documents.device)
    document_T = documents.document_T()
    return _Places(
        slot=offset[document_T] * C + documents.position_T,
        token=token.clamp(max=documents.total_tokens - 1).flatten(),
        empty=(~real[:, None] | (token >= starts[sequence + 1][:, None])).flatten(),
        sequence=sequence,
        begins=real & (number == offset[sequence]),
        ends=real & (number + 1 == offset[sequence + 1]),
        first=offset[:-1],
        last=offset[1:] - 1,
        filled=offset[1:] > offset[:-1],
    )


def _in_group(places: _Places, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    def here(chunk: Tensor) -> Tensor:
        return (places.filled & (chunk >= start) & (chunk < stop)).view(-1, 1, 1, 1)

    first, last = (
        (chunk - start).clamp(0, stop - start - 1) for chunk in (places.first, places.last)
    )
    return first, last, here(places.first), here(places.last)


def taken(group: ChunkGroup, states: Tensor, *, ends: bool = False) -> Tensor:
    """Of ``[N, H, K, V]``, what :func:`walk` reads of the sequences that begin (or end) here."""
    if isinstance(group, StaticChunkGroup):
        return states
    index = group.end_index if ends else group.begin_index
    return states[:0] if index is None else states.index_select(0, index[1])


def put(group: ChunkGroup, states: Tensor, new: Tensor, *, begins: bool = False) -> None:
    """Write what :func:`walk` returns of the sequences that end (or begin) here to their states."""
    if isinstance(group, StaticChunkGroup):
        states.copy_(torch.where(group.first_here if begins else group.last_here, new, states))
        return
    index = group.begin_index if begins else group.end_index
    if index is not None:
        states.index_copy_(0, index[1], new)


def walk(
    group: ChunkGroup,
    through: Tensor,
    states: Tensor,
    carried: Tensor | None,
    given: Tensor,
    back: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Apply ``S -> through S + added`` chunk by chunk, or from the last chunk to the first.

    Args:
        through: ``[n, H, K, K]``, or ``[n, H, K, 1]`` (or 1 for K), a factor of each row.
        states: ``[n + 1, H, K, V]``, room; ``added`` is in all but the first (``back``: the last).
        carried: ``[H, K, V]``, what enters from the group before (``back``: after); None at the
            start, where a sequence begins.
        given: what :func:`taken` returns.

    Returns:
        The state that enters every chunk ``[n, H, K, V]``, the one that leaves the group, and what
        :func:`put` takes.
    """
    step = torch.Tensor.baddbmm_ if through.shape[-1] > 1 else torch.Tensor.addcmul_
    entering, leaving = (states[1:], states[:-1]) if back else (states[:-1], states[1:])
    order = reversed(range(group.chunks)) if back else range(group.chunks)
    if isinstance(group, StaticChunkGroup):
        opens, closes = (group.end, group.first) if back else (group.begin, group.last)
        entering = given.index_select(0, group.sequence)
        S = torch.zeros_like(given[0]) if carried is None else carried
        for c in order:
            S = entering[c].copy_(torch.where(opens[c], entering[c], S))
            S = step(leaving[c], through[c], S)
        return entering, S.clone(), leaving.index_select(0, closes)
    opens, closes = group.begin_index, group.end_index
    closing = group.ends
    if back:
        opens, closes, closing = closes, opens, group.begins
    # Where a sequence ends, the state that enters the next one takes the place of the one that
    # leaves. So those have a buffer of their own. (In the caller's a sequence's place would decide
    # the alignment, and on a CPU that decides bits.)
    left = leaving[:0] if closes is None else leaving.index_select(0, closes[0])
    if carried is not None:
        entering[group.chunks - 1 if back else 0].copy_(carried)
    if opens is not None:
        entering.index_copy_(0, opens[0], given)
    into, out_of, factors = entering.unbind(0), leaving.unbind(0), through.unbind(0)
    places = {c: place for place, c in enumerate(closing)}
    for c in order:
        step(left[places[c]] if c in places else out_of[c], factors[c], into[c])
    return entering, out_of[0 if back else group.chunks - 1].clone(), left

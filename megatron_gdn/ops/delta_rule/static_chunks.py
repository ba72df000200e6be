"""The chunk form on documents in fixed buffers: the device alone knows which chunks end sequences.

Every chunk is walked, also the ones without tokens at the end. Chunks with tokens have the same
sums and products as in :mod:`.chunk_math`, so results have the same bits.

Legend: as :mod:`.chunk_math`; N sequences, of which empty ones keep their states.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..rules import chunk_table
from ..rules.chunk_table import ChunkGroup, ChunkTable, chunks_at_once
from ..static_documents import StaticDocuments
from .chunk_math import Chunks


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
    first: (
        Tensor  # int64 [N], the first chunk of a sequence, counted in the group and clamped to it
    )
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


class StaticChunks(Chunks):
    """The chunks of a :class:`StaticChunkGroup`."""

    group: StaticChunkGroup

    def walk(self, carried: Tensor | None, initial: Tensor, final: Tensor) -> tuple[Tensor, Tensor]:
        group = self.group
        after = self._states(initial)[1:]
        torch.bmm(self._written_k.mT, self.U, out=after.flatten(0, 1))
        through = self._per_chunk(self.M)
        before = initial.index_select(0, group.sequence)  # read where a sequence begins
        S = torch.zeros_like(initial[0]) if carried is None else carried
        for c in range(group.chunks):
            S = before[c].copy_(torch.where(group.begin[c], before[c], S))
            S = after[c].baddbmm_(through[c], S)
        final.copy_(torch.where(group.last_here, after.index_select(0, group.last), final))
        del self._written_k, self.v  # nobody needs them from here on
        return before.flatten(0, 1), S

    def walk_back(
        self, do: Tensor, carried: Tensor | None, d_final: Tensor, d_initial: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = self.group
        d_written = torch.bmm(self.P.mT, do)
        before = self._states(d_final)[:-1]
        flat = before.flatten(0, 1)
        torch.bmm(self._in[:, 0].mT, do, out=flat)
        flat.baddbmm_(self.W.mT, d_written * self.beta[..., None])
        through = self._per_chunk(self.M).mT
        after = d_final.index_select(0, group.sequence)
        dS = torch.zeros_like(d_final[0]) if carried is None else carried
        for c in reversed(range(group.chunks)):
            dS = after[c].copy_(torch.where(group.end[c], after[c], dS))
            dS = before[c].baddbmm_(through[c], dS)
        begun = before.index_select(0, group.first)
        d_initial.copy_(torch.where(group.first_here, begun, d_initial))
        return after.flatten(0, 1), d_written, dS

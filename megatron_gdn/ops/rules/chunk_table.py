"""The places of a batch's tokens in chunks, and the groups that chunks are computed in.

Legend: N sequences, n chunks, C tokens of a chunk, T tokens of all sequences.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..documents import Documents
from ..host_tables import cached_by_stream, to_device

CHUNK = 64  # tokens
# Chunk-heads computed side by side: enough products of 64 x 64 to fill a GPU. Not a power of two:
# documents in a buffer of 2^15 tokens have a few chunks more, which would need another group.
_AT_ONCE = 1536


def lengths_of_sequences(rows: Sequence[int], documents: Documents | None) -> tuple[int, ...]:
    """Tokens of the N sequences: batch rows ``[B, S, ...]``, or non-empty documents end to end."""
    if documents is None:
        return (rows[1],) * rows[0]
    return tuple(n for n in documents.lengths if n) or (0,)


def chunks_at_once(heads: int) -> int:
    return max(1, _AT_ONCE // heads)


def chunks_of_a_call(heads: int, device: torch.device) -> int:
    """How many chunks an aligned rule computes side by side, see :mod:`..aligned`."""
    return chunks_at_once(heads) if fills_up(device) else 1


def fills_up(device: torch.device) -> bool:
    """Whether the last group is filled up with empty chunks to the size of the others."""
    return device.type == "cuda"


@dataclass(frozen=True, eq=False)
class ChunkGroup:
    """Some consecutive chunks."""

    slots: slice  # of the table
    token: Tensor | slice  # int64, the token in each slot; empty slots repeat some token
    empty: Tensor | None  # bool, per slot; None when no slot is empty
    tokens: slice | None  # of these chunks, one after the other; None if the host does not know
    slot: Tensor | None  # int64, of each token, counted in the group; None when slots are tokens
    begins: dict[int, int]  # chunk of the group -> sequence, for first chunks of sequences
    ends: dict[int, int]  # for last chunks
    begin_index: tuple[Tensor, Tensor] | None  # the same as two int64 tensors
    end_index: tuple[Tensor, Tensor] | None
    chunks: int  # how many there are; the rest, up to the group's size, is empty


@dataclass(frozen=True, eq=False)
class ChunkTable:
    """The chunks of N sequences, sequence after sequence.

    On a GPU all groups have one size; the last is filled up with empty chunks. So every product has
    one shape for any batch, and no bit of a sequence depends on its neighbours.
    """

    chunk_size: int
    sequences: int
    groups: tuple[ChunkGroup, ...]
    slot: Tensor | None  # int64 [T], of each token; None where groups know their tokens

    @cached_property
    def are_chunks(self) -> bool:
        """Whether every chunk is a whole sequence, as in a decode step of an aligned mixer."""
        return all(len(group.begins) == group.chunks for group in self.groups)

    @staticmethod
    def build(
        lengths: tuple[int, ...],
        chunk_size: int,
        heads: int,
        device: torch.device,
        aligned: bool = False,
    ) -> ChunkTable:
        """``aligned``: groups of one size on a CPU too, see :func:`chunks_of_a_call`."""
        at_once = chunks_of_a_call(heads, device) if aligned else chunks_at_once(heads)
        return _build(tuple(lengths), chunk_size, at_once, device, fills_up(device))

    def chunks_in(self, group: ChunkGroup) -> int:
        """How many chunks the group has, empty ones included."""
        return (group.slots.stop - group.slots.start) // self.chunk_size

    def to_chunks(
        self,
        x: Tensor,
        group: ChunkGroup,
        heads: tuple[int, ...],
        dtype: torch.dtype,
        out: Tensor | None = None,
    ) -> Tensor:
        """``[B, T, H]`` or ``[B, T, H, D]`` -> ``[n, *heads, C]`` or ``[n, *heads, C, D]``.

        Empty slots are zero, which makes them tokens that write nothing and do not decay.
        """
        rows = x.flatten(0, 1)
        if isinstance(group.token, slice):
            rows = rows[group.token]
        else:
            rows = rows.index_select(0, group.token)
        if group.empty is not None:
            rows.masked_fill_(group.empty.view(-1, *(1,) * (rows.dim() - 1)), 0)
        chunks = rows.view(-1, self.chunk_size, *heads, *rows.shape[2:]).movedim(1, 1 + len(heads))
        if out is None:
            out = torch.empty(chunks.shape, dtype=dtype, device=x.device)
        return out.copy_(chunks)

    def rows_like(self, x: Tensor) -> Tensor:
        """Room for the rows of a tensor like ``x``, to be filled by :meth:`put`."""
        last = self.groups[-1] if self.groups else None
        count = 0 if last is None else (last.tokens or last.slots).stop
        return x.new_empty(count, *x.shape[2:])

    def put(self, rows: Tensor, group: ChunkGroup, chunks: Tensor) -> None:
        """Write ``[n * H, C]`` or ``[n * H, C, D]`` to the group's rows."""
        self.put_tokens(rows, group, chunks.unflatten(0, (-1, rows.shape[1])).movedim(2, 1))

    def put_tokens(self, rows: Tensor, group: ChunkGroup, chunks: Tensor) -> None:
        """As :meth:`put`, of ``[n, C, ...]``."""
        if group.slot is not None:  # only this group is held twice
            rows[group.tokens] = chunks.flatten(0, 1).index_select(0, group.slot).to(rows.dtype)
            return
        to = rows[group.slots if group.tokens is None else group.tokens]
        to.view(-1, self.chunk_size, *to.shape[1:]).copy_(chunks)

    def to_tokens(self, rows: Tensor, like: Tensor) -> Tensor:
        """The rows of the tokens, in the shape of ``like``."""
        return (rows if self.slot is None else rows.index_select(0, self.slot)).view(like.shape)


def _index(sequences: dict[int, int], device: torch.device) -> tuple[Tensor, Tensor] | None:
    if not sequences:
        return None
    table = torch.tensor([list(sequences), list(sequences.values())], device="cpu")
    chunks, numbers = to_device(table, device)
    return chunks, numbers


def _slots(lengths: tuple[int, ...], first_chunk: list[int], C: int) -> Tensor:
    """int64 ``[T]``, the slot of each token. A sequence begins at its first chunk's first slot."""
    length = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    start = length.cumsum(0) - length
    moved = torch.tensor(first_chunk[:-1], dtype=torch.int64, device="cpu") * C - start
    return torch.arange(int(length.sum()), device="cpu") + moved.repeat_interleave(length)


@cached_by_stream(32)
def _build(
    lengths: tuple[int, ...], C: int, at_once: int, device: torch.device, fill_up: bool
) -> ChunkTable:
    first_chunk = [0, *accumulate(-(-length // C) for length in lengths)]
    n, total = first_chunk[-1], sum(lengths)
    padded = -(-n // at_once) * at_once if fill_up else n

    slot = _slots(lengths, first_chunk, C)
    token = torch.zeros(padded * C, dtype=torch.int64, device="cpu")
    empty = torch.ones(padded * C, dtype=torch.bool, device="cpu")
    token[slot] = torch.arange(total, device="cpu")
    empty[slot] = False
    # By group, so that building a group reads only the sequences that begin or end in it.
    begins: dict[int, dict[int, int]] = defaultdict(dict)
    ends: dict[int, dict[int, int]] = defaultdict(dict)
    for sequence, (first, stop) in enumerate(pairwise(first_chunk)):
        if first < stop:
            begins[first // at_once][first % at_once] = sequence
            ends[(stop - 1) // at_once][(stop - 1) % at_once] = sequence

    groups = []
    for start in range(0, n, at_once):
        stop = min(start + at_once, padded)
        slots = slice(start * C, stop * C)
        of_tokens = (~empty[slots]).nonzero()[:, 0]
        full, first = len(of_tokens) == stop * C - start * C, int(token[slots][0])
        tokens = slice(first, first + len(of_tokens))
        first_chunks, last_chunks = begins[start // at_once], ends[start // at_once]
        groups.append(
            ChunkGroup(
                slots=slots,
                token=tokens if full else to_device(token[slots], device),
                empty=None if full else to_device(empty[slots], device),
                tokens=tokens,
                slot=None if full else to_device(of_tokens, device),
                begins=first_chunks,
                ends=last_chunks,
                begin_index=_index(first_chunks, device),
                end_index=_index(last_chunks, device),
                chunks=min(stop, n) - start,
            )
        )
    return ChunkTable(C, len(lengths), tuple(groups), None)

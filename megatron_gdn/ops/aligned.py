"""One grid for training and generation: a token's bits depend on its sequence's tokens alone.

**The grid.** Every sequence is cut into chunks of 64 tokens, counted from its start. An aligned
mixer computes chunks and nothing else:

    front     W - 1 rows before the chunk and its 64 rows       -> the rule's inputs of the chunk
    rule      its inputs, the state at the chunk's start        -> its output, the state after it
    readout   its output, the gate's columns of its rows        -> its rows for out_proj

A chunk with fewer tokens is filled up with zeros: what follows a token changes none of its bits.

**Fixed shapes.** Each stage runs over groups of a fixed number of chunks, the last filled up with
empty ones. So every kernel and every matrix product has one shape in
training, in prefill and in decode, and a library takes one kernel for it. On a CPU a group is one
chunk, in memory of its own: MKL rounds a matrix in the middle of a batched product by the alignment
of its memory. Our Triton kernels and FlashQLA's take any number of chunks.

States follow each other chunk by chunk; generation carries the state at the start of a chunk, with
the rows of the chunk so far (:mod:`.generation.aligned`). Only the rule's backward is on the grid.

Legend: S seq, B batch, P projection width, W conv taps, n chunks of a group, H heads with a state,
V columns of a state, T tokens of all sequences end to end.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .documents import Documents, documents_of_rows, one_document
from .front.history import History
from .front.table import Parameters, TableFront
from .readout.base import Readout
from .rules.base import on_tokens
from .rules.chunk_table import CHUNK, ChunkGroup, ChunkTable


def grid_of(rows: Tensor, documents: Documents | None, heads: int) -> ChunkTable:
    """The grid of rows ``[B, S, ...]`` whose sequences begin here.

    ``documents`` are of every batch row; the heads with a state and the device set how many chunks
    a call computes.
    """
    documents = documents_of_rows(rows.shape[:2], rows.device, documents)
    return ChunkTable.of(documents, CHUNK, heads, fixed=True)


def front_on_grid(
    front: TableFront,
    parameters: Parameters,
    rows: Tensor,
    grid: ChunkTable,
    before: Tensor | None = None,
    only: tuple[str, ...] | None = None,
) -> Any:
    """The rule's inputs ``[B, S, ...]`` of ``rows`` ``[B, S, P]``.

    ``before`` ``[N, W - 1, P]`` has the rows before every sequence with tokens; None: zeros.
    """
    past, flat = parameters[0].shape[-1] - 1, rows.flatten(0, 1)
    made: list[_Gathered | None] = []
    kind: Any = tuple
    triton = getattr(front, "triton", False)  # with one path for all tokens of packed rows
    for group in grid.groups:
        buffer = flat.new_empty(past + CHUNK, grid.chunks_in(group), rows.shape[-1])
        _fill(buffer[past:], rows, grid, group)
        _fill_history(buffer[:past], flat, group, before)
        path = one_document(len(buffer), buffer.device) if triton else None
        inputs = front.forward(buffer, parameters, path, only)
        kind, inputs = type(inputs), on_tokens(inputs, lambda x: x[:, past:])
        made = made or [None if x is None else _Gathered(grid, x) for x in inputs]
        for to, x in zip(made, inputs, strict=True):
            if to is not None:
                to.put(group, x)
    return kind(*(None if x is None else x.tokens(rows.shape[:2]) for x in made))


def readout_on_grid(
    readout: Readout, o: Tensor, rows: Tensor, gamma: Tensor | None, grid: ChunkTable
) -> Tensor:
    """``[B, S, H * V]`` of ``o`` ``[B, S, H, V]`` and ``rows`` ``[B, S, P]``."""
    gate, made = readout.gate, None
    for group in grid.groups:
        n = grid.chunks_in(group)
        of_o = o.new_empty(n, CHUNK, *o.shape[2:])
        _fill(of_o.flatten(2).transpose(0, 1), o.flatten(2), grid, group)
        of_rows = rows.new_empty(CHUNK, n, rows.shape[-1])
        _fill(of_rows[..., gate], rows[..., gate], grid, group)
        mixed = readout.forward(of_o, of_rows, gamma).transpose(0, 1)
        made = _Gathered(grid, mixed) if made is None else made
        made.put(group, mixed)
    assert made is not None, "there are tokens"
    return made.tokens(rows.shape[:2])


def _fill(buffer: Tensor, rows: Tensor, grid: ChunkTable, group: ChunkGroup) -> None:
    """Write the group's tokens to ``buffer`` ``[64, n, D]``, zeros to empty places."""
    out = buffer.transpose(0, 1)[:, None]
    grid.to_chunks(rows[:, :, None], group, (1,), buffer.dtype, out=out)


def _fill_history(buffer: Tensor, flat: Tensor, group: ChunkGroup, before: Tensor | None) -> None:
    """Write the W - 1 rows before each chunk of the group to ``buffer`` ``[W - 1, n, P]``."""
    past = len(buffer)
    if isinstance(group.token, slice):
        first = torch.arange(group.token.start, group.token.stop, CHUNK, device=flat.device)
    else:
        first = group.token[::CHUNK]
    place = first - torch.arange(past, 0, -1, device=flat.device)[:, None]
    torch.index_select(flat, 0, place.clamp(min=0).flatten(), out=buffer.flatten(0, 1))
    if group.begin_index is not None:
        chunks, sequences = group.begin_index
        if before is None:
            buffer.index_fill_(1, chunks, 0)
        else:
            buffer.index_copy_(1, chunks, before.index_select(0, sequences).transpose(0, 1))


class _Gathered:
    """Chunks ``like`` ``[n, 64, ...]`` of all groups, and their tokens in order."""

    def __init__(self, grid: ChunkTable, like: Tensor) -> None:
        self._grid = grid
        # A parameter that every token shares stays as it is.
        self._shared = like[:1, :1] if like.stride()[:2] == (0, 0) else None
        self._rows = grid.rows_like(like if self._shared is None else like[..., :0])

    def put(self, group: ChunkGroup, chunks: Tensor) -> None:
        if self._shared is None:
            self._grid.put_tokens(self._rows, group, chunks)

    def tokens(self, rows: torch.Size) -> Tensor:
        """``[B, S, ...]``."""
        if self._shared is not None:
            return self._shared.expand(*rows, *self._shared.shape[2:])
        return self._rows.unflatten(0, rows)


class AlignedFront:
    """A front that runs on the grid. Its backward is the inner front's."""

    def __init__(self, front: TableFront) -> None:
        self.layout, self.names, self._front = front.layout, front.names, front
        self.convolved, self.again, self.backward = front.convolved, front.again, front.backward

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
        history: History | None = None,
    ) -> Any:
        # Pieces begin anywhere in a sequence: they have no grid.
        if history is not None or (only is not None and not only):
            return self._front.forward(proj, parameters, documents, only, history)
        if getattr(self._front, "triton", False):
            if documents is None:
                documents = one_document(len(proj), proj.device)
            return self._front.forward(proj, parameters, documents, only)
        rows = proj.transpose(0, 1)
        grid = grid_of(rows, documents, self.layout.state_heads)
        return front_on_grid(self._front, parameters, rows, grid, only=only)


class AlignedReadout:
    """A readout that runs on the grid. Its backward is the inner readout's."""

    reads_o: ClassVar[bool] = True

    def __init__(self, readout: Readout, documents: Documents | None) -> None:
        self._readout, self.backward, self.gate = readout, readout.backward, readout.gate
        self._documents = documents

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        if getattr(self._readout, "by_row", False):
            return self._readout.forward(o, rows, gamma, out=out)
        rows = rows.transpose(0, 1)
        grid = grid_of(rows, self._documents, o.shape[2])
        made = readout_on_grid(self._readout, o, rows, gamma, grid).transpose(0, 1)
        return made.contiguous() if out is None else out.copy_(made)


def by_token(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of ``[S, B, C]``, one token at a time; differentiable."""
    tokens = x.flatten(0, 1).split(1)
    return torch.cat([function(token[None]) for token in tokens], 1).view(x.shape)

"""Batch-invariant mode: the bits of a token's results depend only on its sequence's
tokens.

The grid cuts every sequence into chunks of 64 tokens, counted from the sequence's
start. Each stage computes whole chunks; zeros fill up a chunk with fewer tokens:

    front    64 rows of a chunk, W - 1 rows before the chunk  -> the rule's inputs
    rule     the rule's inputs, the state before the chunk    -> o, the state after the chunk
    readout  o, the gate's columns of the chunk's rows        -> the chunk's rows for out_proj

Each stage runs over groups of a fixed number of chunks; empty chunks fill up the last
group. So every matrix product has one shape in training, prefill and decode, and a
library always computes the product by the same kernel. On a CPU a group is one chunk in
memory of its own, because MKL's rounding of one matrix in a batched product depends on
the matrix's address. Our Triton kernels and FlashQLA's need no groups of a fixed size.
In the backward, only the rule runs on the grid.

Legend: n chunks of a group; other letters as in ``ops/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .documents import Documents, documents_of_rows, one_document
from .front.history import History
from .front.table import Front, Parameters
from .readout.base import Readout
from .rules.base import Inputs, map_inputs
from .rules.chunk_table import CHUNK, ChunkGroup, ChunkTable


def grid_of(rows: Tensor, documents: Documents | None, heads: int) -> ChunkTable:
    """The grid of rows ``[B, S, ...]``; ``documents`` are the boundaries of each batch
    row."""
    documents = documents_of_rows(rows.shape[:2], rows.device, documents)
    return ChunkTable.of(documents, CHUNK, heads, one_chunk_groups=True)


def front_on_grid(
    front: Front,
    parameters: Parameters,
    rows: Tensor,
    grid: ChunkTable,
    rows_before: Tensor | None = None,
    only: tuple[str, ...] | None = None,
) -> Inputs:
    """The rule's inputs ``[B, S, ...]``, computed from ``rows [B, S, P]`` by chunks of
    ``grid``.

    ``rows_before`` ``[N, W - 1, P]`` are the rows before each non-empty sequence; None
    means zeros.
    ``only``: names of the inputs to compute (the others are None); None means all.
    """
    past = parameters[0].shape[-1] - 1
    flat = rows.flatten(0, 1)
    made: list[_GroupResults | None] = []
    kind: Any = tuple
    # Triton's code for documents treats tokens alike
    triton = getattr(front, "triton", False)
    for group in grid.groups:
        buffer = flat.new_empty(past + CHUNK, grid.chunks_in(group), rows.shape[-1])
        _fill_chunks(buffer[past:], rows, grid, group)
        _fill_history(buffer[:past], flat, group, rows_before)
        if triton:
            path = one_document(len(buffer), buffer.device)
        else:
            path = None
        inputs = front.forward(buffer, parameters, path, only)
        kind = type(inputs)
        inputs = map_inputs(inputs, lambda x: x[:, past:])
        made = made or [None if x is None else _GroupResults(grid, x) for x in inputs]
        for to, x in zip(made, inputs, strict=True):
            if to is not None:
                to.put(group, x)
    return kind(*(None if x is None else x.tokens(rows.shape[:2]) for x in made))


def readout_on_grid(
    readout: Readout, o: Tensor, rows: Tensor, gamma: Tensor | None, grid: ChunkTable
) -> Tensor:
    """Rows for out_proj ``[B, S, H V]``: run ``readout`` on each chunk of
    ``o [B, S, H, V]``."""
    gate = readout.gate
    made = None
    for group in grid.groups:
        n = grid.chunks_in(group)
        of_o = o.new_empty((n, CHUNK) + o.shape[2:])
        _fill_chunks(of_o.flatten(2).transpose(0, 1), o.flatten(2), grid, group)
        of_rows = rows.new_empty(CHUNK, n, rows.shape[-1])
        _fill_chunks(of_rows[..., gate], rows[..., gate], grid, group)
        mixed = readout.forward(of_o, of_rows, gamma).transpose(0, 1)
        if made is None:
            made = _GroupResults(grid, mixed)
        made.put(group, mixed)
    assert made is not None, "the caller gives at least one token"
    return made.tokens(rows.shape[:2])


def _fill_chunks(
    buffer: Tensor, rows: Tensor, grid: ChunkTable, group: ChunkGroup
) -> None:
    """Write the group's tokens to ``buffer`` ``[64, n, D]``, zeros where a chunk has no
    token."""
    out = buffer.transpose(0, 1)[:, None]
    grid.to_chunks(rows[:, :, None], group, buffer.dtype, out=out)


def _fill_history(
    buffer: Tensor, token_rows: Tensor, group: ChunkGroup, rows_before: Tensor | None
) -> None:
    """Write the W - 1 ``token_rows [B S, P]`` before each chunk to
    ``buffer [W - 1, n, P]``."""
    past = len(buffer)
    token = group.token_of_place
    if isinstance(token, slice):
        first = torch.arange(token.start, token.stop, CHUNK, device=token_rows.device)
    else:
        first = token[::CHUNK]
    place = first - torch.arange(past, 0, -1, device=token_rows.device)[:, None]
    torch.index_select(
        token_rows, 0, place.clamp(min=0).flatten(), out=buffer.flatten(0, 1)
    )
    if group.beginnings is not None:
        chunks, sequences = group.beginnings
        if rows_before is None:
            buffer.index_fill_(1, chunks, 0)
        else:
            buffer.index_copy_(
                1, chunks, rows_before.index_select(0, sequences).transpose(0, 1)
            )


class _GroupResults:
    """Collects the results ``[n, 64, ...]`` of one stage; returns them in token
    order."""

    def __init__(self, grid: ChunkTable, like: Tensor) -> None:
        self._grid = grid
        # An input of the rule that all tokens share (strides 0) is not copied per
        # token.
        if like.stride()[:2] == (0, 0):
            self._shared = like[:1, :1]
        else:
            self._shared = None
        self._rows = grid.new_rows(like if self._shared is None else like[..., :0])

    def put(self, group: ChunkGroup, chunks: Tensor) -> None:
        """Store ``chunks``, the results ``[n, 64, ...]`` of one group."""
        if self._shared is None:
            self._grid.write_chunks(self._rows, group, chunks)

    def tokens(self, rows: torch.Size) -> Tensor:
        """The results of all tokens, ``[B, S, ...]``; ``rows`` is ``(B, S)``."""
        if self._shared is not None:
            return self._shared.expand(rows + self._shared.shape[2:])
        return self._rows.unflatten(0, rows)


class AlignedFront:
    """A front whose forward runs ``front`` on the grid; the backward is that of
    ``front``."""

    def __init__(self, front: Front) -> None:
        self.layout = front.layout
        self.names = front.names
        self._front = front
        self.convolved = front.convolved
        self.recomputed = front.recomputed
        self.backward = front.backward

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
        history: History | None = None,
    ) -> Inputs:
        """The rule's inputs from rows ``proj [S, B, P]``; with ``history``, not on the
        grid."""
        # With ``history`` the rows may begin inside a chunk of the grid, so they are
        # not chunked.
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
    """A readout whose forward runs ``readout`` on the grid; the backward is that of
    ``readout``."""

    reads_o: ClassVar[bool] = True

    def __init__(self, readout: Readout, documents: Documents | None) -> None:
        self._readout = readout
        self.backward = readout.backward
        self.gate = readout.gate
        self._documents = documents

    def forward(
        self,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rows for out_proj ``[S, B, H V]``, written to ``out`` if it is given."""
        if getattr(self._readout, "by_row", False):
            return self._readout.forward(o, rows, gamma, out=out)
        rows = rows.transpose(0, 1)
        grid = grid_of(rows, self._documents, o.shape[2])
        made = readout_on_grid(self._readout, o, rows, gamma, grid).transpose(0, 1)
        if out is None:
            return made.contiguous()
        return out.copy_(made)


def apply_token_by_token(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` to one token of ``x`` ``[S, B, C]`` at a time;
    differentiable."""
    tokens = x.flatten(0, 1).split(1)
    return torch.cat([function(token[None]) for token in tokens], 1).view(x.shape)

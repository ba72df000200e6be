"""Batch-invariant mode: the bits of a token's results depend only on the tokens of its
sequence.

The *grid* cuts every sequence into chunks of 64 tokens, counted from the sequence's
start. Each stage computes whole chunks; zeros fill up a chunk with fewer tokens:

    front    the chunk's 64 rows, W - 1 rows before it  -> the rule's inputs
    rule     its inputs, the state before the chunk     -> o, the state after the chunk
    readout  o, the output gate's columns of the rows   -> rows for out_proj

Each stage runs over groups of a fixed number of chunks; empty chunks fill up the last
group. So every matrix product has the same shape in training, prefill and decode, and a
library computes it by the same kernel. On a CPU a group is one chunk in memory of its
own: in a batched product, MKL's rounding of a matrix depends on the matrix's address.
Our Triton kernels and FlashQLA's need no groups of a fixed size. In the backward, only
the rule runs on the grid.

Legend: n chunks of a group; other letters as in ``ops/__init__.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from .documents import Documents, documents_of_rows, one_document
from .front.history import History
from .front.table import Front, FrontParameterList
from .readout.base import Readout
from .rules.base import Inputs, map_inputs
from .rules.chunk_table import CHUNK, ChunkGroup, ChunkTable


def grid_of(rows: Tensor, documents: Documents | None, heads: int) -> ChunkTable:
    """The grid of rows ``[B, S, ...]``.

    ``documents`` are the boundaries of each batch row. ``heads`` is the number of heads
    with a state; on a GPU it decides how many chunks a group has.
    """
    documents = documents_of_rows(rows.shape[:2], rows.device, documents)
    return ChunkTable.of(documents, CHUNK, heads, one_chunk_groups=True)


def front_on_grid(
    front: Front,
    parameters: FrontParameterList,
    rows: Tensor,
    grid: ChunkTable,
    rows_before: Tensor | None = None,
    only: tuple[str, ...] | None = None,
) -> Inputs:
    """The rule's inputs ``[B, S, ...]``, which ``front`` computes chunk by chunk.

    Args:
        rows: ``[B, S, P]``.
        rows_before: ``[N, W - 1, P]``, the rows before each sequence with tokens; None
            means zeros.
        only: the names of the inputs to compute (the others are None); None means all.
    """
    # W - 1; the first parameter is the convolution's weight
    past = parameters[0].shape[-1] - 1
    token_rows = rows.flatten(0, 1)
    results: list[_GroupResults | None] = []  # for each input of the rule
    inputs: Any = ()
    for group in grid.groups:
        # in this buffer a chunk is a batch row, with its history before it
        n = grid.chunks_in(group)
        buffer = token_rows.new_empty(past + CHUNK, n, rows.shape[-1])
        _fill_chunks(buffer[past:], rows, grid, group)
        _fill_history(buffer[:past], token_rows, group, rows_before)
        documents = None
        if front.is_triton:
            # with documents, Triton's front computes every token by the same code
            documents = one_document(len(buffer), buffer.device)
        inputs = front.forward(buffer, parameters, documents, only)
        inputs = map_inputs(inputs, lambda x: x[:, past:])
        if not results:
            results = [None if x is None else _GroupResults(grid, x) for x in inputs]
        for result, x in zip(results, inputs, strict=True):
            if result is not None:
                result.put(group, x)
    return inputs._make(
        None if result is None else result.in_token_order(rows.shape[:2])
        for result in results
    )


def readout_on_grid(
    readout: Readout, o: Tensor, rows: Tensor, gamma: Tensor | None, grid: ChunkTable
) -> Tensor:
    """Rows for out_proj ``[B, S, H V]``, which ``readout`` computes chunk by chunk from
    ``o [B, S, H, V]`` and ``rows [B, S, P]``. ``gamma`` is the norm's weight or None,
    ``grid`` is from :func:`grid_of`."""
    gate = readout.gate_columns
    results = None
    for group in grid.groups:
        n = grid.chunks_in(group)
        chunks_of_o = o.new_empty((n, CHUNK) + o.shape[2:])
        _fill_chunks(chunks_of_o.flatten(2).transpose(0, 1), o.flatten(2), grid, group)
        # the readout reads only the gate's columns of the rows
        chunks_of_rows = rows.new_empty(CHUNK, n, rows.shape[-1])
        _fill_chunks(chunks_of_rows[..., gate], rows[..., gate], grid, group)
        mixed = readout.forward(chunks_of_o, chunks_of_rows, gamma).transpose(0, 1)
        if results is None:
            results = _GroupResults(grid, mixed)
        results.put(group, mixed)
    assert results is not None, "the caller gives at least one token"
    return results.in_token_order(rows.shape[:2])


def _fill_chunks(
    buffer: Tensor, rows: Tensor, grid: ChunkTable, group: ChunkGroup
) -> None:
    """Write the group's tokens of ``rows [B, S, D]`` to ``buffer [64, n, D]``; zeros
    where a chunk has no token."""
    # to_chunks takes rows with a dimension of heads: here one head of D columns
    out = buffer.transpose(0, 1)[:, None]
    grid.to_chunks(rows[:, :, None], group, buffer.dtype, out=out)


def _fill_history(
    buffer: Tensor, token_rows: Tensor, group: ChunkGroup, rows_before: Tensor | None
) -> None:
    """Write the W - 1 rows before each chunk of the group to ``buffer [W - 1, n, P]``.

    They are from ``token_rows [B S, P]``; before a sequence's first chunk they are from
    ``rows_before [N, W - 1, P]`` (None: zeros).
    """
    past = len(buffer)
    # the indices of the chunks' first tokens
    token = group.token_of_place
    if isinstance(token, slice):
        first = torch.arange(token.start, token.stop, CHUNK, device=token_rows.device)
    else:
        first = token[::CHUNK]
    distance = torch.arange(past, 0, -1, device=token_rows.device)
    # The rows before a sequence's first chunk are wrong here, and are replaced below.
    tokens = (first - distance[:, None]).clamp(min=0)
    torch.index_select(token_rows, 0, tokens.flatten(), out=buffer.flatten(0, 1))
    if group.beginnings is not None:
        chunks, sequences = group.beginnings
        if rows_before is None:
            buffer.index_fill_(1, chunks, 0)
        else:
            buffer.index_copy_(
                1, chunks, rows_before.index_select(0, sequences).transpose(0, 1)
            )


class _GroupResults:
    """The results of one stage, collected group by group and returned in token order.

    ``like`` has the shape and dtype of a group's results, ``[n, 64, ...]``.
    """

    def __init__(self, grid: ChunkTable, like: Tensor) -> None:
        """Make rows for all tokens of ``grid``, with the heads and dtype of
        ``like``."""
        self._grid = grid
        self._shared_value = None
        self._rows = None
        if like.stride()[:2] == (0, 0):
            # All tokens share one value, such as the parameter D. It is not copied for
            # each token.
            self._shared_value = like[:1, :1]
        else:
            self._rows = grid.new_rows(like)

    def put(self, group: ChunkGroup, chunks: Tensor) -> None:
        """Store ``chunks``, the results ``[n, 64, ...]`` of one group."""
        if self._rows is not None:
            self._grid.write_chunks(self._rows, group, chunks)

    def in_token_order(self, rows: torch.Size) -> Tensor:
        """The results of all tokens, ``[B, S, ...]``; ``rows`` is ``(B, S)``."""
        if self._rows is not None:
            return self._rows.unflatten(0, rows)
        assert self._shared_value is not None
        return self._shared_value.expand(rows + self._shared_value.shape[2:])


class AlignedFront:
    """A front whose forward runs ``front`` on the grid; its backward is ``front``'s
    backward, not on the grid."""

    def __init__(self, front: Front) -> None:
        """Copy the attributes of ``front`` that callers read; only :meth:`forward`
        differs."""
        self.layout = front.layout
        self.input_names = front.input_names
        self._front = front
        self.recomputed = front.recomputed
        self.backward = front.backward

    def forward(
        self,
        proj: Tensor,
        parameters: FrontParameterList,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
        history: History | None = None,
    ) -> Inputs:
        """The rule's inputs ``[B, S, ...]`` from rows ``proj [S, B, P]``; ``only`` has
        the names of the inputs to compute, None means all.

        With ``history`` the rows may begin inside a chunk of the grid, so ``front``
        computes them without the grid. Triton's front needs no grid either: with
        documents, it computes every token by the same code.
        """
        # an empty ``only``: there is nothing to compute
        if history is not None or (only is not None and not only):
            return self._front.forward(proj, parameters, documents, only, history)
        if self._front.is_triton:
            if documents is None:
                documents = one_document(len(proj), proj.device)
            return self._front.forward(proj, parameters, documents, only)
        rows = proj.transpose(0, 1)
        grid = grid_of(rows, documents, self.layout.state_heads)
        return front_on_grid(self._front, parameters, rows, grid, only=only)


class AlignedReadout:
    """A readout whose forward runs ``readout`` on the grid; its backward is
    ``readout``'s backward, not on the grid."""

    reads_o: ClassVar[bool] = True

    def __init__(self, readout: Readout, documents: Documents | None) -> None:
        """Copy the attributes of ``readout`` that callers read; only :meth:`forward`
        differs. ``documents`` are the boundaries of each batch row."""
        self._readout = readout
        self.backward = readout.backward
        self.gate_columns = readout.gate_columns
        self._documents = documents

    def forward(
        self,
        o: Tensor,
        rows: Tensor,
        gamma: Tensor | None,
        *,
        out: Tensor | None = None,
    ) -> Tensor:
        """Rows for out_proj ``[S, B, H V]``, written to ``out`` if it is given, from
        ``o [B, S, H, V]`` and ``rows [S, B, P]``.

        A readout that ``is_rowwise`` computes each token by itself and needs no grid.
        """
        if getattr(self._readout, "is_rowwise", False):
            return self._readout.forward(o, rows, gamma, out=out)
        rows = rows.transpose(0, 1)
        grid = grid_of(rows, self._documents, o.shape[2])
        mixed = readout_on_grid(self._readout, o, rows, gamma, grid).transpose(0, 1)
        if out is None:
            return mixed.contiguous()
        return out.copy_(mixed)


def apply_token_by_token(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply ``function`` to one token of ``x [S, B, C]`` after another, each as
    ``[1, 1, C]``; differentiable.

    So in batch-invariant mode a token's bits do not depend on the number of tokens.
    """
    tokens = x.flatten(0, 1).split(1)
    return torch.cat([function(token[None]) for token in tokens], 1).view(x.shape)

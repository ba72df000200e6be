"""A front over pieces of sequences, which start from the rows before them: the *history*.

A token's taps reach W - 1 rows back. So the first W - 1 tokens of a piece, its *edge*, need rows
that are not in the batch; they come from other ranks or from a cache. The front first runs on the
batch as if every piece were a sequence, while the history travels. Then the edges are computed
again with the history: by kernels of their own (:mod:`.fused_edges`), or in plain steps by the
front itself, once more over a small buffer of short sequences:

    [ history of the piece | first tokens of the piece ]     for every piece that has a history

Legend: s tokens of the batch, B batch, P projection width, C conv channels, W taps, N pieces that
have a history, R rows of history, M tokens that get further gradients, E rows of the small buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..documents import Documents
from ..host_tables import to_device
from .base import Front, FrontAround, Parameters


class Places(NamedTuple):
    """The small buffer: indices on the device."""

    documents: Documents  # its short sequences
    history: Tensor  # its rows of history
    arrived: Tensor  # their places in the history as it arrived
    again: Tensor  # its other rows
    redone: Tensor  # the tokens of the batch that these copy
    slots: Tensor  # the places of these among N (W - 1)
    read: Tensor  # the rows whose results ``redone`` get
    received: Tensor  # for every row that arrived, its row of the buffer
    # bool [., 1, 1], which of ``arrived``, ``redone`` and ``received`` there are; None if all.
    known: Tensor | None = None
    real: Tensor | None = None
    used: Tensor | None = None


@dataclass(frozen=True, eq=False)
class HistoryTable:
    """The tokens that are computed again, and the places of their gradients.

    A line is a piece's first token; how many of its tokens are computed again, at most W - 1; the
    row of history that lies 1, 2, .. W - 1 before it, -1 where its sequence begins. An addition is
    a token, then the sources of its further gradients, -1 for none. Below N (W - 1): a token
    computed again, W - 1 places for every piece. From there on: a row that was sent.
    """

    lines: Tensor  # int64 [N, W + 1] on the host
    pieces: Tensor  # the same in int32 on the device
    additions: Tensor  # int32 [M, 1 + most]

    @classmethod
    def build(
        cls, first: Tensor, redone: Tensor, history: Tensor, sent: Tensor, device: torch.device
    ) -> HistoryTable:
        """From int64 tensors on the host: the columns of ``lines``, and the tokens to send."""
        N, past = history.shape
        numbers = torch.arange(N, device="cpu")
        rows, sources = _by_row(
            torch.cat([ranges(first, redone), sent]),
            torch.cat([ranges(numbers * past, redone),
                       N * past + torch.arange(len(sent), device="cpu")]),
        )  # fmt: skip
        lines = torch.cat([first[:, None], redone[:, None], history], dim=1)
        additions = torch.cat([rows[:, None], sources], dim=1)
        return cls(lines, to_device(lines.int(), device), to_device(additions.int(), device))

    @cached_property
    def buffer(self) -> Places:
        """The small buffer; needs at least one piece."""
        first, redone, history = self.lines[:, 0], self.lines[:, 1], self.lines[:, 2:]
        device, past = self.pieces.device, history.shape[1]
        known = (history >= 0).sum(1)
        ends = (known + redone).cumsum(0)
        starts = ends - known - redone
        # Oldest first, as rows follow each other in the buffer.
        arrived = history.flip(1)[history.flip(1) >= 0]

        def table(index: Tensor) -> Tensor:
            return to_device(index, device)

        of_history, again = ranges(starts, known), table(ranges(starts + known, redone))
        slots = ranges(torch.arange(len(self.lines), device="cpu") * past, redone)
        return Places(
            Documents((0, *ends.tolist()), device), table(of_history), table(arrived), again,
            table(ranges(first, redone)), table(slots), read=again,
            received=table(of_history[arrived.argsort()]),
        )  # fmt: skip


@dataclass(frozen=True, eq=False)
class StaticHistoryTable(HistoryTable):
    """The table of as many pieces as there can be; the device knows which there are.

    ``lines`` has a shape and no values. A piece that is not there has no token that is computed
    again, and rows of history -1. A line of ``additions`` that is not there has the token -1.
    """

    places: Places
    distinct: Tensor  # int64 [M], for each line of ``additions`` itself, or one that is there

    @property
    def buffer(self) -> Places:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.places


def ranges(start: Tensor, count: Tensor) -> Tensor:
    """``start[0] .. start[0] + count[0] - 1, start[1] .., ...``"""
    first = count.cumsum(0) - count
    return torch.arange(int(count.sum()), device="cpu") + (start - first).repeat_interleave(count)


def _by_row(rows: Tensor, sources: Tensor) -> tuple[Tensor, Tensor]:
    """Group (row, source) pairs by row: the distinct rows; their sources, filled up with -1."""
    order = rows.argsort(stable=True)
    rows, count = rows[order].unique_consecutive(return_counts=True)
    table = sources.new_full((len(rows), int(count.max()) if len(rows) else 0), -1)
    line = torch.arange(len(rows), device="cpu").repeat_interleave(count)
    table[line, ranges(torch.zeros_like(count), count)] = sources[order]
    return rows, table


class EdgeInputs(NamedTuple):
    """What edges are computed from."""

    table: HistoryTable
    proj: Tensor  # [s, B, P]
    parameters: Parameters  # the front's; conv weight and bias come first
    history: Tensor  # [R, B, C], any strides


class EdgesBackward(Protocol):
    """The backward of the edges: gradients to send; :meth:`add` takes those that come back."""

    @property
    def d_history(self) -> Tensor: ...  # [R, B, C], at least fp32
    @property
    def grads(self) -> Any: ...  # of the rule's inputs, zero where the edges were computed again

    def add(
        self, d_proj: Tensor, returned: Tensor, of_parameters: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """Add the further gradients to rows of ``d_proj`` and to the parameters'.

        ``returned`` ``[rows sent, B, C]`` are the gradients of the rows that this rank sent. A row
        of ``d_proj`` is rounded once more.
        """
        ...


class Edges(Protocol):
    """How the first tokens of pieces are computed with their history."""

    def redo(self, inputs: EdgeInputs, made: Any, names: Sequence[str]) -> None:
        """Overwrite the rule's inputs ``names``, in ``made``, at the first tokens of pieces.

        There is at least one piece; ``names`` are neighbours in the front's ``convolved``.
        """
        ...

    def backward(self, inputs: EdgeInputs, grads: Any) -> EdgesBackward:
        """From ``grads`` of the rule's inputs; it may overwrite these at the first tokens."""
        ...


class BufferedEdges(NamedTuple):
    """See :class:`Edges`. The buffer is fp32 (fp64 for fp64); its results are rounded."""

    front: Front

    def _buffer(self, inputs: EdgeInputs) -> Tensor:
        """``[E, B, P]``, projection rows; columns that are not convolved are zero."""
        table, proj, _, history = inputs
        places, columns = table.buffer, self.front.layout.conv_columns
        wide = torch.promote_types(proj.dtype, torch.float32)
        rows = proj.new_zeros(places.documents.total_tokens, *proj.shape[1:], dtype=wide)
        conv = rows[..., columns]
        conv[places.history] = _there(history[places.arrived].to(wide), places.known)
        conv[places.again] = _there(proj[..., columns][places.redone].to(wide), places.real)
        return rows

    def redo(self, inputs: EdgeInputs, made: Any, names: Sequence[str]) -> None:
        places, rows = inputs.table.buffer, self._buffer(inputs)
        redone = self.front.forward(rows, inputs.parameters, places.documents, tuple(names))
        for name in names:
            whole = getattr(made, name)
            whole[:, places.redone] = getattr(redone, name)[:, places.read].to(whole.dtype)

    def backward(self, inputs: EdgeInputs, grads: Any) -> BufferedBackward:
        table, proj, parameters, history = inputs
        front, (B, channels) = self.front, history.shape[1:]
        wide = torch.promote_types(proj.dtype, torch.float32)
        if not len(table.lines):
            nothing = proj.new_empty(0, B, channels, dtype=wide)
            return BufferedBackward(nothing, grads, front, table, nothing, None)
        places, rows = table.buffer, self._buffer(inputs)
        E, moved = len(rows), {}
        for name in front.names:
            grad = getattr(grads, name)
            moved[name] = grad.new_zeros(grad.shape[0], E, *grad.shape[2:])
            if name in front.convolved:
                real = places.real
                real = None if real is None else real.view(-1, *[1] * (grad.dim() - 2))
                moved[name][:, places.again] = _there(grad[:, places.redone], real)
                grad[:, places.redone] = 0
        d_rows = torch.empty_like(rows)
        if proj.shape[-1] < front.layout.width:  # gates lie beside the rows; here no token has any
            *own, gates = parameters
            parameters = *own, gates.new_zeros(E, *gates.shape[1:])
        of_parameters = front.backward(
            rows, parameters, grads._replace(**moved), d_rows, places.documents
        )
        d_conv = d_rows[..., front.layout.conv_columns]
        d_history = _there(d_conv[places.received], places.used)
        redone = d_conv.new_zeros(table.lines[:, 2:].numel(), B, channels)
        redone[places.slots] = d_conv[places.again]
        return BufferedBackward(d_history, grads, front, table, redone, of_parameters[:2])


def _there(x: Tensor, mask: Tensor | None) -> Tensor:
    """Zero where there is none. Not a product: 0 * NaN would pass NaN on."""
    return x if mask is None else torch.where(mask, x, x.new_zeros(()))


class BufferedBackward(NamedTuple):
    """See :class:`EdgesBackward`."""

    d_history: Tensor
    grads: Any
    front: Front
    table: HistoryTable
    redone: Tensor  # [N (W - 1), B, C], gradients of the tokens computed again
    of_parameters: tuple[Tensor | None, ...] | None

    def add(
        self, d_proj: Tensor, returned: Tensor, of_parameters: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        tokens, sources = self.table.additions[:, 0], self.table.additions[:, 1:]
        if len(tokens):
            nothing = returned.new_zeros(1, *returned.shape[1:])  # the last row, for -1
            further = torch.cat([self.redone, returned, nothing])[sources].sum(1)
            if isinstance(self.table, StaticHistoryTable):
                tokens, further = tokens[self.table.distinct], further[self.table.distinct]
            d_conv = d_proj[..., self.front.layout.conv_columns]
            d_conv[tokens] = (d_conv[tokens] + further).to(d_proj.dtype)
        if self.of_parameters is None:
            return of_parameters
        # Only the convolution is computed again: other parameters have no second gradient.
        both = zip(of_parameters[:2], self.of_parameters, strict=True)
        return *(None if x is None or y is None else x + y for x, y in both), *of_parameters[2:]


class Transfer(Protocol):
    def wait(self) -> Any: ...


class Arrived:
    """The transfer of what is on this rank already."""

    def wait(self) -> None:
        """Nothing travels."""


class HistoryLink(Protocol):
    """The source of the history, which also takes its gradient."""

    table: HistoryTable

    def fetch(self, rows_sBC: Tensor) -> tuple[Tensor, Transfer]:
        """Start to send the rows that others need, and to receive the history ``[R, B, C]``."""
        ...

    def give_back(self, d_history_RBC: Tensor) -> tuple[Tensor, Transfer]:
        """Start the reverse: receive the gradients of the rows that :meth:`fetch` sent."""
        ...


class ContinuedFront(FrontAround):
    """A front over pieces, with the results of the ``front`` over whole sequences.

    One object serves one forward and its backward. The history is fetched once.
    """

    def __init__(self, front: Front, link: HistoryLink) -> None:
        super().__init__(front)
        self._link, self._table = link, link.table
        self._columns = front.layout.conv_columns
        self._history_RBC: Tensor | None = None
        of_kernels = getattr(front, "edges", None)
        edges = None if of_kernels is None else of_kernels()
        self._edges: Edges = BufferedEdges(front) if edges is None else edges

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
    ) -> Any:
        history, transfer = self._history_RBC, None
        if history is None:
            history, transfer = self._link.fetch(proj[..., self._columns])
            self._history_RBC = history
        made = self._front.forward(proj, parameters, documents, only)
        if transfer is not None:
            transfer.wait()
        names = self.convolved if only is None else [x for x in self.convolved if x in only]
        if len(self._table.lines) and names:
            self._edges.redo(EdgeInputs(self._table, proj, parameters, history), made, names)
        return made

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: Any,
        d_proj: Tensor,
        documents: Documents | None,
    ) -> tuple[Tensor | None, ...]:
        assert self._history_RBC is not None
        inputs = EdgeInputs(self._table, proj, parameters, self._history_RBC)
        edges = self._edges.backward(inputs, grads)
        returned, transfer = self._link.give_back(edges.d_history)
        of_parameters = self._front.backward(proj, parameters, edges.grads, d_proj, documents)
        transfer.wait()
        return edges.add(d_proj, returned, of_parameters)

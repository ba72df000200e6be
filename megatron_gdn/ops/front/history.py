"""A front over pieces of sequences, which start from the rows before them: the *history*.

A token's taps reach W - 1 rows back. So the first W - 1 tokens of a piece need rows that are not in
the batch; they come from other ranks or from a cache. The front first runs on the batch as if every
piece were a sequence, while the history travels. Then the first tokens of the pieces, their
*edges*, are computed again with the history: by kernels of their own (:mod:`.fused_edges`), or by
the front itself in plain steps (:mod:`.edges`).

Legend: s tokens of the batch, B batch, P projection width, C conv channels, W taps, N pieces that
have a history, R rows of history, M tokens that get further gradients.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Protocol, cast, runtime_checkable

from torch import Tensor

from ..documents import Documents
from .base import Front, FrontAround, Parameters
from .edges import BufferedEdges, EdgeInputs, Edges, HistoryTable


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


@runtime_checkable
class FrontWithEdges(Protocol):
    """A front that can compute the first tokens of pieces with kernels of its own."""

    def edges(self) -> Edges | None:
        """None if the front itself computes the edges, see :mod:`.edges`."""
        ...


@cache
def _has_edges(front: type) -> bool:
    # Asked once per class: a check against a protocol is slow, and every forward needs the answer.
    return issubclass(front, FrontWithEdges)


class ContinuedFront(FrontAround):
    """A front over pieces, with the results of the front over whole sequences.

    One object serves one forward and its backward. The history is fetched once.

    Args:
        front: the front of whole sequences.
        link: the source of the history.
    """

    def __init__(self, front: Front, link: HistoryLink) -> None:
        super().__init__(front)
        self._link, self._table = link, link.table
        self._columns = front.layout.conv_columns
        self._history_RBC: Tensor | None = None
        edges = cast(FrontWithEdges, front).edges() if _has_edges(type(front)) else None
        if edges is None:
            edges = BufferedEdges(front)
        self._edges: Edges = edges

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
    ) -> Any:
        """As the inner front's; ``documents`` are the pieces."""
        history, transfer = self._history_RBC, None
        if history is None:
            history, transfer = self._link.fetch(proj[..., self._columns])
            self._history_RBC = history
        made = self._front.forward(proj, parameters, documents, only)
        if transfer is not None:
            transfer.wait()
        names = self.convolved if only is None else [x for x in self.convolved if x in only]
        if self._table.count and names:
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
        """As the inner front's. The gradient of the history travels meanwhile."""
        assert self._history_RBC is not None
        inputs = EdgeInputs(self._table, proj, parameters, self._history_RBC)
        edges = self._edges.backward(inputs, grads)
        returned, transfer = self._link.give_back(edges.d_history)
        of_parameters = self._front.backward(proj, parameters, edges.grads, d_proj, documents)
        transfer.wait()
        return edges.add(d_proj, returned, of_parameters)

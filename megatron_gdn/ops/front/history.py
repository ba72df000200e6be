"""A front over pieces of sequences, which start from the rows before them: the *history*.

A token's taps reach W - 1 rows back. So the first W - 1 tokens of a piece need rows that are not in
the batch; they come from other ranks or from a cache. The front first runs on the batch as if every
piece were a sequence. The same front then computes the first tokens of the pieces again, in a small
buffer:

    [ history of the piece | first rows of the piece ]     for every piece that has a history

Legend: s tokens of the batch, B batch, P projection width, C conv channels, W taps, R rows of
history, E rows of the small buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..documents import Documents
from ..rows import EvenRows, Rows, put, take, zero
from .base import Front, FrontAround, Parameters


@dataclass(frozen=True, eq=False)
class HistoryTable:
    """The rows that are computed again, and the places of their gradients; indices on the device.

    Attributes:
        edges: the stretches of the small buffer, as documents; None if no row is computed again.
        history_at: rows of the small buffer that hold the history, in the order of arrival.
        redone_at, again_at: tokens of the batch that are computed again, and their rows in the
            small buffer.
        gradient_rows: tokens of the batch that get further gradients.
        gradient_sources: ``[rows, most]``. For each gradient row, the indices into ``cat(edge,
            returned, zero)`` that are summed.
        sent_from: the rows that were sent, as ``(start, width)`` of a few stretches, if no row gets
            more than one further gradient; else None.
    """

    edges: Documents | None
    history_at: Rows
    redone_at: Rows
    again_at: Rows
    gradient_rows: Tensor
    gradient_sources: Tensor
    sent_from: tuple[tuple[int, int], ...] | None


class Transfer(Protocol):
    def wait(self) -> Any: ...


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
    """A front over pieces, with the results of the front over whole sequences.

    One object serves one forward and its backward. The history is fetched once. If a second forward
    makes the small buffer again, the backward reuses it.

    Args:
        front: the front of whole sequences.
        link: the source of the history.
    """

    def __init__(self, front: Front, link: HistoryLink) -> None:
        super().__init__(front)
        self._link, self._table = link, link.table
        self._columns = front.layout.conv_columns
        self._history_RBC: Tensor | None = None
        self._edge_EBP: Tensor | None = None

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
    ) -> Any:
        """As the inner front's; ``documents`` are the pieces."""
        transfer, again = None, self._history_RBC is not None
        if not again:
            self._history_RBC, transfer = self._link.fetch(proj[..., self._columns])
        made = self._front.forward(proj, parameters, documents, only)
        if transfer is not None:
            transfer.wait()
        names = self.names if only is None else only
        convolved = tuple(name for name in names if name in self.convolved)
        if self._table.edges is None or not convolved:
            return made
        edge_EBP = self._edge_rows(proj)
        if again:
            self._edge_EBP = edge_EBP
        redone = self._front.forward(edge_EBP, parameters, self._table.edges, convolved)
        for name in convolved:
            whole, edge = getattr(made, name), getattr(redone, name)
            put(whole, self._table.redone_at, 1, edge, self._table.again_at)
        return made

    def backward(
        self,
        proj: Tensor,
        parameters: Parameters,
        grads: Any,
        d_proj: Tensor,
        documents: Documents | None,
    ) -> tuple[Tensor | None, ...]:
        """As the inner front's. Tokens computed again get their gradients in the small buffer."""
        table, columns = self._table, self._columns
        channels = self.layout.conv_width
        d_edge_EBC = proj.new_empty(0, *proj.shape[1:2], channels, dtype=_wide(proj))
        of_edges, returning = None, d_edge_EBC
        if table.edges is not None:
            edge_EBP, self._edge_EBP = self._edge_EBP, None
            if edge_EBP is None:
                edge_EBP = self._edge_rows(proj)
            d_edge_EBP = torch.empty_like(edge_EBP)
            of_edges = self._front.backward(
                edge_EBP, parameters, self._take_edge_gradients(grads), d_edge_EBP, table.edges
            )
            d_edge_EBC = d_edge_EBP[..., columns]
            returning = take(d_edge_EBC, table.history_at, 0)
        returned, transfer = self._link.give_back(returning)
        rest = self._front.backward(proj, parameters, grads, d_proj, documents)
        transfer.wait()
        d_conv = d_proj[..., columns]
        one_by_one = table.edges is None or isinstance(table.redone_at, EvenRows)
        if one_by_one and table.sent_from is not None:
            self._add_one_by_one(d_conv, d_edge_EBC, returned)
        elif table.gradient_rows.numel():
            nothing = returned.new_zeros(1, *returned.shape[1:])
            pool = torch.cat([d_edge_EBC, returned, nothing])
            extra = pool[table.gradient_sources].sum(1)
            extra += d_conv.index_select(0, table.gradient_rows)
            d_conv.index_copy_(0, table.gradient_rows, extra.to(d_proj.dtype))
        if of_edges is None:
            return rest
        # Only the convolution is computed again: other parameters have no second gradient.
        both = zip(rest[:2], of_edges[:2], strict=True)
        return *(None if x is None or y is None else x + y for x, y in both), *rest[2:]

    def _add_one_by_one(self, d_conv: Tensor, d_edge_EBC: Tensor, returned: Tensor) -> None:
        """Add the further gradients to their few rows, in fp32, each rounded once."""
        table = self._table
        assert table.sent_from is not None
        if table.edges is not None:
            assert isinstance(table.redone_at, EvenRows)
            ours = table.redone_at.of(d_conv, 0)
            ours.add_(take(d_edge_EBC, table.again_at, 0).reshape(ours.shape))
        begin = 0
        for start, width in table.sent_from:
            d_conv[start : start + width].add_(returned[begin : begin + width])
            begin += width

    def _edge_rows(self, proj: Tensor) -> Tensor:
        """The small buffer, as projection rows ``[E, B, P]`` whose other columns are zero.

        In fp32, so that its gradients are rounded only where they are added to the batch's.
        """
        table = self._table
        assert table.edges is not None and self._history_RBC is not None
        edge_EBP = proj.new_zeros(table.edges.total_tokens, *proj.shape[1:], dtype=_wide(proj))
        edge_EBC = edge_EBP[..., self._columns]
        put(edge_EBC, table.history_at, 0, self._history_RBC)
        put(edge_EBC, table.again_at, 0, proj[..., self._columns], table.redone_at)
        return edge_EBP

    def _take_edge_gradients(self, grads: Any) -> Any:
        """Move the gradients of the redone tokens from ``grads`` to the small buffer's.

        Inputs that the convolution does not make are not computed again: their gradient there is 0.
        """
        assert self._table.edges is not None
        E, moved = self._table.edges.total_tokens, {}
        for name in self.names:
            grad = getattr(grads, name)
            if name in self.convolved:
                moved[name] = self._take_edge_gradient(grad, E)
            else:
                moved[name] = grad.new_zeros(grad.shape[0], E, *grad.shape[2:])
        return grads._replace(**moved)

    def _take_edge_gradient(self, grad: Tensor, E: int) -> Tensor:
        table = self._table
        edge = grad.new_zeros(grad.shape[0], E, *grad.shape[2:])
        put(edge, table.again_at, 1, grad, table.redone_at)
        zero(grad, table.redone_at, 1)
        return edge


def _wide(proj: Tensor) -> torch.dtype:
    return torch.promote_types(proj.dtype, torch.float32)

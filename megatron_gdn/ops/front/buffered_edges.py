"""The first tokens of pieces, computed with their history by the front itself, in plain steps.

The front runs once more, over a small buffer of short sequences:

    [ history of the piece | first tokens of the piece ]     for every piece that has a history

Legend: s tokens of the batch, B batch, P projection width, C conv channels, W taps, R rows of
history, E rows of the small buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .base import Front
from .edges import EdgeInputs, HistoryTable, StaticHistoryTable


class BufferedEdges(NamedTuple):
    """See :class:`.history.Edges`. The buffer is fp32 (fp64 for fp64); its results are rounded."""

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
        if not table.count:
            nothing = proj.new_empty(0, B, channels, dtype=wide)
            return BufferedBackward(nothing, grads, front, table, nothing, None)
        places, rows = table.buffer, self._buffer(inputs)
        E, moved = len(rows), {}
        for name in front.names:
            grad = getattr(grads, name)
            moved[name] = grad.new_zeros(grad.shape[0], E, *grad.shape[2:])
            if name in front.convolved:
                real = (
                    None if places.real is None else places.real.view(-1, *[1] * (grad.dim() - 2))
                )
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
    """See :class:`.edges.EdgesBackward`."""

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

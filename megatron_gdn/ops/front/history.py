"""The rows before the pieces of a batch: their *history*.

A token's taps reach W - 1 rows back. So the first W - 1 tokens of a piece, its *edge*, also read
rows that are not before them in the batch: other ranks, a cache or a parent have these. The front
waits for them. The convolution is linear before its activation, so what they add is a term of its
own, the *lead-in*, which few rows give and which the pass over all tokens adds:

    pre[p]     = bias + the taps over the piece's own rows + lead_in[p]          p = 0 .. W - 2
    lead_in[p] = sum of tap[W - 1 - p - age] * row[age] over the ages 1 .. W - 1 - p

Legend: s tokens of the batch, B batch, C conv channels, W taps, N pieces that have a history, R
rows of history, M tokens whose rows were sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..host_tables import to_device


@dataclass(frozen=True, eq=False)
class HistoryTable:
    """Where the rows of history belong; int32 on the device.

    There may be room to spare: a piece that is not there has rows and tokens -1, an addition that
    is not there has the token -1.
    """

    # [N, W - 1], the row that lies 1, 2, .. before each piece; -1: none. No row twice.
    before: Tensor
    edge: Tensor  # [N, W - 1], the first tokens of each piece, -1 behind the end of a short one
    place: Tensor  # [s], for each token its place in ``edge``, flattened; -1 outside
    # [M, 1 + most]: a token, each once, and the returned rows that are added to its gradient, -1
    # for none, in this order.
    additions: Tensor

    @classmethod
    def build(
        cls,
        first: Tensor,
        count: Tensor,
        before: Tensor,
        sent: Tensor,
        tokens: int,
        device: torch.device,
    ) -> HistoryTable:
        """From int64 tensors on the host: each piece's first token and length, and rows sent."""
        ahead = torch.arange(before.shape[1], device="cpu")
        edge = torch.where(ahead < count[:, None], first[:, None] + ahead, -1)
        flat = edge.flatten()
        place = torch.full((tokens,), -1, dtype=torch.int32, device="cpu")
        place[flat[flat >= 0]] = (flat >= 0).nonzero().flatten().int()
        rows, sources = _by_row(sent)
        additions = torch.cat([rows[:, None], sources], dim=1)
        return cls(*(to_device(x.int(), device) for x in (before, edge, place, additions)))


def ranges(start: Tensor, count: Tensor) -> Tensor:
    """``start[0] .. start[0] + count[0] - 1, start[1] .., ...``"""
    first = count.cumsum(0) - count
    return torch.arange(int(count.sum()), device="cpu") + (start - first).repeat_interleave(count)


def _by_row(sent: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct tokens of ``sent``, and for each its places there, filled up with -1."""
    order = sent.argsort(stable=True)
    rows, count = sent[order].unique_consecutive(return_counts=True)
    table = sent.new_full((len(rows), int(count.max()) if len(rows) else 0), -1)
    line = torch.arange(len(rows), device="cpu").repeat_interleave(count)
    table[line, ranges(torch.zeros_like(count), count)] = order
    return rows, table


class History(NamedTuple):
    """The history of one batch, for a front's forward; with ``d_rows`` for its backward."""

    rows: Tensor  # [R, B, C], any strides
    table: HistoryTable
    d_rows: Tensor | None = None  # written, [R, B, C] contiguous, in fp32 or wider

    def for_backward(self) -> History:
        wide = torch.promote_types(self.rows.dtype, torch.float32)
        shape = self.rows.shape  # of fixed buffers some rows belong to no piece: zeros
        return self._replace(d_rows=torch.zeros(shape, dtype=wide, device=self.rows.device))

    def columns(self, columns: slice) -> History:
        return self._replace(rows=self.rows[..., columns])

    def added_to(self, pre_BsC: Tensor, weight_CW: Tensor) -> Tensor:
        """``pre`` and the lead-in; differentiable."""
        before, edge = self.table.before, self.table.edge.flatten()
        past = before.shape[1]
        # Masked before any product: 0 * NaN would pass NaN on.
        rows_NABC = self.rows[before.clamp(min=0)].to(pre_BsC.dtype)
        rows_NABC = rows_NABC.masked_fill((before < 0)[..., None, None], 0)
        taps_WC = weight_CW.to(pre_BsC.dtype).T.flip(0)  # by delay
        lead_in = [(rows_NABC[:, : past - p] * taps_WC[p + 1 :, None]).sum(1) for p in range(past)]
        lead_BPC = torch.stack(lead_in, 1).flatten(0, 1).transpose(0, 1)
        lead_BPC = lead_BPC.masked_fill((edge < 0)[:, None], 0)
        return pre_BsC.index_add(1, edge.clamp(min=0), lead_BPC)


class HistoryLink(Protocol):
    """The source of the history, which also takes its gradient."""

    def fetch(self, rows_sBC: Tensor) -> History:
        """Send the rows that others need, and wait for those of this batch's pieces."""
        ...

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        """The reverse: the gradients of the rows that :meth:`fetch` sent."""
        ...

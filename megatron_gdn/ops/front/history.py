"""The rows before the pieces of a batch: their *history*.

A token's taps reach W - 1 rows back. So the first W - 1 tokens of a piece, its *edge*, read rows
that another rank, a cache or a parent holds; the front waits for these rows. They add a term of its
own to the convolution, the *lead-in*, because the convolution is linear before its activation:

    pre[p]     = bias + the taps over the piece's own rows + lead_in[p]          p = 0 .. W - 2
    lead_in[p] = sum of tap[W - 1 - p - age] * row[age] over the ages 1 .. W - 1 - p

Legend: s tokens of the batch, N pieces that have a history, R rows of history, M tokens whose rows
were sent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..documents import Documents
from ..host_tables import cached_by_stream, to_device


@dataclass(frozen=True, eq=False)
class HistoryTable:
    """Where the rows of history belong; int32 on the device.

    In fixed buffers an absent piece has rows and tokens -1, an absent addition has the token -1.
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
        """The table from int64 host tensors: first token and length of pieces, and rows sent."""
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
    """The distinct tokens of ``sent``, and for each its places in ``sent``, padded with -1."""
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


def history_of(history_NCW: Tensor, documents: Documents | None, tokens: int) -> History:
    """The history from the W - 1 rows before every sequence, oldest first."""
    packed, device = documents is not None, history_NCW.device
    rows = history_NCW.permute(2, 0, 1)
    if packed:
        rows = history_NCW.transpose(1, 2).flatten(0, 1)[:, None]
    lengths = Documents.lengths_of(documents, tokens)
    return History(rows, _history_table(lengths, history_NCW.shape[2], device))


@cached_by_stream(32)
def _history_table(lengths: tuple[int, ...], past: int, device: torch.device) -> HistoryTable:
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    oldest = torch.arange(len(lengths), device="cpu") * past
    before = oldest[:, None] + torch.arange(past - 1, -1, -1, device="cpu")
    nothing, first = counts[:0], counts.cumsum(0) - counts
    return HistoryTable.build(first, counts, before, nothing, sum(lengths), device)


@cached_by_stream(32)
def _last_index(
    lengths: tuple[int, ...], past: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """For each of the N * past rows: its new token, its old row, and whether to take the token."""
    length = torch.tensor(lengths, dtype=torch.int64, device="cpu")[:, None]
    start = length.cumsum(0) - length
    place = length - past + torch.arange(past, device="cpu")  # within the sequence; < 0: older
    token = (start + place.clamp(min=0)).clamp(max=max(sum(lengths) - 1, 0))
    old = torch.arange(len(lengths), device="cpu")[:, None] * past + (place + past).clamp(
        max=past - 1
    )
    token, old, fresh = (to_device(x.flatten(), device) for x in (token, old, place >= 0))
    return token, old, fresh


def last_rows(rows_sBC: Tensor, before_NCp: Tensor, documents: Documents | None) -> Tensor:
    """The last p convolved rows of every sequence, ``[N, C, p]``: new rows, else older ones."""
    N, _, past = before_NCp.shape
    if documents is None:
        # Copy only the new rows that stay.
        tail = rows_sBC[max(rows_sBC.shape[0] - past, 0) :].permute(1, 2, 0)
        return torch.cat([before_NCp, tail], dim=2)[..., tail.shape[2] :].contiguous()
    token, old, fresh = _last_index(documents.lengths, past, rows_sBC.device)
    before = before_NCp.transpose(1, 2).flatten(0, 1).index_select(0, old)
    last = torch.where(fresh[:, None], rows_sBC[:, 0].index_select(0, token), before)
    return last.unflatten(0, (N, past)).transpose(1, 2).contiguous()


class HistoryLink(Protocol):
    """The source of the history, which also takes its gradient."""

    def fetch(self, rows_sBC: Tensor) -> History:
        """Send the rows that others need, and wait for those of this batch's pieces."""
        ...

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        """The reverse: the gradients of the rows that :meth:`fetch` sent."""
        ...

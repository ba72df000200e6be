"""The *history* of a batch: the rows before its pieces.

The convolution of a token reads the W - 1 rows before the token. So the first W - 1
tokens of a piece, its *edge*, need rows from another rank, a cache or a parent piece,
and the front waits for these rows. The part of the convolution that reads these rows is
a separate sum, the *lead-in*. For token p of a piece, ``pre[p]`` is the convolution's
result before the activation:

    pre[p]     = bias + taps over the piece's own rows + lead_in[p]    0 <= p < W - 1
    lead_in[p] = sum of tap[W - 1 - p - age] * row[age] over 1 <= age < W - p

``row[age]`` is the row ``age`` tokens before the piece.

Legend: s tokens of the batch, N pieces with a history, R rows of history, M tokens
whose rows this rank sent, A ages of rows (W - 1), P the N (W - 1) tokens of all edges.
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
    """Which rows are the history of which tokens, for N pieces; int32 on the device.

    In fixed buffers, unused pieces have indices -1, and unused lines of
    ``gradient_additions`` have token -1.
    """

    # [N, W - 1]: entry [n, i] is the index in `History.rows` of the row i + 1 tokens
    # before piece n; -1: there is no such row
    rows_before: Tensor
    # [N, W - 1]: the indices of each piece's first tokens; -1 past a short piece's end
    edge_tokens: Tensor
    # [s]: each token's index in the flattened ``edge_tokens``; -1 for other tokens
    edge_index: Tensor
    # [M, 1 + most]: one line for each token whose row was sent. A line has the token's
    # index, then the indices of the gradients that return for the token, then -1. The
    # returned gradients, at most ``most``, are added in this order.
    gradient_additions: Tensor

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
        """Build the table from tensors on the host; the batch has ``tokens`` tokens.

        ``first``, ``count`` ``[N]``: each piece's first token and number of tokens.
        ``before`` ``[N, W - 1]``: the field ``rows_before``. ``sent``: the tokens whose
        rows were sent, in the order in which their gradients return; a token may occur
        several times.
        """
        ahead = torch.arange(before.shape[1], device="cpu")  # 0 .. W - 2
        edge = torch.where(ahead < count[:, None], first[:, None] + ahead, -1)
        flat_edge = edge.flatten()
        in_piece = flat_edge >= 0
        edge_index = torch.full((tokens,), -1, dtype=torch.int32, device="cpu")
        edge_index[flat_edge[in_piece]] = in_piece.nonzero().flatten().int()
        # the returned gradients, grouped by their tokens; stable, so that a token's
        # gradients are added in the order of ``sent``
        order = sent.argsort(stable=True)
        token, returns = sent[order].unique_consecutive(return_counts=True)
        if len(returns):
            most_returns = int(returns.max())
        else:
            most_returns = 0
        # for each such token, the indices of its returned gradients
        sources = sent.new_full((len(returns), most_returns), -1)
        line = torch.arange(len(returns), device="cpu").repeat_interleave(returns)
        column = join_ranges(torch.zeros_like(returns), returns)
        sources[line, column] = order
        additions = torch.cat([token[:, None], sources], dim=1)
        return cls(
            rows_before=to_device(before.int(), device),
            edge_tokens=to_device(edge.int(), device),
            edge_index=to_device(edge_index.int(), device),
            gradient_additions=to_device(additions.int(), device),
        )


def join_ranges(start: Tensor, count: Tensor) -> Tensor:
    """``start[n] .. start[n] + count[n] - 1`` for every n, joined into one tensor."""
    first = count.cumsum(0) - count
    shift = (start - first).repeat_interleave(count)
    return torch.arange(int(count.sum()), device="cpu") + shift


class History(NamedTuple):
    """The history of one batch; a front's backward writes the rows' gradient to
    ``d_rows``."""

    rows: Tensor  # [R, B, C], any strides
    table: HistoryTable
    d_rows: Tensor | None = None  # [R, B, C] contiguous, in fp32 or wider

    def with_gradient_buffer(self) -> History:
        """The same history with a buffer of zeros as ``d_rows``."""
        wide = torch.promote_types(self.rows.dtype, torch.float32)
        # zeros, since a backward skips unused rows of fixed buffers
        d_rows = torch.zeros(self.rows.shape, dtype=wide, device=self.rows.device)
        return self._replace(d_rows=d_rows)

    def add_lead_in_to(self, pre_BsC: Tensor, weight_CW: Tensor) -> Tensor:
        """The pre-activations ``pre [B, s, C]`` plus the lead-in; differentiable.

        ``weight_CW``: the taps of the convolution, the tap of the oldest row first.
        """
        before = self.table.rows_before
        edge = self.table.edge_tokens.flatten()
        past = before.shape[1]  # W - 1
        # rows_NABC[:, age - 1] is the row ``age`` tokens before each piece. Absent rows
        # are masked before any product, because 0 * NaN is NaN.
        rows_NABC = self.rows[before.clamp(min=0)].to(pre_BsC.dtype)
        rows_NABC = rows_NABC.masked_fill((before < 0)[..., None, None], 0)
        # taps_WC[d] is the tap of the row that is d tokens before the output's token.
        taps_WC = weight_CW.to(pre_BsC.dtype).T.flip(0)
        lead_in = []  # of the tokens p = 0 .. W - 2 of all pieces, [N, B, C] each
        for p in range(past):
            products = rows_NABC[:, : past - p] * taps_WC[p + 1 :, None]
            lead_in.append(products.sum(1))
        lead_BPC = torch.stack(lead_in, 1).flatten(0, 1).transpose(0, 1)
        lead_BPC = lead_BPC.masked_fill((edge < 0)[:, None], 0)
        return pre_BsC.index_add(1, edge.clamp(min=0), lead_BPC)


def history_of(
    history_NCW: Tensor, documents: Documents | None, tokens: int
) -> History:
    """The `History` of N sequences. ``history_NCW [N, C, W - 1]`` has the rows before
    each sequence, the oldest first.

    The sequences are N batch rows of ``tokens`` tokens, or ``documents`` in one batch
    row.
    """
    if documents is None:
        rows_RBC = history_NCW.permute(2, 0, 1)
        lengths = (tokens,)
    else:
        rows_RBC = history_NCW.transpose(1, 2).flatten(0, 1)[:, None]
        lengths = documents.lengths
    table = _history_table(lengths, history_NCW.shape[2], history_NCW.device)
    return History(rows_RBC, table)


@cached_by_stream(32)
def _history_table(
    lengths: tuple[int, ...], past: int, device: torch.device
) -> HistoryTable:
    """The table of sequences with ``lengths``, each with ``past`` = W - 1 rows before
    it; no row is sent.

    Of the ``past`` rows before sequence n, row i has index ``n * past + i`` in the
    history; row 0 is the oldest. Sequences that are batch rows have the same length and
    the same indices, so ``lengths`` then has one entry.
    """
    counts = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    oldest = torch.arange(len(lengths), device="cpu") * past
    before = oldest[:, None] + torch.arange(past - 1, -1, -1, device="cpu")
    sent = counts[:0]
    first = counts.cumsum(0) - counts
    return HistoryTable.build(first, counts, before, sent, sum(lengths), device)


class _LastRowIndices(NamedTuple):
    """Where the last p rows of N sequences are, as flat tensors ``[N p]``.

    A sequence's old rows are the p rows before its new tokens.
    """

    is_new: Tensor  # bool, whether the row is a new token's row
    new_index: Tensor  # the row's index among the new rows, if it is new
    old_index: Tensor  # the row's index among the old rows, if it is old


@cached_by_stream(32)
def _last_row_indices(
    lengths: tuple[int, ...], past: int, device: torch.device
) -> _LastRowIndices:
    """Where the last ``past`` rows of each sequence are, after ``lengths`` new tokens.

    For each row, only one of ``new_index`` and ``old_index`` is used. The other is
    clamped, since ``index_select`` needs legal indices.
    """
    length = torch.tensor(lengths, dtype=torch.int64, device="cpu")[:, None]
    start = length.cumsum(0) - length
    # the position of each last row in its sequence; the old rows have -past .. -1
    position = length - past + torch.arange(past, device="cpu")
    new_index = (start + position.clamp(min=0)).clamp(max=max(sum(lengths) - 1, 0))
    first_old = torch.arange(len(lengths), device="cpu")[:, None] * past
    old_index = first_old + (position + past).clamp(max=past - 1)
    is_new = position >= 0
    return _LastRowIndices(
        to_device(is_new.flatten(), device),
        to_device(new_index.flatten(), device),
        to_device(old_index.flatten(), device),
    )


def last_rows(
    rows_sBC: Tensor, before_NCp: Tensor, documents: Documents | None
) -> Tensor:
    """The last p rows of each sequence, ``[N, C, p]``. A sequence has the rows
    ``before_NCp`` and, after these, the rows ``rows_sBC``."""
    N, _, past = before_NCp.shape
    if documents is None or not len(rows_sBC):
        # Copy no more than the last p of the new rows. Without new rows, ``expand``
        # makes N empty sequences from one batch row.
        newest = rows_sBC[max(rows_sBC.shape[0] - past, 0) :]
        newest_NCp = newest.permute(1, 2, 0).expand(N, -1, -1)
        joined = torch.cat([before_NCp, newest_NCp], dim=2)
        return joined[..., newest_NCp.shape[2] :].contiguous()
    where = _last_row_indices(documents.lengths, past, rows_sBC.device)
    old_rows = before_NCp.transpose(1, 2).flatten(0, 1).index_select(0, where.old_index)
    new_rows = rows_sBC[:, 0].index_select(0, where.new_index)
    last = torch.where(where.is_new[:, None], new_rows, old_rows)
    return last.unflatten(0, (N, past)).transpose(1, 2).contiguous()


class HistoryLink(Protocol):
    """Gets the history of a batch from other ranks, or from other documents of the
    batch."""

    def fetch(self, rows_sBC: Tensor) -> History:
        """Send the rows that other pieces need; wait for the history of this batch and
        return it. ``rows_sBC``: the convolution's columns of this batch's rows."""
        ...

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        """Send ``d_rows_RBC``, the gradients of the history's rows, to the pieces from
        which these rows came. Return the gradients of the rows that ``fetch`` sent, in
        the same order."""
        ...

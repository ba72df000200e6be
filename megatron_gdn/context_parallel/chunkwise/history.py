"""The convolution across pieces of a sequence that lie on different ranks.

A token's taps reach W - 1 rows back, so the first W - 1 tokens of a piece need rows of the pieces
before it (of several, where those are shorter than that). Only these rows travel, once per
direction; their gradients travel back. The preparation runs on the local rows as if every piece
were a document, and the first tokens of the pieces are then done again in a small buffer

    [ rows from other pieces | first rows of the piece ]     for every piece that has some

by the same preparation, which thereby needs to know nothing of any of this.

Legend: s this rank's tokens, B batch, P projection width, C conv channels, W taps, R rows
received, E rows of the small buffer.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops import Documents
from ...ops.front.base import Preparation, Prepared, PreparedGrads
from ...ops.host_tables import to_device
from ..layouts import SequenceLayout
from .map_exchange import exchange_rows
from .pieces import pieces_of
from .rows import EvenRows, Rows, put, rows_at, stretches, take, zero

_FEW = 4  # stretches that are added to one by one rather than gathered


@dataclass(frozen=True, eq=False)
class HaloTable:
    """Which rows one rank sends, receives and does again. Indices are on the device.

    Attributes:
        send_rows: local rows that others (or this rank's own later pieces) need, by receiver.
        send_counts, receive_counts: messages by rank.
        edges: the small buffer's documents; None when this rank has nothing to do again.
        gradient_rows: local rows that a gradient from the small buffers belongs to.
        gradient_sources: ``[rows, most]``, the rows of [small buffer | returned | a zero row] that
            add up to it.
        received_at: places in the small buffer of the received rows.
        redone_at, again_at: local rows that are done again, and their places in the small buffer.
        sent_from: ``send_rows`` as the starts and widths of a few stretches, where no row gets
            more than one gradient; else None.
    """

    send_rows: Tensor
    send_counts: tuple[int, ...]
    receive_counts: tuple[int, ...]
    edges: Documents | None
    gradient_rows: Tensor
    gradient_sources: Tensor
    received_at: Rows
    redone_at: Rows
    again_at: Rows
    sent_from: tuple[tuple[int, int], ...] | None


@lru_cache(maxsize=16)
def halo_table(
    lengths: tuple[int, ...],
    cp_size: int,
    layout: SequenceLayout,
    rank: int,
    taps: int,
    device: torch.device,
) -> HaloTable | None:
    """Built once per micro-batch, from host lengths; None when no rank needs any row."""
    pieces, reach = pieces_of(lengths, cp_size, layout), taps - 1
    if not (pieces.any_continues and reach):
        return None
    # Every piece asks for the rows start - reach .. start - 1, as far as its document goes back.
    wanted = pieces.start[:, None] - reach + torch.arange(reach, device="cpu")
    piece, column = (wanted >= (pieces.start - pieces.seen)[:, None]).nonzero(as_tuple=True)
    source = pieces.place[wanted[piece, column]]
    giver, row, taker = source // pieces.tokens, source % pieces.tokens, pieces.rank[piece]
    # Both ends list a message by the taker's pieces in its order, oldest row first.
    order = (pieces.local_start[piece] * reach + column).argsort()
    giver, row, taker, piece = giver[order], row[order], taker[order], piece[order]
    sent = (giver == rank).nonzero().flatten()
    sent = sent[taker[sent].argsort(stable=True)]
    taken = (taker == rank).nonzero().flatten()
    by_giver = giver[taken].argsort(stable=True)

    mine = pieces.held_by(rank)
    halo = pieces.seen[mine].clamp(max=reach)
    mine, halo = mine[halo > 0], halo[halo > 0]
    redone = pieces.length[mine].clamp(max=reach)
    edge_length = halo + redone
    edge_start = edge_length.cumsum(0) - edge_length
    halo_slots = _ranges(edge_start, halo)
    redone_slots = _ranges(edge_start + halo, redone)
    redone_rows = _ranges(pieces.local_start[mine], redone)

    edge_rows = int(edge_length.sum())
    rows, sources = _by_row(
        torch.cat([redone_rows, row[sent]]),
        torch.cat([redone_slots, edge_rows + torch.arange(len(sent), device="cpu")]),
        filler=edge_rows + len(sent),
    )
    sent_from = tuple(stretches(row[sent]))
    edges = None
    if len(mine):
        edges = Documents((0, *edge_length.cumsum(0).tolist()), device)
    return HaloTable(
        send_rows=to_device(row[sent], device),
        send_counts=tuple(taker[sent].bincount(minlength=cp_size).tolist()),
        receive_counts=tuple(giver[taken].bincount(minlength=cp_size).tolist()),
        edges=edges,
        gradient_rows=to_device(rows, device),
        gradient_sources=to_device(sources, device),
        received_at=rows_at(halo_slots[by_giver], device),
        redone_at=rows_at(redone_rows, device),
        again_at=rows_at(redone_slots, device),
        sent_from=sent_from if sources.shape[1] < 2 and len(sent_from) <= _FEW else None,
    )


def _ranges(start: Tensor, count: Tensor) -> Tensor:
    """``start[0] .. start[0] + count[0] - 1, start[1] .., ...``"""
    first = count.cumsum(0) - count
    return torch.arange(int(count.sum()), device="cpu") + (start - first).repeat_interleave(count)


def _by_row(rows: Tensor, sources: Tensor, filler: int) -> tuple[Tensor, Tensor]:
    """Group (row, source) pairs by row: the distinct rows, and their sources padded to a table."""
    order = rows.argsort(stable=True)
    rows, count = rows[order].unique_consecutive(return_counts=True)
    table = sources.new_full((len(rows), int(count.max()) if len(rows) else 0), filler)
    line = torch.arange(len(rows), device="cpu").repeat_interleave(count)
    table[line, _ranges(torch.zeros_like(count), count)] = sources[order]
    return rows, table


class HaloPreparation:
    """A preparation over pieces: same functions and results as over whole sequences.

    One object serves one forward and its backward: rows received once are used again, and the
    small buffer that the backward computes q from is its gradients' too.

    Args:
        preparation: the preparation of whole sequences.
        table: what to exchange.
        group: with whom.
    """

    def __init__(
        self, preparation: Preparation, table: HaloTable, group: dist.ProcessGroup
    ) -> None:
        self._inner, self._table, self._group = preparation, table, group
        self._received_RBC: Tensor | None = None
        self._edge_EBP: Tensor | None = None

    def prepare_forward(
        self, proj, conv_weight, conv_bias, A_log, dt_bias, sizes,
        *, documents, normalise_qk=True, eps=1e-6, parts="qkvg", dtype=None, batch_invariant=False,
    ) -> Prepared:  # fmt: skip
        """As the inner one; ``documents`` are the pieces."""
        parameters = (conv_weight, conv_bias, A_log, dt_bias)
        settings = {
            "normalise_qk": normalise_qk,
            "eps": eps,
            "dtype": dtype,
            "batch_invariant": batch_invariant,
        }
        work, again = None, self._received_RBC is not None
        if not again:
            work = self._fetch(proj, sizes.conv_width)
        made = self._inner.prepare_forward(
            proj, *parameters, sizes, documents=documents, parts=parts, **settings
        )
        if work is not None:
            work.wait()
        convolved = parts.rstrip("g")
        if self._table.edges is None or not convolved:
            return made
        edge_EBP = self._edge_rows(proj, sizes.conv_width)
        if again:
            self._edge_EBP = edge_EBP
        redone = self._inner.prepare_forward(
            edge_EBP, *parameters, sizes,
            documents=self._table.edges, parts=convolved, **settings,
        )  # fmt: skip
        for name in convolved:
            whole, edge = getattr(made, name), getattr(redone, name)
            put(whole, self._table.redone_at, 1, edge, self._table.again_at)
        return made

    def prepare_backward(
        self, proj, conv_weight, conv_bias, A_log, dt_bias, sizes, dq, dk, dv, dg, dbeta, d_proj,
        *, documents, factor=None, normalise_qk=True, eps=1e-6, batch_invariant=False,
    ) -> PreparedGrads:  # fmt: skip
        """As the inner one. The tokens done again send their gradients through the small buffer."""
        table, C = self._table, sizes.conv_width
        parameters = (conv_weight, conv_bias, A_log, dt_bias)
        settings = {
            "factor": factor,
            "normalise_qk": normalise_qk,
            "eps": eps,
            "batch_invariant": batch_invariant,
        }
        grads, returning = None, proj.new_empty(0, *proj.shape[1:2], C, dtype=_wide(proj))
        d_edge_EBC = returning
        if table.edges is not None:
            edge_EBP, self._edge_EBP = self._edge_EBP, None
            if edge_EBP is None:
                edge_EBP = self._edge_rows(proj, C)
            d_heads = [self._take_edge_gradient(x) for x in (dq, dk, dv)]
            no_gates = [dg.new_zeros(dg.shape[0], edge_EBP.shape[0], dg.shape[2])] * 2
            d_edge_EBP = torch.empty_like(edge_EBP)
            grads = self._inner.prepare_backward(
                edge_EBP, *parameters, sizes, *d_heads, *no_gates, d_edge_EBP,
                documents=table.edges, **settings,
            )  # fmt: skip
            d_edge_EBC = d_edge_EBP[..., :C]
            returning = take(d_edge_EBC, table.received_at, 0)
        returned, work = exchange_rows(
            returning, table.receive_counts, table.send_counts, self._group, async_op=True
        )
        rest = self._inner.prepare_backward(
            proj, *parameters, sizes, dq, dk, dv, dg, dbeta, d_proj,
            documents=documents, **settings,
        )  # fmt: skip
        work.wait()
        one_by_one = table.edges is None or isinstance(table.redone_at, EvenRows)
        if one_by_one and table.sent_from is not None:
            self._add_one_by_one(d_proj[..., :C], d_edge_EBC, returned)
        elif table.gradient_rows.numel():
            nothing = returned.new_zeros(1, *returned.shape[1:])
            pool = torch.cat([d_edge_EBC, returned, nothing])
            extra = pool[table.gradient_sources].sum(1)
            d_conv = d_proj[..., :C]
            extra += d_conv.index_select(0, table.gradient_rows)
            d_conv.index_copy_(0, table.gradient_rows, extra.to(d_proj.dtype))
        if grads is None:
            return rest
        # The gates are not done again: what belongs to them has no second gradient.
        return rest._replace(
            conv_weight=rest.conv_weight + grads.conv_weight,
            conv_bias=None if conv_bias is None else rest.conv_bias + grads.conv_bias,
        )

    def _add_one_by_one(self, d_conv: Tensor, d_edge_EBC: Tensor, returned: Tensor) -> None:
        """Add to the few rows that have a gradient elsewhere, in fp32, each rounded once."""
        table = self._table
        if table.edges is not None:
            ours = table.redone_at.of(d_conv, 0)
            ours.add_(take(d_edge_EBC, table.again_at, 0).reshape(ours.shape))
        begin = 0
        for start, width in table.sent_from:
            d_conv[start : start + width].add_(returned[begin : begin + width])
            begin += width

    def _fetch(self, proj: Tensor, channels: int) -> dist.Work:
        rows = proj[..., :channels].index_select(0, self._table.send_rows)
        self._received_RBC, work = exchange_rows(
            rows, self._table.send_counts, self._table.receive_counts, self._group, async_op=True
        )
        return work

    def _edge_rows(self, proj: Tensor, channels: int) -> Tensor:
        """The small buffer, as projection rows ``[E, B, P]`` whose other columns are zero.

        In fp32, so that its gradients are rounded only where they are added to the local ones.
        """
        table = self._table
        edge_EBP = proj.new_zeros(table.edges.total_tokens, *proj.shape[1:], dtype=_wide(proj))
        edge_EBC = edge_EBP[..., :channels]
        put(edge_EBC, table.received_at, 0, self._received_RBC)
        put(edge_EBC, table.again_at, 0, proj[..., :channels], table.redone_at)
        return edge_EBP

    def _take_edge_gradient(self, grad: Tensor) -> Tensor:
        """Move the gradient of the redone tokens out of ``grad`` into one of the small buffer."""
        table = self._table
        edge = grad.new_zeros(grad.shape[0], table.edges.total_tokens, *grad.shape[2:])
        put(edge, table.again_at, 1, grad, table.redone_at)
        zero(grad, table.redone_at, 1)
        return edge


def _wide(proj: Tensor) -> torch.dtype:
    return torch.promote_types(proj.dtype, torch.float32)

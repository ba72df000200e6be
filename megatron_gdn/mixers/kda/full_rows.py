"""Rows with both gates in full width, from what in_proj gives.

The narrow half of a gate times the wide half is written where the row has the gate, and the
backward writes every column of in_proj's gradient once. Between them only the narrow halves are
kept.

Legend: s tokens, B batch, p width of in_proj, P width of a row, r columns of a narrow half on one
of tp tensor-parallel ranks, R = tp r of them, C columns of a gate.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ...ops.first_derivative import first_derivative_only
from ...ops.layout import Layout


class Columns(NamedTuple):
    """Where columns lie in in_proj's rows and in rows of full width.

    Attributes:
        gates: narrow half, and the gate.
        others: those that are copied.
        width: of a row, P.
    """

    gates: tuple[tuple[slice, slice], ...]
    others: tuple[tuple[slice, slice], ...]
    width: int

    @staticmethod
    @lru_cache(maxsize=64)
    def of(in_proj: Layout, row: Layout) -> Columns:
        """Of sections in one order, where a narrow half of ``f`` is called ``f_a``."""
        gates, others = [], []
        for narrow, name in zip(in_proj.names, row.names, strict=True):
            pair = in_proj.columns(narrow), row.columns(name)
            if narrow != name:
                gates.append(pair)
            elif others and others[-1][0].stop == pair[0].start:  # one copy for neighbours
                others[-1] = tuple(
                    slice(a.start, b.stop) for a, b in zip(others[-1], pair, strict=True)
                )
            else:
                others.append(pair)
        return Columns(tuple(gates), tuple(others), row.width)


def full_rows(narrow: Tensor, columns: Columns, group: Any, *weights: Tensor) -> Tensor:
    """``[s, B, p]`` to ``[s, B, P]``.

    Args:
        narrow: in_proj's rows.
        group: the tensor-parallel ranks, which share the columns of the narrow halves.
        weights: ``[C, R]`` of every gate in ``columns``, this rank's heads.
    """
    return _FullRows.apply(narrow, columns, group, *weights)


class _FullRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, narrow: Tensor, columns: Columns, group: Any, *weights: Tensor) -> Tensor:
        rows = narrow.new_empty(*narrow.shape[:2], columns.width)
        for source, to in columns.others:
            rows[..., to] = narrow[..., source]
        lows = _gather([narrow[..., source] for source, _ in columns.gates], group)
        for low, (_, to), weight in zip(lows, columns.gates, weights, strict=True):
            # Not torch.mm(out=): Megatron's batch-invariant mode knows only products without out.
            rows[..., to] = F.linear(low, weight)
        ctx.columns, ctx.group, ctx.width = columns, group, narrow.shape[-1]
        ctx.save_for_backward(*lows, *weights)
        return rows

    @staticmethod
    @first_derivative_only
    def backward(ctx, d_rows: Tensor):
        count = len(ctx.columns.gates)
        lows, weights = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        d_narrow = d_rows.new_empty(*d_rows.shape[:2], ctx.width)
        for source, to in ctx.columns.others:
            d_narrow[..., source] = d_rows[..., to]
        d_gates = [d_rows[..., to].flatten(0, 1) for _, to in ctx.columns.gates]
        d_lows = [
            torch.mm(d, weight).view(*d_rows.shape[:2], -1)
            for d, weight in zip(d_gates, weights, strict=True)
        ]
        for (source, _), d_low in zip(
            ctx.columns.gates, _sum_and_scatter(d_lows, ctx.group), strict=True
        ):
            d_narrow[..., source] = d_low
        d_weights = [
            torch.mm(d.t(), low.flatten(0, 1)) for d, low in zip(d_gates, lows, strict=True)
        ]
        return d_narrow, None, None, *d_weights


def _gather(own: list[Tensor], group: Any) -> list[Tensor]:
    """``[s, B, r]`` each to the columns of all ranks, ``[s, B, R]``, in one message."""
    tp = group.size()
    if tp == 1:
        return [x.contiguous() for x in own]
    mine = torch.cat(own, -1)
    found = mine.new_empty(tp * mine.shape[0], *mine.shape[1:])  # gloo takes no further dimension
    dist.all_gather_into_tensor(found, mine, group=group)
    cut = found.unflatten(0, (tp, -1)).movedim(0, 2).split([x.shape[-1] for x in own], -1)
    return [x.flatten(-2) for x in cut]


def _sum_and_scatter(whole: list[Tensor], group: Any) -> list[Tensor]:
    """``[s, B, R]`` each to this rank's columns of the sum over ranks, the reverse of _gather."""
    tp = group.size()
    if tp == 1:
        return whole
    parts = [x.unflatten(-1, (tp, -1)) for x in whole]
    sent = torch.cat(parts, -1).movedim(2, 0).contiguous()
    mine = torch.empty_like(sent[0])
    dist.reduce_scatter_tensor(mine, sent.flatten(0, 1), group=group)
    return list(mine.split([x.shape[-1] for x in parts], -1))

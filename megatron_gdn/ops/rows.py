"""Rows named by an index. Evenly spaced rows are a strided view, which takes no kernel to read.

The first or last rows of the one or two pieces that a rank holds of an unpacked batch always are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .host_tables import to_device


class EvenRows(NamedTuple):
    """``count`` stretches of ``width`` rows whose starts are ``step`` apart."""

    start: int
    step: int
    count: int
    width: int

    def of(self, x: Tensor, dim: int) -> Tensor:
        """These rows of ``x`` as a view, two dimensions ``[count, width]`` in place of ``dim``."""
        sizes, strides = list(x.shape), list(x.stride())
        at = x.storage_offset() + self.start * strides[dim]
        sizes[dim : dim + 1] = [self.count, self.width]
        strides[dim : dim + 1] = [self.step * strides[dim], strides[dim]]
        return x.as_strided(sizes, strides, at)


Rows = EvenRows | Tensor


def stretches(index: Tensor) -> list[tuple[int, int]]:
    """An index on the host as (start, width) of its stretches of neighbours."""
    if not index.numel():
        return []
    starts = [0, *((index.diff() != 1).nonzero().flatten() + 1).tolist()]
    ends = [*starts[1:], index.numel()]
    first = index[starts].tolist()
    return [(row, end - start) for row, start, end in zip(first, starts, ends, strict=True)]


def rows_at(index: Tensor, device: torch.device) -> Rows:
    """The rows of an index on the host; an index on ``device`` if they are not evenly spaced."""
    spans = stretches(index)
    if spans:
        starts, widths = zip(*spans, strict=True)
        step = starts[1] - starts[0] if len(spans) > 1 else widths[0]
        evenly = all(b - a == step for a, b in zip(starts, starts[1:], strict=False))
        if step > 0 and evenly and len(set(widths)) == 1:
            return EvenRows(starts[0], step, len(spans), widths[0])
    return to_device(index, device)


def take(x: Tensor, rows: Rows, dim: int) -> Tensor:
    """``x[rows]`` along ``dim``; a view if the rows are evenly spaced."""
    if isinstance(rows, Tensor):
        return x.index_select(dim, rows)
    taken = rows.of(x, dim)
    return taken.squeeze(dim) if rows.count == 1 else taken.flatten(dim, dim + 1)


def put(x: Tensor, rows: Rows, dim: int, y: Tensor, of: Rows | None = None) -> None:
    """``x[rows] = y[of]`` along ``dim``, rounded to the type of ``x``; all of ``y`` by default."""
    if isinstance(rows, Tensor):
        y = y if of is None else take(y, of, dim)
        x.index_copy_(dim, rows, y.to(x.dtype))
        return
    target = rows.of(x, dim)
    if isinstance(of, EvenRows) and of[2:] == rows[2:]:
        target.copy_(of.of(y, dim))
    else:
        target.copy_((y if of is None else take(y, of, dim)).reshape(target.shape))


def zero(x: Tensor, rows: Rows, dim: int) -> None:
    """``x[rows] = 0`` along ``dim``."""
    if isinstance(rows, Tensor):
        x.index_fill_(dim, rows, 0)
    else:
        rows.of(x, dim).zero_()

"""Attention over context-parallel ranks: a rank gathers all keys for its own
queries."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import first_derivative_only
from .layouts import SequenceLayout, positions, rank_order_of_sequence


class Span(NamedTuple):
    """This rank's rows ``first:last`` of one document, and the keys that the rows
    attend to."""

    first: int  # the first row
    last: int  # one past the last row
    start: int  # the document's first key, in sequence order
    end: int  # one past the last key that a row sees
    # int64, each row's position in its document; None: 0, 1, 2, ...
    position: Tensor | None
    before: tuple[slice, ...] = ()  # the keys of earlier documents that all rows see

    def keys(self, whole: Tensor) -> Tensor:
        """The keys that at least one row sees, out of ``whole`` ``[S, ...]`` in
        sequence order."""
        own = whole[self.start : self.end]
        if self.before:
            return torch.cat([whole[keys] for keys in self.before] + [own])
        return own

    def mask(self, device: torch.device) -> Tensor | None:
        """bool ``[rows, keys]``: which keys each row sees; None if row i sees the keys
        0 to i."""
        if self.position is None and not self.before:
            return None
        earlier_keys = sum(keys.stop - keys.start for keys in self.before)
        position = self.position
        if position is None:
            position = torch.arange(self.last - self.first, device="cpu")
        position = position.to(device, non_blocking=True) + earlier_keys
        key = torch.arange(earlier_keys + self.end - self.start, device=device)
        return position[:, None] >= key


@lru_cache(maxsize=16)
def spans_of(
    lengths: tuple[int, ...], size: int, rank: int, layout: SequenceLayout
) -> tuple[Span, ...]:
    """A span for each document with rows on ``rank``; ``lengths``: tokens of every
    document."""
    # A rank holds its tokens in sequence order, so the tokens of one document lie side
    # by side.
    own_positions = positions(lengths, size, layout)[rank]
    offsets = torch.tensor((0, *lengths), device="cpu").cumsum(0)
    cuts = torch.searchsorted(own_positions, offsets).tolist()
    spans = []
    for start, first, last in zip(offsets.tolist(), cuts, cuts[1:], strict=False):
        if first < last:
            position = own_positions[first:last] - start
            seen_keys = int(position[-1]) + 1
            whole = seen_keys == last - first
            spans.append(
                Span(first, last, start, start + seen_keys, None if whole else position)
            )
    return tuple(spans)


def gather_in_order(
    x: Tensor,
    group: dist.ProcessGroup | None,
    lengths: tuple[int, ...],
    layout: SequenceLayout,
) -> Tensor:
    """All ranks' ``x [s, ...]`` as ``[S, ...]`` in sequence order; the backward sums
    gradients."""
    if group is None or group.size() == 1:
        return x
    place = rank_order_of_sequence(lengths, group.size(), layout)
    return _Gather.apply(x, group).index_select(
        0, place.to(x.device, non_blocking=True)
    )


class _Gather(torch.autograd.Function):
    """All-gathers ``x`` in the order of the ranks; the backward reduce-scatters the
    gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        out = x.new_empty((len(x) * group.size(),) + x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty((len(grad) // ctx.group.size(),) + grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None

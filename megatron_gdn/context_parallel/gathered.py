"""Attention over context-parallel ranks: a rank gathers all keys for its own
queries."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import first_derivative_only
from .layouts import SequenceLayout, positions, rank_order_of_sequence


class LocalDocument(NamedTuple):
    """This rank's rows (queries) of one document, and the keys that they attend to.

    Row numbers count the rows of this rank. Key numbers count the keys of all ranks, in
    sequence order.
    """

    first_row: int
    end_row: int  # one past the last row
    first_key: int  # the document's first key
    end_key: int  # one past the last key that a row sees
    # int64, each row's position in its document; None: 0, 1, 2, ...
    row_positions: Tensor | None
    # keys of earlier documents, which all rows see (trees of documents)
    earlier_keys: tuple[slice, ...] = ()

    def keys(self, all_keys: Tensor) -> Tensor:
        """The keys, or values, that at least one row sees, out of ``all_keys``
        ``[S, ...]``."""
        own = all_keys[self.first_key : self.end_key]
        if self.earlier_keys:
            return torch.cat([all_keys[keys] for keys in self.earlier_keys] + [own])
        return own

    def mask(self, device: torch.device) -> Tensor | None:
        """bool ``[rows, keys]``: which keys each row sees; None if row i sees the keys
        0 to i."""
        if self.row_positions is None and not self.earlier_keys:
            return None
        earlier_count = sum(keys.stop - keys.start for keys in self.earlier_keys)
        position = self.row_positions
        if position is None:
            position = torch.arange(self.end_row - self.first_row, device="cpu")
        # The earlier keys come first, and every row sees them.
        position = position.to(device, non_blocking=True) + earlier_count
        key_count = earlier_count + self.end_key - self.first_key
        key = torch.arange(key_count, device=device)
        return position[:, None] >= key


@lru_cache(maxsize=16)
def local_documents_of(
    lengths: tuple[int, ...], size: int, rank: int, layout: SequenceLayout
) -> tuple[LocalDocument, ...]:
    """The documents that have rows on rank ``rank`` of ``size`` ranks; ``lengths``:
    tokens of every document over all ranks."""
    # A rank holds its tokens in sequence order, so the tokens of one document lie side
    # by side.
    own_positions = positions(lengths, size, layout)[rank]
    offsets = torch.tensor((0, *lengths), dtype=torch.int64, device="cpu").cumsum(0)
    row_bounds = torch.searchsorted(own_positions, offsets).tolist()
    local_documents = []
    # there is one more offset than there are documents
    for first_key, (first_row, end_row) in zip(
        offsets.tolist(), pairwise(row_bounds), strict=False
    ):
        if first_row == end_row:  # this rank has no token of the document
            continue
        row_positions = own_positions[first_row:end_row] - first_key
        seen_keys = int(row_positions[-1]) + 1
        if seen_keys == end_row - first_row:
            row_positions = None  # 0, 1, 2, ...
        document = LocalDocument(
            first_row, end_row, first_key, first_key + seen_keys, row_positions
        )
        local_documents.append(document)
    return tuple(local_documents)


def gather_in_order(
    x: Tensor,
    group: dist.ProcessGroup | None,
    lengths: tuple[int, ...],
    layout: SequenceLayout,
) -> Tensor:
    """All ranks' ``x [s, ...]`` as ``[S, ...]`` in sequence order; a collective.

    Every rank gets all S rows, so the backward sums the gradients of a row over the
    ranks. ``lengths``: tokens of every document over all ranks; ``layout``: how they
    were cut.
    """
    if group is None or group.size() == 1:
        return x
    # each token's index in the gathered tensor, which has rank 0's tokens first
    place = rank_order_of_sequence(lengths, group.size(), layout)
    return _AllGather.apply(x, group).index_select(
        0, place.to(x.device, non_blocking=True)
    )


class _AllGather(torch.autograd.Function):
    """All-gathers ``x`` in the order of the ranks; the backward reduce-scatters the
    gradient."""

    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Gather the ranks' ``x [s, ...]``, rank 0's first: ``[S, ...]``."""
        ctx.group = group
        out = x.new_empty((len(x) * group.size(),) + x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    @first_derivative_only
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        """Sum ``grad [S, ...]`` over the ranks; return this rank's ``[s, ...]``."""
        out = grad.new_empty((len(grad) // ctx.group.size(),) + grad.shape[1:])
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None

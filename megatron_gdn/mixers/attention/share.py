"""What a context-parallel rank holds of a micro-batch, by document; for plain-torch attention.

Legend: S tokens of the whole buffer in sequence order, s this rank's share of them in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ...context_parallel.layouts import SequenceLayout, local_indices, rank_order_of_sequence
from ...ops.documents import Documents
from ...ops.static_documents import StaticDocuments
from ...ops.trees import TreeDocuments
from ..packing import context_parallel_group_of, resolve_packed_seq_params


class Span(NamedTuple):
    """The rows ``first:last`` of this rank, which are of one document, and the keys they see.

    ``start:end`` are the document's keys in sequence order, up to the last that any row sees.
    ``position`` int64 ``[last - first]`` is the place of each row, counted from ``start``; None if
    the rows are all of ``start:end``, in order. ``before`` are keys of documents that this one
    continues, which all rows see.
    """

    first: int
    last: int
    start: int
    end: int
    position: Tensor | None
    before: tuple[slice, ...] = ()


class MicroBatchShare(NamedTuple):
    """What a rank holds of a micro-batch: its documents, and the positions of its s tokens."""

    documents: Documents | None
    group: Any
    layout: SequenceLayout
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls,
        packed: PackedSeqParams | None,
        group: Any,
        layout_of: Callable[[PackedSeqParams | None], SequenceLayout],
        tokens: int,
        device: torch.device,
    ) -> MicroBatchShare:
        """The share of ``tokens`` local tokens, in the micro-batch's group or else ``group``.

        Args:
            layout_of: gives how a micro-batch of several ranks was cut; called with None if it is
                not packed.

        Raises:
            ValueError: what ``layout_of`` raises.
            RuntimeError: boundaries in fixed buffers, which the host reads here, in a capture.
        """
        group = context_parallel_group_of(packed, group)
        total = tokens * (1 if group is None else group.size())
        documents = resolve_packed_seq_params(packed, total, device)
        if isinstance(documents, StaticDocuments):
            documents = documents.on_host()
        layout = SequenceLayout.ZIGZAG  # any: one rank holds all tokens in order
        if total != tokens:
            layout = layout_of(None if documents is None else packed)
        return cls(documents, group, layout, Documents.lengths_of(documents, total))

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def positions(self) -> Tensor:
        """Positions in the sequence of this rank's tokens; int64 ``[s]`` on the host."""
        return _positions(self.lengths, self.size, self.rank, self.layout)

    @property
    def spans(self) -> tuple[Span, ...]:
        """This rank's rows by document, in order; empty documents are left out."""
        spans, documents = _spans(self.lengths, self.size, self.rank, self.layout), self.documents
        if isinstance(documents, TreeDocuments):
            return tuple(x._replace(before=documents.tokens_before(x.start)) for x in spans)
        return spans

    def gather(self, x: Tensor) -> Tensor:
        """``[s, ...] -> [S, ...]``, all ranks' rows in sequence order.

        The gradient of ``x`` is the sum of all ranks' gradients of this rank's rows.
        """
        return gather_in_order(x, self.group, self.lengths, self.layout)


def gather_in_order(
    x: Tensor, group: Any, lengths: tuple[int, ...], layout: SequenceLayout
) -> Tensor:
    """``[s, ...] -> [S, ...]``: the rows of all ranks, cut by ``layout``, in sequence order."""
    if group is None or group.size() == 1:
        return x
    rank_order = tensor_parallel.gather_from_sequence_parallel_region(x.contiguous(), group=group)
    place = rank_order_of_sequence(lengths, group.size(), layout)
    return rank_order.index_select(0, place.to(x.device, non_blocking=True))


@lru_cache(maxsize=16)
def _positions(lengths: tuple[int, ...], size: int, rank: int, layout: SequenceLayout) -> Tensor:
    return local_indices(lengths, size, rank, layout)


@lru_cache(maxsize=16)
def _spans(
    lengths: tuple[int, ...], size: int, rank: int, layout: SequenceLayout
) -> tuple[Span, ...]:
    # In every layout a rank holds its tokens in sequence order, so a document's are neighbours.
    positions = _positions(lengths, size, rank, layout)
    offsets = torch.tensor((0, *lengths), device="cpu").cumsum(0)
    cuts = torch.searchsorted(positions, offsets).tolist()
    spans = []
    for start, first, last in zip(offsets.tolist(), cuts, cuts[1:], strict=False):
        if first == last:
            continue
        position = positions[first:last] - start
        seen = int(position[-1]) + 1
        whole = seen == last - first
        spans.append(Span(first, last, start, start + seen, None if whole else position))
    return tuple(spans)

"""A rank's share of a micro-batch for attention: its queries, and the keys that they see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ..context_parallel.gathered import Span, gather_in_order, spans_of
from ..context_parallel.layouts import SequenceLayout, positions
from ..ops.documents import Documents, one_document
from .flex_attention import Mask
from .packing import context_parallel_group_of, resolve_packed_seq_params


class MicroBatchShare(NamedTuple):
    documents: Documents | None
    group: Any
    size: int  # of the group
    rank: int
    layout: SequenceLayout
    lengths: tuple[int, ...]
    device: torch.device

    @classmethod
    def of(
        cls,
        packed: PackedSeqParams | None,
        group: Any,
        layout_of: Callable[[PackedSeqParams | None], SequenceLayout],
        tokens: int,
        device: torch.device,
    ) -> MicroBatchShare:
        """The share of ``tokens`` local tokens, in the micro-batch's group or else ``group``."""
        group = context_parallel_group_of(packed, group)
        size, rank = (1, 0) if group is None else (group.size(), group.rank())
        total = tokens * size
        documents = resolve_packed_seq_params(packed, total, device)
        documents = None if documents is None else documents.on_host()  # refused in a capture
        layout = SequenceLayout.ZIGZAG  # any: one rank holds all tokens in order
        if total != tokens:
            layout = layout_of(None if documents is None else packed)
        lengths = Documents.lengths_of(documents, total)
        return cls(documents, group, size, rank, layout, lengths, device)

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens; int64 ``[s]`` on the host."""
        return positions(self.lengths, self.size, self.layout)[self.rank]

    @property
    def spans(self) -> tuple[Span, ...]:
        """This rank's rows by document, in order; empty documents are left out."""
        spans = spans_of(self.lengths, self.size, self.rank, self.layout)
        if self.documents is None:
            return spans
        return tuple(x._replace(before=self.documents.tokens_before(x.start)) for x in spans)

    @property
    def mask(self) -> Mask:
        """Which keys of all ranks this rank's queries see; the first layer makes it."""
        documents = self.documents or one_document(sum(self.lengths), self.device)
        how = Mask, self.size, self.rank, self.layout
        return documents.plan(how, lambda: Mask.of(documents, self.positions))

    def gather(self, x: Tensor) -> Tensor:
        """``[s, ...] -> [S, ...]``, all ranks' rows in sequence order; gradients are summed."""
        return gather_in_order(x, self.group, self.lengths, self.layout)

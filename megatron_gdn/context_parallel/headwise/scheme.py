"""Headwise (hidden-parallel) context parallelism: the heads are split instead of the
sequence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents
from ...ops.host_tables import cached_by_stream, to_device
from ...ops.layout import Layout
from ...ops.stages import SequenceContext
from ..layouts import SequenceLayout, documents_cut_by
from ..scheme import Passage, Scheme
from .exchange import Exchange, to_heads, to_sequence
from .shares import ColumnBlock, HeadShares


class Headwise(Scheme):
    """Context parallelism by head exchange: a rank runs its share of the heads on all
    tokens.

    Every rank gets the same number of state heads, and the key heads that its state
    heads use. If ranks outnumber key heads, neighbouring ranks hold the same key head,
    whose gradients are summed. ``self.layout``: one rank's columns. Raises a ValueError
    if ranks cannot share heads.
    """

    name = "headwise"
    exchanges_heads = True

    def __init__(
        self, layout: Layout, group: dist.ProcessGroup, sequence_layout: SequenceLayout
    ) -> None:
        super().__init__(layout.share(group.size()), group, sequence_layout)
        copies = layout.copies(self.size)
        self._proj = HeadShares(self.size, layout.widths, copies)
        assert self._proj.widths == self.layout.widths
        shares = zip(layout.widths, copies, strict=True)
        self._share_of = dict(zip(layout.names, shares, strict=True))
        self._mixed = HeadShares.even(self.size, (layout.mixed_width,))
        self._rank = group.rank()
        self._of_parameters: dict[tuple, tuple[HeadShares, ColumnBlock | None]] = {}

    def passage(
        self, documents: Documents | None, tokens: int, rows: int, like: Tensor
    ) -> Passage:
        """The passage of one micro-batch; ``to_stages`` returns rows in sequence
        order."""
        cut = documents_cut_by(self.sequence_layout, documents, tokens, like.device)
        local = like.new_empty(1).expand(tokens // self.size, rows, 1)
        layout = self.sequence_layout
        of_rows = Exchange.of(self.group, self._proj, cut, layout, local)
        of_outputs = Exchange.of(self.group, self._mixed, cut, layout, local)
        return Passage(
            to_stages=partial(to_heads, exchange=of_rows),
            from_stages=partial(to_sequence, exchange=of_outputs),
            sequence_context=SequenceContext(documents),
        )

    def local_parameter(
        self, param: Tensor, names: Sequence[str] | None = None
    ) -> Tensor:
        """This rank's rows of ``param``, which has the sections ``names``; None: a row
        per head.

        In the backward all other rows get zeros. Megatron's data-parallel reduction
        adds up the gradients of the group's ranks to the gradient of a run on one rank.
        """
        rows = param.shape[0]
        sections = None
        if names is not None:
            sections = tuple(names)
        known = self._of_parameters.get((rows, sections))
        shares, block = known or self._shares_of_parameter(rows, sections)
        if block is not None:
            return param.narrow(0, block.whole, block.width)
        return param.index_select(0, _own_rows(shares, self._rank, param.device))

    def _shares_of_parameter(
        self, rows: int, names: tuple[str, ...] | None
    ) -> tuple[HeadShares, ColumnBlock | None]:
        """Shares of ``rows`` in sections ``names``; this rank's block, None if it has
        several."""
        if names is None:
            shares = HeadShares.even(self.size, (rows,))
        else:
            sections, copies = zip(
                *(self._share_of[name] for name in names), strict=True
            )
            shares = HeadShares(
                self.size, sections if len(names) > 1 else (rows,), copies
            )
        blocks = shares.blocks(self._rank)
        block = None
        if len(blocks) == 1:
            block = blocks[0]
        self._of_parameters[rows, names] = shares, block
        return self._of_parameters[rows, names]


@cached_by_stream(16)
def _own_rows(shares: HeadShares, rank: int, device: torch.device) -> Tensor:
    """The indices, in a whole parameter, of the rows that ``rank`` holds."""
    columns = [
        range(block.whole, block.whole + block.width) for block in shares.blocks(rank)
    ]
    table = torch.tensor([row for rows in columns for row in rows], device="cpu")
    return to_device(table, device)

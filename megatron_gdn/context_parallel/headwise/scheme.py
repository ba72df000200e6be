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
from ..layouts import SequenceLayout, units_of_layout
from ..scheme import Passage, Scheme
from .exchange import HeadExchange, to_heads, to_sequence
from .shares import ColumnBlock, HeadShares


class Headwise(Scheme):
    """Context parallelism by head exchange: a rank runs its share of the heads on all
    tokens.

    Every rank gets the same number of state heads, and the key heads that its state
    heads use. If ranks outnumber key heads, neighbouring ranks hold the same key head,
    and the gradients of its copies are summed. The argument ``layout`` describes rows
    with all heads, the attribute ``layout`` rows with one rank's heads. Raises a
    ValueError if ranks cannot share heads.
    """

    name = "headwise"
    exchanges_heads = True

    def __init__(
        self, layout: Layout, group: dist.ProcessGroup, sequence_layout: SequenceLayout
    ) -> None:
        """Divide the heads of ``layout`` among the ranks of ``group``."""
        super().__init__(layout.share(group.size()), group, sequence_layout)
        copies = layout.copies(self.size)
        self._projection_shares = HeadShares(self.size, layout.widths, copies)
        assert self._projection_shares.rank_widths == self.layout.widths
        self._output_shares = HeadShares.even(self.size, (layout.mixed_width,))
        # of each section of a projection row: its width, the number of copies
        self._section_widths = dict(zip(layout.names, layout.widths, strict=True))
        self._section_copies = dict(zip(layout.names, copies, strict=True))
        self._rank = group.rank()
        # by a parameter's length and the names of its sections
        self._parameter_shares: dict[tuple, tuple[HeadShares, ColumnBlock | None]] = {}

    def passage(
        self, documents: Documents | None, tokens: int, rows: int, like: Tensor
    ) -> Passage:
        """The passage of one micro-batch; ``to_stages`` returns rows in sequence
        order."""
        units = units_of_layout(self.sequence_layout, documents, tokens, like.device)
        # Only the shape and the dtype of this tensor are read.
        local = like.new_empty(1).expand(tokens // self.size, rows, 1)
        layout = self.sequence_layout
        row_exchange = HeadExchange.of(
            self.group, self._projection_shares, units, layout, local
        )
        output_exchange = HeadExchange.of(
            self.group, self._output_shares, units, layout, local
        )
        return Passage(
            to_stages=partial(to_heads, exchange=row_exchange),
            from_stages=partial(to_sequence, exchange=output_exchange),
            sequence_context=SequenceContext(documents),
        )

    def local_parameter(
        self, param: Tensor, names: Sequence[str] | None = None
    ) -> Tensor:
        """The entries of ``param`` along dimension 0 that this rank's heads use; see
        :meth:`.Scheme.local_parameter`.

        In the backward all other entries get zeros. Megatron's data-parallel reduction
        sums the gradients of the group's ranks; the sum is the gradient of a run on one
        rank.
        """
        length = param.shape[0]
        key_names = None
        if names is not None:
            key_names = tuple(names)
        stored = self._parameter_shares.get((length, key_names))
        shares, block = stored or self._shares_of_parameter(length, key_names)
        if block is not None:  # a view, without a copy
            return param.narrow(0, block.first_column, block.width)
        return param.index_select(0, _own_indices(shares, self._rank, param.device))

    def _shares_of_parameter(
        self, length: int, names: tuple[str, ...] | None
    ) -> tuple[HeadShares, ColumnBlock | None]:
        """The shares of a parameter with ``length`` entries for the sections ``names``,
        and this rank's block, or None if this rank has several blocks. They are stored
        for :meth:`local_parameter`."""
        if names is None:
            shares = HeadShares.even(self.size, (length,))
        else:
            widths = tuple(self._section_widths[name] for name in names)
            copies = tuple(self._section_copies[name] for name in names)
            if len(names) == 1:
                # an entry per column of the section, or an entry per head
                widths = (length,)
            shares = HeadShares(self.size, widths, copies)
        blocks = shares.blocks(self._rank)
        block = None
        if len(blocks) == 1:
            block = blocks[0]
        self._parameter_shares[length, names] = shares, block
        return shares, block


@cached_by_stream(16)
def _own_indices(shares: HeadShares, rank: int, device: torch.device) -> Tensor:
    """int64: the indices, along dimension 0 of a whole parameter, of the entries that
    ``shares`` give to ``rank``."""
    indices = []
    for block in shares.blocks(rank):
        indices += range(block.first_column, block.first_column + block.width)
    return to_device(torch.tensor(indices, dtype=torch.int64, device="cpu"), device)

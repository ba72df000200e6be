"""Chunkwise context parallelism: activations stay where they are, states travel.

Every rank runs the layer over its own chunks of the sequence. What crosses ranks is what a
recurrence hands from one chunk to the next: W - 1 projection rows for the convolution
(:mod:`.history`) and, in fp32, what each chunk does to the state (:mod:`.states`). Heads are
not split, so their number limits nothing, and the traffic does not grow with the sequence.

Legend: s this rank's tokens, S tokens of all ranks, B batch, P projection width, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor

from ...dims import GDNDims
from ...ops import Documents
from ...ops.delta_rule.base import Core
from ...ops.front.base import Preparation
from ..layouts import SequenceLayout, local_indices
from ..price import exchange_prices
from .history import HaloPreparation, HaloTable, halo_table
from .map_exchange import gather_and_fold, prefix_scan, share_and_fold
from .pieces import pieces_of
from .states import Exchange, StatePassingCore, StateTable, state_table

EXCHANGES = {"gather": gather_and_fold, "share": share_and_fold, "scan": prefix_scan}


@dataclass(frozen=True, eq=False)
class SplitMicroBatch:
    """One micro-batch on one rank, as :class:`~megatron_gdn.ops.fused.SplitSequences`."""

    pieces: Documents
    halo: HaloTable | None
    states: StateTable | None
    exchange: Exchange
    group: dist.ProcessGroup

    def preparation(self, preparation: Preparation) -> Preparation:
        if self.halo is None:
            return preparation
        return HaloPreparation(preparation, self.halo, self.group)

    def core(self, core: Core) -> Core:
        if self.states is None:
            return core
        return StatePassingCore(core, self.states, self.exchange, self.group)


class Chunkwise:
    """State-passing context parallelism over ``group`` for one tensor-parallel rank's heads.

    Args:
        dims: sizes on one tensor-parallel rank.
        group: the context-parallel group.
        layout: how the ranks' tokens were cut from the sequence.
        exchange: how state maps travel, ``"gather"``, ``"share"`` or ``"scan"`` (see
            :mod:`.map_exchange`); None takes the cheapest for each micro-batch, see
            :mod:`megatron_gdn.context_parallel.price`.
    """

    name = "chunkwise"
    moves_rows = False

    def __init__(
        self,
        dims: GDNDims,
        group: dist.ProcessGroup,
        layout: SequenceLayout,
        exchange: str | None = None,
    ) -> None:
        self.size, self.dims = group.size(), dims
        self._group, self._layout = group, layout
        self._exchange = exchange
        # By the documents' identity: hashing and pricing many lengths takes longer than a launch.
        self._split = lru_cache(maxsize=16)(self._make)

    def open(self, proj_sBP: Tensor, documents: Documents | None) -> Tensor:
        return proj_sBP

    def close(self, mixed_sBV: Tensor, documents: Documents | None) -> Tensor:
        return mixed_sBV

    def local(self, param: Tensor, sections: Sequence[int] | None = None) -> Tensor:
        return param

    def local_positions(self, tokens: int, documents: Documents | None) -> Tensor:
        """Which of the ``tokens`` sequence positions this rank holds, in its order."""
        lengths = Documents.lengths_of(documents, tokens)
        return local_indices(lengths, self.size, self._group.rank(), self._layout)

    def split(self, proj_sBP: Tensor, documents: Documents | None) -> SplitMicroBatch:
        """How these rows are pieces of sequences; cached by the documents' identity.

        Raises:
            ValueError: a length that the layout cannot cut.
        """
        return self._split(documents, *proj_sBP.shape[:2], proj_sBP.device)

    def _make(
        self, documents: Documents | None, tokens: int, rows: int, device: torch.device
    ) -> SplitMicroBatch:
        lengths = Documents.lengths_of(documents, tokens * self.size)
        exchange = self._exchange
        if exchange is None:
            packed = None if documents is None else lengths
            prices = exchange_prices(self.dims, self.size, self._layout, rows, packed)
            exchange = min(prices, key=prices.get)
        where = (lengths, self.size, self._layout, self._group.rank())
        return SplitMicroBatch(
            _local_pieces(*where, device),
            halo_table(*where, self.dims.conv_kernel_dim, device),
            state_table(*where, rows, device),
            EXCHANGES[exchange],
            self._group,
        )


@lru_cache(maxsize=16)
def _local_pieces(
    lengths: tuple[int, ...],
    cp_size: int,
    layout: SequenceLayout,
    rank: int,
    device: torch.device,
) -> Documents:
    """The boundaries of this rank's pieces in one batch row."""
    pieces = pieces_of(lengths, cp_size, layout)
    ends = pieces.length[pieces.held_by(rank)].cumsum(0).tolist()
    return Documents((0, *(ends or [0])), device)

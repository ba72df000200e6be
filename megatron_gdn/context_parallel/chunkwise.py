"""Chunkwise context parallelism: activations stay where they are, states travel.

Every rank runs the layer over its own chunks of the sequence. What crosses ranks is what a
recurrence hands from one chunk to the next: W - 1 projection rows for the convolution
(:mod:`.halo`) and, in fp32, what each chunk does to the state (:mod:`.state_passing`). Heads are
not split, so their number limits nothing, and the traffic does not grow with the sequence.

Legend: s this rank's tokens, S tokens of all ranks, B batch, P projection width, V value dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..dims import GDNDims
from ..ops import Documents
from ..ops.fused.cores.base import Core
from ..ops.fused.prepared import Preparation
from .affine import gather_and_fold, prefix_scan, share_and_fold
from .choice import exchange_prices
from .halo import HaloPreparation, HaloTable, halo_table
from .pieces import pieces_of
from .state_passing import Exchange, StatePassingCore, StateTable, state_table
from .zigzag import SequenceLayout, local_indices

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
            :mod:`.affine`); None takes the cheapest for each micro-batch, see :mod:`.choice`.
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
        # By the documents' identity: hashing and pricing many lengths takes longer than a launch.
        # Not a bound method: that would tie scheme and cache in a cycle, and keep what both hold.
        self._split = lru_cache(maxsize=16)(partial(_make_split, dims, group, layout, exchange))

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


def _make_split(
    dims: GDNDims,
    group: dist.ProcessGroup,
    layout: SequenceLayout,
    exchange: str | None,
    documents: Documents | None,
    tokens: int,
    rows: int,
    device: torch.device,
) -> SplitMicroBatch:
    lengths = Documents.lengths_of(documents, tokens * group.size())
    if exchange is None:
        packed = None if documents is None else lengths
        prices = exchange_prices(dims, group.size(), layout, rows, packed)
        exchange = min(prices, key=prices.get)
    where = (lengths, group.size(), layout, group.rank())
    return SplitMicroBatch(
        _local_pieces(*where, device),
        halo_table(*where, dims.conv_kernel_dim, device),
        state_table(*where, rows, device),
        EXCHANGES[exchange],
        group,
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

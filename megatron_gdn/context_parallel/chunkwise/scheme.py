"""Chunkwise context parallelism: activations stay on their rank, states travel.

Every rank runs the mixer over its own pieces of the sequence. Two things cross ranks for each
piece: the W - 1 projection rows before it, for the convolution (:mod:`.history`), and the fp32 map
of what it does to a state (:mod:`.states`). Heads are not split, so any number of ranks works, and
the traffic does not grow with the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents
from ...ops.host_tables import cached_by_stream
from ...ops.layout import Layout
from ...ops.parts import Neighbours
from ...ops.state_maps.state_map import StateShape
from ...ops.static_documents import StaticDocuments
from ..layouts import SequenceLayout, held_positions
from ..machines import ranks_per_machine
from ..price import exchange_prices
from ..scheme import Passage, stay
from .history import HistoryOfPieces, history_route
from .map_exchange import gather_and_fold, share_and_fold
from .pieces import pieces_of
from .states import Exchange, StatesOfPieces, state_table
from .static_history import static_history_route, static_pieces, static_state_table

EXCHANGES: dict[str, Exchange] = {"gather": gather_and_fold, "share": share_and_fold}


class Chunkwise:
    """State-passing context parallelism over ``group`` for one tensor-parallel rank's heads.

    Args:
        layout: projection columns of one tensor-parallel rank.
        state: the states of its heads.
        taps: of the convolution.
        group: the context-parallel group.
        sequence_layout: how the data loader cut the sequence.
        exchange: how state maps travel, one of :data:`EXCHANGES`; None takes the cheaper for each
            micro-batch, see :mod:`megatron_gdn.context_parallel.price`.
        cp_ranks_per_machine: None asks the hosts, see :mod:`..machines`.
    """

    name = "chunkwise"
    moves_rows = False

    def __init__(
        self,
        layout: Layout,
        state: StateShape,
        taps: int,
        group: dist.ProcessGroup,
        sequence_layout: SequenceLayout,
        exchange: str | None = None,
        cp_ranks_per_machine: int | None = None,
    ) -> None:
        self.size, self.layout = group.size(), layout
        self._state, self._taps = state, taps
        self._group, self._sequence_layout = group, sequence_layout
        self._exchange, self._told, self.announced = exchange, cp_ranks_per_machine, False

    def local(self, param: Tensor, names: Sequence[str] | None = None) -> Tensor:
        return param

    def local_positions(self, documents: Documents | None, tokens: int) -> Tensor:
        return held_positions(documents, tokens, self._group, self._sequence_layout)

    def passage(self, documents: Documents | None, tokens: int, rows: int, like: Tensor) -> Passage:
        """Rows stay; the neighbours are the pieces that this rank holds, and what enters them.

        Raises:
            ValueError: a length that the layout cannot cut.
            NotImplementedError: documents in fixed buffers in another layout than zigzag.
        """
        device, rank, states = like.device, self._group.rank(), None
        if isinstance(documents, StaticDocuments):
            pieces = static_pieces(documents, self.size, self._sequence_layout)
            route = static_history_route(documents, self.size, rank, self._taps)
            table, exchange = static_state_table(pieces, self.size), self._exchange or "share"
        else:
            lengths = Documents.lengths_of(documents, tokens)
            where = (lengths, self.size, self._sequence_layout, rank)
            route = history_route(*where, self._taps, device)
            table, exchange = state_table(*where, rows, device), self._exchange
            pieces = _local_pieces(*where, device)
        if table is not None:
            exchange = exchange or self._cheapest(documents, rows, device)
            states = StatesOfPieces(table, EXCHANGES[exchange], self._group)
        history = None if route is None else HistoryOfPieces(route, self._group)
        return Passage(stay, stay, Neighbours(pieces, history, states))

    def _cheapest(self, documents: Documents | None, rows: int, device: torch.device) -> str:
        n = ranks_per_machine(self._group, self._told, device)
        lengths = None if documents is None else documents.lengths
        prices = exchange_prices(self._state, self.size, self._sequence_layout, rows, lengths, n)
        return min(prices, key=prices.__getitem__)


@cached_by_stream(16)
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

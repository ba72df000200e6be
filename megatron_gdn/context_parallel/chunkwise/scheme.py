"""Chunkwise context parallelism: activations stay on their rank, states travel.

For each of its pieces, a rank receives the W - 1 projection rows before the piece (:mod:`.history`)
and the state maps of earlier pieces, which give the entering state (:mod:`.states`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents, one_document
from ...ops.layout import Layout
from ...ops.parts import Neighbours
from ...ops.state_maps.state_map import StateShape
from ..agreement import ranks_per_machine
from ..layouts import SequenceLayout, held_positions
from ..price import map_exchanges
from ..scheme import Passage, stay
from .fragments import pieces_of
from .history import HistoryOfPieces, history_route
from .map_exchange import gather_and_fold, share_and_fold
from .states import Exchange, StatesOfPieces, state_table

EXCHANGES: dict[str, Exchange] = {"gather": gather_and_fold, "share": share_and_fold}


class Chunkwise:
    """State-passing context parallelism over ``group`` for one tensor-parallel rank's heads.

    ``layout``, ``state`` and ``taps`` (of the convolution) are those of one tensor-parallel rank.
    ``exchange`` is one of :data:`EXCHANGES`; None chooses the cheaper way for each micro-batch.
    With ``cp_ranks_per_machine=None`` the ranks compare their hosts (:mod:`..agreement`).
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
        """The passage of one micro-batch, which moves no rows and links this rank's pieces."""
        device = like.device
        whole = one_document(tokens, device) if documents is None else documents
        where = (self.size, self._sequence_layout, self._group.rank())
        pieces, table = pieces_of(whole, *where), state_table(whole, *where, rows)
        states = None
        if table is not None:
            exchange = self._exchange or self._cheapest(documents, rows, device)
            states = StatesOfPieces(table, EXCHANGES[exchange], self._group)
        route = history_route(whole, *where, self._taps)
        history = None if route is None else HistoryOfPieces(route, self._group)
        return Passage(stay, stay, Neighbours(pieces, history, states))

    def _cheapest(self, documents: Documents | None, rows: int, device: torch.device) -> str:
        if documents is not None and not documents.known:
            return "share"
        n = ranks_per_machine(self._group, self._told, device)
        lengths = None if documents is None else documents.lengths
        ways = map_exchanges(self._state, self.size, self._sequence_layout, rows, lengths, n)
        return min(ways, key=lambda name: ways[name].ms)

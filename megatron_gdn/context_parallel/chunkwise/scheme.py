"""Chunkwise context parallelism: activations stay on their rank, states travel.

For each of its pieces, a rank receives the W - 1 projection rows before the piece
(:mod:`.history`) and the state that enters the piece (:mod:`.states`).
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents, one_document
from ...ops.layout import Layout
from ...ops.stages import SequenceContext
from ...ops.state_maps.state_map import StateShape
from ..layouts import SequenceLayout
from ..scheme import Passage, Scheme, keep_in_place
from .fragments import SequencePartition, any_document_is_cut, pieces_of
from .history import HistoryExchange, history_route
from .states import StateExchange, state_table


class Chunkwise(Scheme):
    """State-passing context parallelism over the ranks of ``group``; ``layout`` has the
    columns of a projection row on one tensor-parallel rank."""

    name = "chunkwise"

    def __init__(
        self,
        layout: Layout,
        state: StateShape,
        taps: int,
        group: dist.ProcessGroup,
        sequence_layout: SequenceLayout,
    ) -> None:
        """``state``: the shape of the states of this rank's heads; ``taps``: W, the
        number of taps of the convolution."""
        super().__init__(layout, group, sequence_layout)
        self._state_shape = state
        self._taps = taps

    def needs_exchange(self, documents: Documents) -> bool:
        return any_document_is_cut(documents, self._partition)

    @property
    def _partition(self) -> SequencePartition:
        return SequencePartition(self.size, self.sequence_layout, self.group.rank())

    def passage(
        self, documents: Documents | None, tokens: int, rows: int, like: Tensor
    ) -> Passage:
        """A passage that leaves rows in place and gives this rank's pieces their
        history and states; neither is exchanged if no document is cut."""
        if documents is None:
            documents = one_document(tokens, like.device)
        partition = self._partition
        pieces = pieces_of(documents, partition)
        table = state_table(documents, partition, rows)
        if table is None:
            states = None
        else:
            states = StateExchange(table, self.group, self._state_shape.no_maps(like))
        route = history_route(documents, partition, self._taps)
        if route is None:
            history = None
        else:
            history = HistoryExchange(route, self.group)
        return Passage(
            keep_in_place, keep_in_place, SequenceContext(pieces, history, states)
        )

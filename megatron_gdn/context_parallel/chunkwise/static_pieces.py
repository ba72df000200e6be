"""The pieces of documents in fixed buffers, and the chains of states between them; zigzag alone.

In zigzag a rank holds two fragments of each document, whatever its length. So the number of pieces,
the ranks of a chain and the messages are those of the most documents, and the host knows them. The
device alone knows lengths. Empty documents have empty pieces, behind the others.

(The layouts that cut the whole buffer have pieces where documents end, which the host plans.)

Legend: N documents at most, R context-parallel ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...ops.host_tables import to_device
from ...ops.static_documents import StaticDocuments
from ..headwise.static_route import require_fragments
from ..layouts import SequenceLayout, check_lengths
from .states import StateTable, chain_nodes


class StaticPieces(StaticDocuments):
    """The 2 N pieces that every rank holds. Each fill of ``whole`` writes their tables again.

    Piece 2 n + i is fragment i of the rank's two fragments of document n.
    """

    def __init__(self, whole: StaticDocuments, cp_size: int) -> None:
        key = ("pieces", cp_size)
        (boundaries,) = whole.table(key, lambda these: _boundaries(these, cp_size))
        vars(self).update(
            device=whole.device, max_documents=2 * whole.max_documents, boundaries=boundaries,
            plans={}, longest=whole.longest // (2 * cp_size), _whole=whole, _key=key,
            _tokens=whole.total_tokens // cp_size,
        )  # fmt: skip

    _whole: StaticDocuments
    _key: tuple[str, int]

    @property
    def stamp(self) -> Tensor:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._whole.stamp

    def require_unchanged(self, stamp: Tensor, saved: Tensor) -> None:
        self._whole.require_unchanged(stamp, saved)

    def table[Made: tuple[Tensor, ...]](
        self, key: Any, make: Callable[[StaticDocuments], Made]
    ) -> Made:
        return self._whole.table((self._key, key), lambda _: make(self))


def _boundaries(documents: StaticDocuments, cp_size: int) -> tuple[Tensor]:
    length = documents.cu_seqlens[: documents.max_documents + 1].diff()
    require_fragments(documents, length, cp_size)
    ends = (length // (2 * cp_size))[:, None].expand(-1, 2).flatten().cumsum(0, dtype=torch.int32)
    return (torch.cat([ends.new_zeros(1), ends]),)


def static_pieces(documents: StaticDocuments, cp_size: int, layout: SequenceLayout) -> StaticPieces:
    """Made once for these buffers.

    Raises:
        NotImplementedError: another layout than zigzag.
        ValueError: the buffer does not divide; a document that does not fails on the device.
    """
    if layout is not SequenceLayout.ZIGZAG:
        raise NotImplementedError(
            f"linear_cp_mode='chunkwise' takes documents in fixed buffers (StaticDocuments, for "
            f"CUDA graphs) with cp_layout='zigzag', not {layout.value!r}: there the host plans "
            f"which pieces of documents lie where. Use linear_cp_mode='headwise', or cut every "
            f"document in zigzag."
        )
    key = (StaticPieces, cp_size)
    if key not in documents.plans:
        check_lengths((documents.total_tokens,), cp_size)
        documents.plans[key] = StaticPieces(documents, cp_size)
    return documents.plans[key]


def static_state_table(pieces: StaticPieces, cp_size: int) -> StateTable:
    """As :func:`.states.state_table`: N chains of 2 R nodes, one piece each.

    The maps of empty pieces are masked: kernels do not write them.
    """
    by_slot = torch.arange(pieces.max_documents, device="cpu").view(-1, 2).T.flatten()
    index = to_device(by_slot, pieces.device)
    (filled,) = pieces.table("filled", _filled)
    return StateTable(
        sequences=pieces, nodes=chain_nodes(cp_size, SequenceLayout.ZIGZAG), node_count=2,
        first=index, last=index, leavers=None, enters=filled, leaves=filled, passes=filled,
    )  # fmt: skip


def _filled(pieces: StaticDocuments) -> tuple[Tensor]:
    return ((pieces.boundaries.diff() > 0).view(-1, 2).T.reshape(-1, 1, 1, 1),)

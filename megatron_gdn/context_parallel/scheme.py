"""Schemes of context parallelism: what a rank's mixer runs on, and what ranks exchange.

| scheme    | a rank's mixer runs on         | what travels                                      |
|-----------|--------------------------------|---------------------------------------------------|
| whole     | whole sequences, all heads     | nothing                                           |
| headwise  | whole sequences, some heads    | rows, before and after the mixer                  |
| chunkwise | pieces of sequences, all heads | a few rows for the convolution, maps of the state |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.documents import Documents
from ..ops.layout import Layout
from ..ops.stages import SequenceContext
from .layouts import SequenceLayout, documents_cut_by, positions_of

if TYPE_CHECKING:
    pass


class Passage(NamedTuple):
    """How the rows of one micro-batch reach the mixer and return."""

    open: Callable[[Tensor], Tensor]  # projection rows: [s, B, P] -> [S, B, p]
    close: Callable[[Tensor], Tensor]  # output rows: [S, B, v] -> [s, B, V]
    neighbours: SequenceContext  # boundaries, history and initial states of the rows


class Scheme:
    """A way to run a mixer over the ranks of ``group``; ``layout`` has the columns of
    one rank."""

    name: ClassVar[str]  # a value of linear_cp_mode, or "whole"
    # whether Passage.close moves outputs to other ranks
    moves_rows: ClassVar[bool] = False
    announced = False  # whether the log has already named this scheme

    def __init__(
        self, layout: Layout, group: Any, sequence_layout: SequenceLayout
    ) -> None:
        self.layout = layout
        self.group = group
        self.sequence_layout = sequence_layout
        if group is None:
            self.size = 1
        else:
            self.size = group.size()

    def passage(
        self, documents: Documents | None, tokens: int, rows: int, like: Tensor
    ) -> Passage:
        """The passage of one micro-batch.

        ``documents`` are packed into one row; None: not packed. ``tokens`` counts a
        row's tokens over all ranks. ``like`` has the dtype and device of the rows.
        Raises a ValueError for a length that the layout cannot cut.
        """
        raise NotImplementedError

    def sends(self, documents: Documents) -> bool:
        """Whether ranks exchange anything for these documents, as far as the host
        knows."""
        return self.size > 1

    def local(self, param: Tensor, names: Sequence[str] | None = None) -> Tensor:
        """The rows of a parameter that this rank's mixer needs.

        ``param`` has a row per column or head of the sections ``names``, by default per
        state head.
        """
        return param

    def local_positions(self, documents: Documents | None, tokens: int) -> Tensor:
        """int64 ``[s]``: positions in the sequence of this rank's tokens, in the rank's
        order."""
        if documents is None:
            device = torch.device("cpu")
        else:
            device = documents.device
        cut = documents_cut_by(self.sequence_layout, documents, tokens, device)
        return positions_of(cut, self.size, self.sequence_layout)[self.group.rank()]


class Whole(Scheme):
    """The scheme without context parallelism: each rank has whole sequences."""

    name = "whole"

    def __init__(self, layout: Layout) -> None:
        super().__init__(layout, None, SequenceLayout.ZIGZAG)

    def passage(
        self, documents: Documents | None, tokens: int, rows: int, like: Tensor
    ) -> Passage:
        return Passage(keep_in_place, keep_in_place, SequenceContext(documents))

    def local_positions(self, documents: Documents | None, tokens: int) -> Tensor:
        return torch.arange(tokens, device="cpu")


def local_conv(
    scheme: Scheme, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The rows of the convolution's parameters that this rank's mixer needs."""
    convolved = scheme.layout.conv_names
    weight = scheme.local(weight, convolved)
    if bias is not None:
        bias = scheme.local(bias, convolved)
    return weight, bias


def keep_in_place(rows: Tensor) -> Tensor:
    """Return ``rows`` unchanged: the ``open`` and ``close`` of schemes that move no
    rows."""
    return rows

"""Schemes of context parallelism: what a rank's stages run on, and what ranks exchange.

| scheme    | the stages run on              | ranks exchange                                 |
|-----------|--------------------------------|------------------------------------------------|
| whole     | whole sequences, all heads     | nothing                                        |
| headwise  | whole sequences, some heads    | projection rows, and the readout's output      |
| chunkwise | pieces of sequences, all heads | W - 1 rows before each piece, maps of states   |

The stages of a mixer are its front, rule and readout (:mod:`..ops.stages`).

Legend: S tokens of the whole sequence, s tokens of one rank, B batch, W taps of the
convolution; P columns of a projection row and V columns of an output row with all
heads; p and v are the same with only the heads that the rank's stages run on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..ops.documents import Documents
from ..ops.layout import Layout
from ..ops.stages import SequenceContext
from .layouts import SequenceLayout, positions_of, units_of_layout


class Passage(NamedTuple):
    """How the rows of one micro-batch reach the stages of a mixer and return."""

    to_stages: Callable[[Tensor], Tensor]  # projection rows: [s, B, P] -> [S, B, p]
    from_stages: Callable[[Tensor], Tensor]  # output rows: [S, B, v] -> [s, B, V]
    # boundaries, history and initial states of the rows that the stages get
    sequence_context: SequenceContext


class Scheme:
    """A way to run a mixer over the ranks of ``group``, a ``ProcessGroup`` or None.

    ``layout`` describes the projection rows that one rank's stages get;
    ``sequence_layout`` says how the data loader cut sequences among the ranks.
    """

    name: ClassVar[str]  # a value of linear_cp_mode, or "whole"
    # Whether a passage exchanges rows, so that a rank runs some heads on all tokens.
    exchanges_heads: ClassVar[bool] = False
    is_logged = False  # whether the log has already named this scheme

    def __init__(
        self, layout: Layout, group: Any, sequence_layout: SequenceLayout
    ) -> None:
        """The arguments are as in the class; ``group`` None means one rank."""
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
        """The passage of one micro-batch of ``rows`` batch rows.

        ``documents`` are packed into one row; None: not packed. ``tokens`` is the
        number of tokens of a batch row, over all ranks. ``like`` is any tensor with
        the dtype and device of the projection rows. Raises a ValueError for a length
        that ``sequence_layout`` cannot divide among the ranks.
        """
        raise NotImplementedError

    def needs_exchange(self, documents: Documents) -> bool:
        """Whether ranks exchange anything for ``documents``. True for fixed buffers,
        since the host does not know their boundaries."""
        return self.size > 1

    def local_parameter(
        self, param: Tensor, names: Sequence[str] | None = None
    ) -> Tensor:
        """The part of a parameter for the heads that this rank runs.

        Dimension 0 of ``param`` has an entry for each column, or for each head, of the
        layout's sections ``names``. If ``names`` is None, dimension 0 has an entry for
        each state head. This class runs all heads, so it returns ``param``.
        """
        return param

    def local_positions(self, documents: Documents | None, tokens: int) -> Tensor:
        """int64 ``[s]``: the position in the sequence of each token of this rank.

        ``documents`` and ``tokens`` are as in :meth:`passage`.
        """
        if documents is None:
            device = torch.device("cpu")
        else:
            device = documents.device
        units = units_of_layout(self.sequence_layout, documents, tokens, device)
        return positions_of(units, self.size, self.sequence_layout)[self.group.rank()]


class WholeSequences(Scheme):
    """The scheme without context parallelism: each rank has whole sequences."""

    name = "whole"

    def __init__(self, layout: Layout) -> None:
        # Nothing is cut, so no method reads the sequence layout.
        super().__init__(layout, None, SequenceLayout.ZIGZAG)

    def passage(
        self, documents: Documents | None, tokens: int, rows: int, like: Tensor
    ) -> Passage:
        """A passage that leaves rows in place and gives the stages the boundaries."""
        return Passage(keep_in_place, keep_in_place, SequenceContext(documents))

    def local_positions(self, documents: Documents | None, tokens: int) -> Tensor:
        return torch.arange(tokens, device="cpu")


def local_conv_parameters(
    scheme: Scheme, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """The convolution's ``weight [C, 1, W]`` and ``bias [C]`` for the channels of this
    rank's heads."""
    sections = scheme.layout.conv_names
    weight = scheme.local_parameter(weight, sections)
    if bias is not None:
        bias = scheme.local_parameter(bias, sections)
    return weight, bias


def keep_in_place(rows: Tensor) -> Tensor:
    """Return ``rows`` unchanged: ``to_stages`` and ``from_stages`` of a scheme that
    exchanges no heads."""
    return rows

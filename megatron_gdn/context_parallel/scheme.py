"""Where the rows of a sequence are while a mixer runs on them.

| scheme    | a rank runs on                 | what travels                                      |
|-----------|--------------------------------|---------------------------------------------------|
| whole     | whole sequences, all heads     | nothing                                           |
| headwise  | whole sequences, some heads    | rows, before and after the mixer                  |
| chunkwise | pieces of sequences, all heads | a few rows for the convolution, maps of the state |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from ..ops.documents import Documents
from ..ops.layout import Layout
from ..ops.parts import Neighbours


class Passage(NamedTuple):
    """How the rows of one micro-batch reach the mixer, and return."""

    open: Callable[[Tensor], Tensor]  # [s, B, P] -> [S, B, p]
    close: Callable[[Tensor], Tensor]  # [S, B, v] -> [s, B, V]
    neighbours: Neighbours


class Scheme(Protocol):
    """A way to run a layer over one context-parallel group."""

    name: str  # as linear_cp_mode calls it
    size: int  # ranks of the group
    layout: Layout  # projection columns where the mixer runs
    moves_rows: bool  # Passage.close moves the mixer's output to other ranks
    announced: bool  # the log has said that this scheme was chosen

    def passage(self, documents: Documents | None, tokens: int, rows: int, like: Tensor) -> Passage:
        """How the rows of one micro-batch reach the mixer.

        ``documents`` are packed into the one batch row, or None; ``tokens`` are those of a row over
        all ranks; ``like`` has the rows' dtype and device. A length that the layout cannot cut is a
        ValueError.
        """
        ...

    def local(self, param: Tensor, names: Sequence[str] | None = None) -> Tensor:
        """The rows of a parameter that the mixer needs here.

        ``param`` has a row per state head, or per column (or head) of the sections ``names``.
        """
        ...

    def local_positions(self, documents: Documents | None, tokens: int) -> Tensor | range:
        """Sequence positions of this rank's share of ``tokens``, in the order it holds them."""
        ...


class Whole:
    """The scheme of sequences that lie whole on one rank."""

    name = "whole"
    size = 1
    moves_rows = False

    def __init__(self, layout: Layout) -> None:
        self.layout, self.announced = layout, False

    def passage(self, documents: Documents | None, tokens: int, rows: int, like: Tensor) -> Passage:
        return Passage(stay, stay, Neighbours(documents))

    def local(self, param: Tensor, names: Sequence[str] | None = None) -> Tensor:
        return param

    def local_positions(self, documents: Documents | None, tokens: int) -> range:
        return range(tokens)


def local_parameters(
    scheme: Scheme, weight: Tensor, bias: Tensor | None, *per_head: Tensor, of: str | None = None
) -> list[Any]:
    """The shares of the convolution's parameters, and of those of the heads of ``of``, for the
    mixer.
    """
    if not scheme.moves_rows:
        return [weight, bias, *per_head]
    convolved = scheme.layout.conv_names
    of_conv = [x if x is None else scheme.local(x, convolved) for x in (weight, bias)]
    heads = None if of is None else (of,)
    return [*of_conv, *[scheme.local(x, heads) for x in per_head]]


def stay(rows: Tensor) -> Tensor:
    """The passage of rows that do not travel."""
    return rows

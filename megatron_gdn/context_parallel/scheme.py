"""Schemes of context parallelism: what a rank's mixer runs on, and what ranks exchange.

| scheme    | a rank's mixer runs on         | what travels                                      |
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
    """How the rows of one micro-batch reach the mixer and return."""

    open: Callable[[Tensor], Tensor]  # [s, B, P] -> [S, B, p]
    close: Callable[[Tensor], Tensor]  # [S, B, v] -> [s, B, V]
    neighbours: Neighbours


class Scheme(Protocol):
    """A way to run a mixer over one context-parallel group."""

    name: str  # a value of linear_cp_mode, or "whole"
    size: int  # ranks of the group
    layout: Layout  # projection columns where the mixer runs
    moves_rows: bool  # Passage.close moves the mixer's output to other ranks
    announced: bool  # the log already names this scheme as chosen

    def passage(self, documents: Documents | None, tokens: int, rows: int, like: Tensor) -> Passage:
        """The passage of one micro-batch.

        ``documents`` are packed into the only batch row, or None. ``tokens`` counts a row's tokens
        over all ranks. ``like`` has the dtype and device of the rows. Raises a ValueError for a
        length that the layout cannot cut.
        """
        ...

    def local(self, param: Tensor, names: Sequence[str] | None = None) -> Tensor:
        """The rows of a parameter that this rank's mixer needs.

        ``param`` has a row per state head; with ``names``, a row per column (or head) of these
        sections.
        """
        ...

    def local_positions(self, documents: Documents | None, tokens: int) -> Tensor | range:
        """The sequence positions of this rank's tokens, in the rank's order."""
        ...


class Whole:
    """The scheme for whole sequences on every rank."""

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
    """This rank's rows of the convolution's parameters and of ``per_head``, for heads ``of``."""
    if not scheme.moves_rows:
        return [weight, bias, *per_head]
    convolved = scheme.layout.conv_names
    of_conv = [x if x is None else scheme.local(x, convolved) for x in (weight, bias)]
    heads = None if of is None else (of,)
    return [*of_conv, *[scheme.local(x, heads) for x in per_head]]


def stay(rows: Tensor) -> Tensor:
    """Return ``rows`` themselves: ``open`` and ``close`` of schemes that move no rows."""
    return rows

"""The shapes that users run: heads of one tensor-parallel rank, batches, linears,
gates.

The cells are in the order of their weight: a run that ends early has the first ones.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_gdn.ops.delta_rule.base import HeadSizes

from .layers import Case

BATCHES = {
    case.name: case
    for case in (
        Case("1x4096", 1, 4096),
        Case("4x4096", 4, 4096),
        Case("1x32768", 1, 32768),
        Case("thd32768", 1, 32768, documents=32),
    )
}


@dataclass(frozen=True)
class Cell:
    """One shape.

    Attributes:
        heads: key and value heads of one rank.
        seconds: what the cell takes at most, once FlashQLA's kernels are compiled.
        smaller: by what the tokens of the batch are divided.
    """

    heads: tuple[int, int]
    hidden: int
    batch: str
    linears: str = "te"
    gates: str = "fast"
    seconds: float = 30
    head_dim: int = 128
    smaller: int = 1

    @property
    def name(self) -> str:
        key, value = self.heads
        return f"{key}/{value} h{self.hidden} {self.batch} {self.linears} {self.gates}"

    @property
    def case(self) -> Case:
        case = BATCHES[self.batch]
        return replace(case, tokens=case.tokens // self.smaller)

    @property
    def sizes(self) -> HeadSizes:
        return HeadSizes(*self.heads, self.head_dim, self.head_dim)

    def toy(self) -> Cell:
        """The same with small sizes, for a CPU without Transformer Engine."""
        return replace(self, hidden=32, head_dim=8, smaller=256, linears="local")


_LONG = 45
CELLS = (
    Cell((16, 32), 2048, "1x4096"),
    Cell((4, 8), 4096, "4x4096"),
    Cell((16, 32), 2048, "1x32768", seconds=_LONG),
    Cell((2, 4), 2048, "1x32768", gates="slow"),
    Cell((16, 32), 2048, "1x4096", gates="slow"),
    Cell((4, 8), 4096, "4x4096", gates="slow"),
    Cell((8, 32), 4096, "1x4096"),
    Cell((4, 12), 5120, "4x4096"),
    Cell((16, 32), 2048, "1x4096", linears="local"),
    Cell((8, 32), 4096, "thd32768", seconds=_LONG),
    Cell((2, 4), 2048, "1x4096"),
    Cell((16, 32), 2048, "1x32768", gates="slow", seconds=_LONG),
    Cell((8, 32), 4096, "thd32768", gates="slow", seconds=_LONG),
    Cell((4, 8), 4096, "4x4096", linears="local"),
    Cell((2, 4), 2048, "1x32768"),
    Cell((16, 32), 2048, "1x32768", linears="local", seconds=_LONG),
    Cell((16, 32), 2048, "4x4096", seconds=_LONG),
    Cell((8, 32), 4096, "4x4096", seconds=_LONG),
    Cell((4, 12), 5120, "4x4096", gates="slow"),
    Cell((8, 32), 4096, "1x4096", gates="slow"),
    Cell((8, 32), 4096, "1x32768", seconds=_LONG),
    Cell((4, 8), 4096, "1x32768"),
    Cell((4, 12), 5120, "1x32768"),
)


@dataclass(frozen=True)
class Goal:
    """A bound on the ratio of two records of one cell; ``to`` None: on the record's own
    value."""

    what: str
    cell: Cell
    layer: str
    to: str
    key: str
    most: float


FIRST, FEW_HEADS, LONG = CELLS[:3]
GOALS = (
    Goal("eager, beside megatron-core", FIRST, "ours", "upstream", "eager", 0.50),
    Goal("as a graph, beside its graph", FIRST, "ours", "upstream", "graph", 0.85),
    Goal(
        "rows cut, beside rows side by side",
        FEW_HEADS,
        "ours",
        "ours-uncut",
        "eager",
        0.85,
    ),
    Goal(
        "full, saved beside megatron-core", LONG, "ours-full", "upstream", "saved", 0.32
    ),
    Goal("full, time beside our own", LONG, "ours-full", "ours", "eager", 1.06),
)

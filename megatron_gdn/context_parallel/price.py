"""Which context-parallel scheme is cheaper for a micro-batch, from its lengths alone.

Both schemes are priced in bytes that one rank receives in one forward (the backward repeats them).
Compute time is converted to bytes at wire bandwidth.

    headwise    (cp - 1) * s * B * (p + h V) * element size      rows in, mixed rows out
    chunkwise   map * s * B * SUMMARY + FIXED                    computing the maps, small launches
                + the cheapest of                                sending them, with b = map * chains
        gather  (cp - 1) * b + LATENCY + n * STEP                * nodes of a chain on one rank
        share   (cp - 1) / cp * (1 + V / (K + V)) * b + 2 * LATENCY + n * STEP

map = H K (K + V) * 4 bytes, or H K (1 + V) * 4 bytes if the rule does not mix the rows of a state.
A chain is a sequence that states travel along: a document in zigzag, else a batch row. It has n
nodes, 2 on every rank, or 1 when contiguous. Bytes and nodes come from :func:`row_bytes` and
:func:`map_exchanges`, which ``benchmarks/model_context_parallel.py`` reads too.

Legend: s tokens of one rank, B batch, H value heads of one tensor-parallel rank, h those inside the
head exchange and p the projection width there, K key dim, V value dim.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any, NamedTuple

from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape
from .layouts import SequenceLayout

# On H200 with flash_qla, 16 key and 32 value heads, 8192 tokens on each of four ranks, a chunkwise
# forward takes longer than the layer alone: 0.22 ms as a CUDA graph, 0.7 ms if the host is too slow
# for its launches. The wire carries 128 MiB in 0.46 ms.
SUMMARY = 1 / 7000  # computing the maps of the pieces: a share of a map's bytes for every token
FIXED = 128 * 2**20  # small launches and the history, once per layer
# Per collective: 57 us, an estimate. GPUs take 10 to 28 us for a small collective, and a slow host
# takes 300 us to issue it.
LATENCY = 16 * 2**20
STEP = 1.5 * 2**20  # per product of a chain, which waits for the product before: 5.8 us
GATHER_UP_TO = 8  # ranks; with more ranks, gathered maps cost memory too


class LinearCpMode(StrEnum):
    """How a linear-attention layer runs under context parallelism."""

    HEADWISE = "headwise"
    CHUNKWISE = "chunkwise"
    AUTO = "auto"

    @classmethod
    def of(cls, value: str | LinearCpMode | None, config: Any) -> LinearCpMode:
        """The value given, else the config's (newer Megatrons have one), else auto."""
        if value is None:
            value = getattr(config, "linear_cp_mode", None) or cls.AUTO
        try:
            return cls(value)
        except ValueError:
            raise ValueError(
                f"unknown linear_cp_mode {value!r}; use one of "
                f"{', '.join(repr(mode.value) for mode in cls)}."
            ) from None


class Price(NamedTuple):
    """Bytes of both schemes; compute time counts as the bytes that the wire carries in it."""

    headwise: float
    chunkwise: float

    @property
    def cheaper(self) -> LinearCpMode:
        chunkwise = self.chunkwise < self.headwise
        return LinearCpMode.CHUNKWISE if chunkwise else LinearCpMode.HEADWISE


class MapExchange(NamedTuple):
    """One way for maps to travel, in one forward."""

    received: float  # bytes, by one rank
    collectives: int
    nodes: int  # of a chain: products that wait for each other


def row_bytes(inside: Layout, cp_size: int, local: int, element_size: int) -> int:
    """Received by one rank in one headwise forward: projection rows, and mixed rows back.

    Args:
        inside: projection columns inside the head exchange, on one rank.
        local: tokens of one rank, times batch rows.
        element_size: bytes of an activation.
    """
    return (cp_size - 1) * local * (inside.width + inside.mixed_width) * element_size


def map_exchanges(
    state: StateShape,
    cp_size: int,
    layout: SequenceLayout,
    rows: int,
    lengths: tuple[int, ...] | None,
) -> dict[str, MapExchange]:
    """The exchanges of :mod:`.chunkwise.map_exchange` that may be used.

    Arguments as in :func:`price`.
    """
    documents = lengths if layout is SequenceLayout.ZIGZAG else None
    chains = rows if documents is None else sum(n > 0 for n in documents)
    per_rank = 1 if layout is SequenceLayout.CONTIGUOUS else 2
    nodes, own = per_rank * cp_size, per_rank * chains * state.map_bytes
    states = state.columns / state.map_columns
    share = MapExchange((cp_size - 1) / cp_size * (1 + states) * own, 2, nodes)
    if cp_size > GATHER_UP_TO:
        return {"share": share}
    return {"gather": MapExchange((cp_size - 1) * own, 1, nodes), "share": share}


def exchange_prices(
    state: StateShape,
    cp_size: int,
    layout: SequenceLayout,
    rows: int,
    lengths: tuple[int, ...] | None,
) -> dict[str, float]:
    """What each of :func:`map_exchanges` costs."""
    return {
        name: received + collectives * LATENCY + nodes * STEP
        for name, (received, collectives, nodes) in map_exchanges(
            state, cp_size, layout, rows, lengths
        ).items()
    }


def price(
    state: StateShape,
    inside: Layout,
    cp_size: int,
    layout: SequenceLayout,
    tokens: int,
    rows: int,
    lengths: tuple[int, ...] | None,
    element_size: int,
) -> Price:
    """Price one layer's forward over a micro-batch.

    Args:
        state: the states of one tensor-parallel rank's heads.
        inside: projection columns inside the head exchange, on one rank.
        tokens: of the whole sequence or packed buffer.
        rows: of the batch.
        lengths: of the packed documents; None when not packed.
        element_size: bytes of an activation.
    """
    local = tokens // cp_size * rows
    headwise = row_bytes(inside, cp_size, local, element_size)
    sending = min(exchange_prices(state, cp_size, layout, rows, lengths).values())
    return Price(headwise, sending + state.map_bytes * local * SUMMARY + FIXED)

"""Finds the cheaper context-parallel scheme for a micro-batch from its lengths alone.

A scheme's price is the milliseconds that it adds to one forward
(``docs/context_parallel.md``):

    wire(b)    max(within / WITHIN, across / ACROSS)
    headwise   wire((cp - 1) * s * B * (p + h V) * element size)   rows, outputs
    chunkwise  map * s * B * SUMMARY + FIXED                       makes maps
               + wire((cp - 1) / cp * r * d) + 2 * LATENCY         sends maps, states
               + l * STEP                                          applies maps in order

across = (cp - n) / (cp - 1) * b bytes come from other machines while the rest,
within = b - across, comes from this one. d = map * chains * nodes of a chain on a rank,
the bytes of a rank's maps.

Bytes of a map: map = H K (K + V) * 4, or H K (1 + V) * 4 if the rule does not mix a
state's rows. r = 1 + V / (K + V), or 1 + V / (1 + V), since maps are sent and states
come back. A chain is a document in zigzag, else a batch row; a chain has l nodes. No
price was measured across machines.

Legend: H value heads of one tensor-parallel rank, h value heads and p projection
columns of a rank inside the head exchange, n ranks per machine, s tokens of a rank, B
batch rows.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape
from .layouts import SequenceLayout, parse_member

# Bytes that a rank receives per millisecond.
WITHIN = 128 * 2**20 / 0.46  # 292 GB/s over NVLink: 128 MiB in 0.46 ms, on four H200
ACROSS = 50e6  # 50 GB/s: one network card of 400 Gbit/s per GPU, an assumption

# ms to compute the maps of pieces, per token and byte of a map
SUMMARY = 1 / 7000 / WITHIN
# Small launches and the history of one layer take 0.22 ms in a CUDA graph and 0.7 ms
# with a slow host (H200, flash_qla, 16 key and 32 value heads, 8192 tokens on each of
# four ranks).
FIXED = 0.46  # ms, a value between the two times above
# ms on several machines, where hosts issue launches while GPUs await messages
FIXED_ACROSS = 0.22
# ms, estimated: a small collective takes a GPU 10 to 28 us, and a slow host 300 us to
# launch.
LATENCY = 0.0575
STEP = 0.0054  # ms per product of a chain; each product waits for the one before


class LinearCpMode(StrEnum):
    """How a linear-attention layer runs under context parallelism."""

    HEADWISE = "headwise"
    CHUNKWISE = "chunkwise"
    AUTO = "auto"

    @classmethod
    def of(cls, value: str | LinearCpMode | None, config: object) -> LinearCpMode:
        """The mode ``value``; if None, ``config.linear_cp_mode`` (newer Megatrons) or
        AUTO."""
        if value is None:
            value = getattr(config, "linear_cp_mode", None) or cls.AUTO
        return parse_member(cls, value, "linear_cp_mode")


class Price(NamedTuple):
    """The milliseconds that each scheme adds to a layer's forward."""

    headwise: float
    chunkwise: float

    @property
    def cheaper(self) -> LinearCpMode:
        """The scheme with the lower price; headwise if both are equal."""
        chunkwise = self.chunkwise < self.headwise
        if chunkwise:
            return LinearCpMode.CHUNKWISE
        return LinearCpMode.HEADWISE


def transfer_time(
    received: float, cp_size: int, ranks_per_machine: int, nvlink_speed: float = WITHIN
) -> float:
    """Milliseconds to get ``received`` bytes evenly from all peers; ``nvlink_speed``:
    bytes/ms."""
    across = received * (cp_size - ranks_per_machine) / (cp_size - 1)
    return max((received - across) / nvlink_speed, across / ACROSS)


def row_bytes(
    rank_layout: Layout, cp_size: int, local_rows: int, element_size: int
) -> int:
    """Bytes that a rank with ``local_rows`` rows receives in a head exchange of
    ``rank_layout``."""
    width = rank_layout.width + rank_layout.mixed_width
    return (cp_size - 1) * local_rows * width * element_size


def map_exchange_traffic(
    state: StateShape,
    cp_size: int,
    layout: SequenceLayout,
    rows: int,
    lengths: tuple[int, ...] | None,
) -> tuple[float, int]:
    """Bytes of maps and states that a rank receives in a forward, and the products per
    chain."""
    if layout is SequenceLayout.ZIGZAG:
        documents = lengths
    else:
        documents = None
    if documents is None:
        chains = rows
    else:
        chains = sum(n > 0 for n in documents)
    if layout is SequenceLayout.CONTIGUOUS:
        per_rank = 1
    else:
        per_rank = 2
    rank_bytes = per_rank * chains * state.map_bytes
    # Maps are sent, states come back.
    exchanged_bytes = (1 + state.columns / state.map_columns) * rank_bytes
    return (cp_size - 1) / cp_size * exchanged_bytes, per_rank * cp_size


def price(
    state: StateShape,
    rank_layout: Layout,
    cp_size: int,
    layout: SequenceLayout,
    tokens: int,
    rows: int,
    lengths: tuple[int, ...] | None,
    element_size: int,
    ranks_per_machine: int,
) -> Price:
    """The `Price` of a layer's forward; each of ``rows`` batch rows has ``tokens`` over
    all ranks.

    ``state`` has a tensor-parallel rank's states, ``rank_layout`` the projection
    columns inside the head exchange. ``lengths`` are those of packed documents;
    ``element_size`` is in bytes.
    """
    local = tokens // cp_size * rows
    received = row_bytes(rank_layout, cp_size, local, element_size)
    map_bytes, steps = map_exchange_traffic(state, cp_size, layout, rows, lengths)
    exchange = (
        transfer_time(map_bytes, cp_size, ranks_per_machine)
        + 2 * LATENCY
        + steps * STEP
    )
    if ranks_per_machine == cp_size:
        fixed = FIXED
    else:
        fixed = FIXED_ACROSS
    return Price(
        headwise=transfer_time(received, cp_size, ranks_per_machine),
        chunkwise=exchange + state.map_bytes * local * SUMMARY + fixed,
    )

"""Finds the cheaper context-parallel scheme of a micro-batch, only from its lengths.

A scheme's price is the milliseconds that it adds to one forward
(``docs/context_parallel.md``):

    wire(b)    max((b - across) / NVLINK_SPEED, across / NETWORK_SPEED)
               across = (cp - n) / (cp - 1) * b           from other machines
    headwise   wire((cp - 1) * s * B * (p + h V) * element size)   rows, outputs
    chunkwise  map * s * B * MAP_TIME + FIXED_TIME        computes maps
               + wire((cp - 1) / cp * r * d)              sends maps, returns states
               + 2 * COLLECTIVE_TIME
               + l * PRODUCT_TIME                         applies maps in order

    map        H K (K + V) * 4                            bytes of one map
    d          map * chains * nodes of a chain on a rank  bytes of a rank's maps
    r          1 + V / (K + V)                            (maps + states) / maps, in bytes

If the rule does not mix a state's rows, a map has 1 + V columns, not K + V. A chain is
a document in zigzag, else a batch row. No price was measured across machines.

Legend: b bytes that a rank receives, H value heads of one tensor-parallel rank, h value
heads and p projection columns of a rank inside the head exchange, K and V rows and
columns of a state, n ranks per machine, s tokens of a rank, B batch rows, l nodes of a
chain.
"""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from ..ops.layout import Layout
from ..ops.state_maps.state_map import StateShape
from .layouts import SequenceLayout, parse_member

# Speeds are the bytes that a rank receives per millisecond; times are in milliseconds.
NVLINK_SPEED = (
    128 * 2**20 / 0.46
)  # 292 GB/s over NVLink: 128 MiB in 0.46 ms, on four H200
NETWORK_SPEED = 50e6  # 50 GB/s: one network card of 400 Gbit/s per GPU, an assumption

# time to compute the maps of pieces, per token and per byte of a map
MAP_TIME = 1 / 7000 / NVLINK_SPEED
# Small launches and the history of one layer take 0.22 ms in a CUDA graph and 0.7 ms
# with a slow host (H200, flash_qla, 16 key and 32 value heads, 8192 tokens on each of
# four ranks).
FIXED_TIME = 0.46  # a value between the two times above
# FIXED_TIME on several machines: as in a CUDA graph, since hosts issue launches while
# GPUs wait for messages
FIXED_TIME_ACROSS_MACHINES = 0.22
# an estimate: a small collective takes 10 to 28 us on a GPU, and its launch takes 300
# us on a slow host
COLLECTIVE_TIME = 0.0575
# time of one product of a map and a state; the products of a chain run one by one
PRODUCT_TIME = 0.0054


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
    def cheaper_mode(self) -> LinearCpMode:
        """The scheme with the lower price; headwise if both are equal."""
        if self.chunkwise < self.headwise:
            return LinearCpMode.CHUNKWISE
        return LinearCpMode.HEADWISE


def transfer_time(
    received: float,
    cp_size: int,
    ranks_per_machine: int,
    nvlink_speed: float = NVLINK_SPEED,
) -> float:
    """Milliseconds in which a rank receives ``received`` bytes, the same number from
    each peer; ``nvlink_speed`` is in bytes per millisecond."""
    # bytes from other machines; they arrive at the same time as those over NVLink
    across = received * (cp_size - ranks_per_machine) / (cp_size - 1)
    return max((received - across) / nvlink_speed, across / NETWORK_SPEED)


def row_bytes(
    rank_layout: Layout, cp_size: int, local_rows: int, element_size: int
) -> int:
    """Bytes that a rank receives in the two head exchanges of a forward, before and
    after the stages.

    ``rank_layout``: the columns of one rank's heads; ``local_rows``: tokens of a rank
    times batch rows; ``element_size``: bytes of an element.
    """
    # columns of a projection row, and of a row of the readout's output
    width = rank_layout.width + rank_layout.mixed_width
    return (cp_size - 1) * local_rows * width * element_size


def map_exchange_traffic(
    state: StateShape,
    cp_size: int,
    layout: SequenceLayout,
    rows: int,
    lengths: tuple[int, ...] | None,
) -> tuple[float, int]:
    """The bytes of maps and states that a rank receives in a forward, and the number of
    products of a chain.

    ``state`` has the shape of the states of a tensor-parallel rank. ``lengths``: the
    tokens of each packed document; None: ``rows`` batch rows are not packed.
    """
    if layout is SequenceLayout.ZIGZAG:
        document_lengths = lengths
    else:
        document_lengths = None
    if document_lengths is None:
        chains = rows
    else:
        chains = sum(n > 0 for n in document_lengths)
    if layout is SequenceLayout.CONTIGUOUS:
        nodes_per_rank = 1
    else:
        nodes_per_rank = 2
    rank_bytes = nodes_per_rank * chains * state.map_bytes
    # Maps are sent, states come back; a rank sends itself nothing.
    exchanged_bytes = (1 + state.columns / state.map_columns) * rank_bytes
    return (cp_size - 1) / cp_size * exchanged_bytes, nodes_per_rank * cp_size


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
    """The `Price` of a layer's forward; each of ``rows`` batch rows has ``tokens``
    tokens over all ranks.

    ``state`` has the shape of a tensor-parallel rank's states, ``rank_layout`` the
    projection columns of one rank's heads in the head exchange. ``lengths`` are the
    tokens of each packed document, None if not packed; ``element_size`` is in bytes.
    """
    local_rows = tokens // cp_size * rows
    received = row_bytes(rank_layout, cp_size, local_rows, element_size)
    map_bytes, products = map_exchange_traffic(state, cp_size, layout, rows, lengths)
    exchange = (
        transfer_time(map_bytes, cp_size, ranks_per_machine)
        + 2 * COLLECTIVE_TIME
        + products * PRODUCT_TIME
    )
    if ranks_per_machine == cp_size:
        fixed = FIXED_TIME
    else:
        fixed = FIXED_TIME_ACROSS_MACHINES
    return Price(
        headwise=transfer_time(received, cp_size, ranks_per_machine),
        chunkwise=exchange + state.map_bytes * local_rows * MAP_TIME + fixed,
    )

"""Which context-parallel scheme a micro-batch is cheaper under, from its lengths alone.

Both schemes are priced in bytes that one rank receives in one forward (the backward repeats them):

    headwise   (cp - 1) / cp * s * B * (P + H V) * element size      rows in, mixed rows out
    chunkwise  map * chains * nodes * hops                           state maps, fp32
               + map * s * B * SUMMARY + FIXED                       what else it costs
    map        H K (K + V) * 4

with the sizes of one tensor-parallel rank; ``chains`` are the sequences that states travel along
(documents in zigzag, else rows), ``nodes`` the links of each on one rank (2, or 1 when contiguous)
and ``hops`` is cp - 1 for the all-gather, ceil(log2(nodes * cp)) for the scan.

Legend: s tokens of one rank, B batch, P projection width, H value heads, K key dim, V value dim.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Any, NamedTuple

from ..dims import GDNDims
from .zigzag import SequenceLayout

# The work that chunkwise adds, as bytes that the wire would carry meanwhile: computing the maps of
# the pieces, as a share of the map's bytes for every token, and small launches and the second
# collective, once per layer.
SUMMARY = 1 / 700
FIXED = 16 * 2**20


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
    """Bytes, or their equal in time, of both schemes."""

    headwise: float
    chunkwise: float

    @property
    def cheaper(self) -> LinearCpMode:
        chunkwise = self.chunkwise < self.headwise
        return LinearCpMode.CHUNKWISE if chunkwise else LinearCpMode.HEADWISE


def price(
    dims: GDNDims,
    cp_size: int,
    layout: SequenceLayout,
    tokens: int,
    rows: int,
    lengths: tuple[int, ...] | None,
    element_size: int,
    gather_up_to: int,
) -> Price:
    """Price one layer's forward over a micro-batch.

    Args:
        dims: sizes on one tensor-parallel rank.
        tokens: of the whole sequence or packed buffer.
        rows: of the batch.
        lengths: of the packed documents; None when not packed.
        element_size: bytes of an activation.
        gather_up_to: the largest group that gathers state maps instead of scanning.
    """
    local = tokens // cp_size * rows
    H, K, V = dims.num_value_heads, dims.key_head_dim, dims.value_head_dim
    row = dims.layout.width + dims.v_dim
    headwise = (cp_size - 1) / cp_size * local * row * element_size

    per_document = layout is SequenceLayout.ZIGZAG and lengths is not None
    chains = sum(n > 0 for n in lengths) if per_document else rows
    nodes = 1 if layout is SequenceLayout.CONTIGUOUS else 2
    hops = cp_size - 1 if cp_size <= gather_up_to else math.ceil(math.log2(nodes * cp_size))
    map_bytes = H * K * (K + V) * 4
    return Price(headwise, map_bytes * (chains * nodes * hops + local * SUMMARY) + FIXED)

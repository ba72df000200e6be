"""The sizes of a Gated DeltaNet-2 layer and of one rank's share of the layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..ops.delta_rule.base import HeadSizes, delta_layout
from ..ops.delta_rule.sizes import LinearDims
from ..ops.layout import Layout, Section


@dataclass(frozen=True, slots=True, kw_only=True)
class GDN2Dims(LinearDims):
    """Sizes of a Gated DeltaNet-2 layer, or of one rank's share of the layer."""

    @property
    def layout(self) -> Layout:
        return gdn2_layout(self.heads)


@lru_cache(maxsize=64)
def gdn2_layout(heads: HeadSizes) -> Layout:
    """The columns query | key | value | z | f (decay) | b (erase gate) | w (write
    gate)."""
    return delta_layout(
        heads,
        Section("z", "value", heads.value_dim),
        Section("f", "key", heads.key_dim, gates=True),
        Section("b", "key", heads.key_dim, gates=True),
        Section("w", "value", heads.value_dim, gates=True),
    )

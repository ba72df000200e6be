"""The sizes of a Gated DeltaNet layer and of one rank's share of the layer."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.delta_rule.sizes import LinearDims
from ..ops.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class GDNDims(LinearDims):
    """Sizes of a Gated DeltaNet layer, or of one rank's share of the layer."""

    @property
    def layout(self) -> Layout:
        """The columns query | key | value | z | beta | alpha of a projection row."""
        return self.heads.layout

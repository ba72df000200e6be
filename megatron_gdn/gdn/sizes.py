"""The sizes of a Gated DeltaNet layer, from Megatron's config to one rank's share."""

from __future__ import annotations

from dataclasses import dataclass

from ..ops.delta_rule.sizes import LinearDims
from ..ops.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class GDNDims(LinearDims):
    """Sizes of a Gated DeltaNet layer, or of the share of it that one rank holds."""

    @property
    def layout(self) -> Layout:
        """The columns of the input projection."""
        return self.heads.layout

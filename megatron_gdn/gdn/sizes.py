"""The sizes of a Gated DeltaNet layer, from Megatron's config to one rank's share."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..ops.delta_rule.sizes import LinearDims
from ..ops.layout import Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class GDNDims(LinearDims):
    """Sizes of a Gated DeltaNet layer, or of the share of it that one rank holds."""

    @property
    def layout(self) -> Layout:
        """The columns of the input projection."""
        return self.heads.layout

    def share_heads(self, ranks: int) -> GDNDims:
        """The sizes on one of ``ranks`` context-parallel ranks that share these heads.

        A key head is held by every rank whose value heads it serves, see :meth:`.Layout.share`.
        """
        inside = self.layout.share(ranks)
        return replace(
            self, num_key_heads=inside.heads("key"), num_value_heads=inside.heads("value")
        )

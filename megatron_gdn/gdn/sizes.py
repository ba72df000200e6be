"""The sizes of a Gated DeltaNet layer, from Megatron's config to one rank's share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..ops.delta_rule.base import HeadSizes
from ..ops.layout import Layout, SizeError, require_shares, require_sizes
from ..ops.state_maps.state_map import StateShape

# Fields that a TransformerConfig and a ``config.json`` call by this name after ``linear_``.
LINEAR = (
    "conv_kernel_dim", "key_head_dim", "value_head_dim", "num_key_heads", "num_value_heads",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GDNDims:
    """Sizes of a Gated DeltaNet layer, or of the share of it that one rank holds.

    ``hidden_size`` is never split.
    """

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel_dim: int

    def __post_init__(self) -> None:
        require_sizes(self)
        if self.num_value_heads % self.num_key_heads:
            raise SizeError(
                f"num_value_heads={self.num_value_heads} is not a multiple of "
                f"num_key_heads={self.num_key_heads}; every key head must serve the same number "
                f"of value heads. Set linear_num_value_heads to a multiple of "
                f"linear_num_key_heads."
            )

    @classmethod
    def from_config(cls, config: Any) -> GDNDims:
        """The sizes of a Megatron ``TransformerConfig``; ones that do not fit are a ValueError."""
        sizes = {name: getattr(config, f"linear_{name}") for name in LINEAR}
        return cls(hidden_size=config.hidden_size, **sizes)

    @property
    def config_fields(self) -> dict[str, int]:
        """The ``linear_*`` fields that `from_config` reads; a ``config.json`` has the same."""
        return {f"linear_{name}": getattr(self, name) for name in LINEAR}

    @property
    def qk_dim(self) -> int:
        return self.num_key_heads * self.key_head_dim

    @property
    def v_dim(self) -> int:
        return self.num_value_heads * self.value_head_dim

    @property
    def value_heads_per_key_head(self) -> int:
        return self.num_value_heads // self.num_key_heads

    @property
    def heads(self) -> HeadSizes:
        """The kernels' view of these sizes."""
        return HeadSizes(
            self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim
        )

    @property
    def layout(self) -> Layout:
        """The columns of the input projection."""
        return self.heads.layout

    @property
    def state(self) -> StateShape:
        return self.heads.state

    def shard(self, ranks: int) -> GDNDims:
        """The sizes one of ``ranks`` tensor-parallel ranks holds, see :func:`require_shares`."""
        keys, values = self.num_key_heads, self.num_value_heads
        require_shares(ranks, (keys,), f"{keys} key heads and {values} value heads")
        return replace(self, num_key_heads=keys // ranks, num_value_heads=values // ranks)

    def share_heads(self, ranks: int) -> GDNDims:
        """The sizes on one of ``ranks`` context-parallel ranks that share these heads.

        A key head is held by every rank whose value heads it serves, see :meth:`.Layout.share`.
        """
        inside = self.layout.share(ranks)
        return replace(
            self, num_key_heads=inside.heads("key"), num_value_heads=inside.heads("value")
        )

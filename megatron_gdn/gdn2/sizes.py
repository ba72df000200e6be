"""The sizes of a Gated DeltaNet-2, from Megatron's config to one rank's share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..ops.delta_rule.base import require_even_groups
from ..ops.layout import Layout, Section, require_shares, require_sizes
from ..ops.state_maps.state_map import StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class GDN2Dims:
    """Sizes of a Gated DeltaNet-2, or of the share that one tensor-parallel rank holds."""

    hidden_size: int  # of the model; never split
    num_key_heads: int  # with a decay and an erase gate each; each serves neighbouring value heads
    num_value_heads: int  # with a write gate and a state each
    key_head_dim: int  # rows of a state
    value_head_dim: int  # columns of a state
    conv_kernel_dim: int

    def __post_init__(self) -> None:
        require_sizes(self)
        require_even_groups(self.num_key_heads, self.num_value_heads)

    @classmethod
    def from_config(cls, config: Any) -> GDN2Dims:
        """The sizes of a Megatron ``TransformerConfig``; ones that do not fit are a ValueError."""
        return cls(
            hidden_size=config.hidden_size,
            num_key_heads=config.linear_num_key_heads,
            num_value_heads=config.linear_num_value_heads,
            key_head_dim=config.linear_key_head_dim,
            value_head_dim=config.linear_value_head_dim,
            conv_kernel_dim=config.linear_conv_kernel_dim,
        )

    @property
    def layout(self) -> Layout:
        return rows_of(
            self.num_key_heads, self.num_value_heads, self.key_head_dim, self.value_head_dim
        )

    @property
    def state(self) -> StateShape:
        return StateShape(self.num_value_heads, self.key_head_dim, self.value_head_dim)

    def shard(self, ranks: int) -> GDN2Dims:
        """The sizes one of ``ranks`` tensor-parallel ranks holds, see :func:`require_shares`."""
        keys, values = self.num_key_heads, self.num_value_heads
        require_shares(ranks, (keys,), f"{keys} key heads and {values} value heads")
        return replace(self, num_key_heads=keys // ranks, num_value_heads=values // ranks)


@lru_cache(maxsize=64)
def rows_of(key_heads: int, value_heads: int, key_dim: int, value_dim: int) -> Layout:
    """query | key | value | z | f | b | w: f is the decay's, b erases, w writes."""
    return Layout(
        (
            Section("query", "key", key_dim, conv=True),
            Section("key", "key", key_dim, conv=True),
            Section("value", "value", value_dim, conv=True),
            Section("z", "value", value_dim),
            Section("f", "key", key_dim, gates=True),
            Section("b", "key", key_dim, gates=True),
            Section("w", "value", value_dim, gates=True),
        ),
        (("value", value_heads), ("key", key_heads)),
    )

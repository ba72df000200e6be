"""The sizes of a Kimi Delta Attention, from Megatron's config to one rank's share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..ops.delta_rule.base import HeadSizes, require_even_groups
from ..ops.layout import Layout, Section, require_shares, require_sizes
from ..ops.state_maps.state_map import StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class KDADims:
    """Sizes of a Kimi Delta Attention, or of the share that one tensor-parallel rank holds."""

    hidden_size: int  # of the model; never split
    num_key_heads: int  # each serves neighbouring heads; as many as heads in Kimi Linear
    num_heads: int  # with a value, gates and a state each
    key_head_dim: int  # rows of a state
    value_head_dim: int  # columns of a state
    conv_kernel_dim: int
    forget_rank: int  # columns of the gate's narrow half; 0: the gate is a section of in_proj
    output_rank: int  # likewise

    def __post_init__(self) -> None:
        require_sizes(self, may_be_zero=("forget_rank", "output_rank"))
        require_even_groups(self.num_key_heads, self.num_heads)

    @classmethod
    def from_config(
        cls, config: Any, forget_rank: int | None = None, output_rank: int | None = None
    ) -> KDADims:
        """As GDNDims has it. A rank that is None is the value head's dim, as in Kimi Linear."""
        V = config.linear_value_head_dim
        return cls(
            hidden_size=config.hidden_size,
            num_key_heads=config.linear_num_key_heads,
            num_heads=config.linear_num_value_heads,
            key_head_dim=config.linear_key_head_dim,
            value_head_dim=V,
            conv_kernel_dim=config.linear_conv_kernel_dim,
            forget_rank=V if forget_rank is None else forget_rank,
            output_rank=V if output_rank is None else output_rank,
        )

    @property
    def layout(self) -> Layout:
        """The columns of a row, with both gates in full width."""
        return rows_of(self.num_key_heads, self.num_heads, self.key_head_dim, self.value_head_dim)

    @property
    def in_proj_layout(self) -> Layout:
        """The columns of in_proj: :attr:`layout` with the narrow halves in the gates' places.

        The ranks share the columns of a narrow half: no gradient of a copy is to be summed.
        """
        sections = [
            Section(f"{x.name}_a", f"{x.name}_rank", 1) if self.ranks.get(x.name) else x
            for x in self.layout.sections
        ]
        counts = [(f"{gate}_rank", rank) for gate, rank in self.ranks.items() if rank]
        return Layout(tuple(sections), (*self.layout.counts, *counts), gate="")

    @property
    def ranks(self) -> dict[str, int]:
        """Columns of the narrow halves, by the gate's section."""
        return {"f": self.forget_rank, "z": self.output_rank}

    @property
    def state(self) -> StateShape:
        return StateShape(self.num_heads, self.key_head_dim, self.value_head_dim)

    def shard(self, ranks: int) -> KDADims:
        """The sizes one of ``ranks`` tensor-parallel ranks holds, see :func:`require_shares`."""
        counts = (self.num_key_heads, self.num_heads, self.forget_rank, self.output_rank)
        held = (
            f"{self.num_key_heads} key heads, {self.num_heads} value heads, "
            f"forget_rank={self.forget_rank} and output_rank={self.output_rank}"
        )
        require_shares(ranks, counts, held)
        keys, heads, forget, output = (count // ranks for count in counts)
        return replace(
            self, num_key_heads=keys, num_heads=heads, forget_rank=forget, output_rank=output
        )


@lru_cache(maxsize=64)
def rows_of(key_heads: int, heads: int, key_dim: int, value_dim: int) -> Layout:
    """query | key | value | f | z | beta: f is the forget gate, z the output gate."""
    return Layout(
        (
            Section("query", "key", key_dim, conv=True),
            Section("key", "key", key_dim, conv=True),
            Section("value", "head", value_dim, conv=True),
            Section("f", "head", key_dim),
            Section("z", "head", value_dim),
            Section("beta", "head", 1),
        ),
        (("head", heads), ("key", key_heads)),
    )


@lru_cache(maxsize=64)
def sizes_of(layout: Layout) -> HeadSizes:
    """The sizes of a layout made by :func:`rows_of`."""
    widths = {section.name: section.width for section in layout.sections}
    return HeadSizes(layout.heads("key"), layout.state_heads, widths["key"], widths["value"])

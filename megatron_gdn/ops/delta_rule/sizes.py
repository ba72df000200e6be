"""The sizes of a mixer, from the ``linear_*`` fields of a config."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from ..layout import Layout, require_shares, require_sizes
from ..state_maps.state_map import StateShape
from .base import HeadSizes, require_multiple_of_key_heads

# The names of sizes that a TransformerConfig and a ``config.json`` have; their fields
# begin with ``linear_``, such as ``linear_key_head_dim``.
LINEAR_SIZES = (
    "conv_kernel_dim",
    "key_head_dim",
    "value_head_dim",
    "num_key_heads",
    "num_value_heads",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearDims:
    """The sizes of a mixer, or of one tensor-parallel rank's share of it.

    Subclasses add ``layout`` and more sizes.
    """

    hidden_size: int  # of the model; tensor-parallel ranks do not split it
    # each key head serves num_value_heads / num_key_heads value heads
    num_key_heads: int
    num_value_heads: int  # each value head has a state
    key_head_dim: int  # rows of a state
    value_head_dim: int  # columns of a state
    conv_kernel_dim: int

    may_be_zero: ClassVar[tuple[str, ...]] = ()  # names of sizes that may be 0

    def __post_init__(self) -> None:
        require_sizes(self, self.may_be_zero)
        require_multiple_of_key_heads(self.num_key_heads, self.num_value_heads)

    @classmethod
    def from_config(cls, config: Any, **others: int) -> Self:
        """The sizes in a Megatron ``TransformerConfig``; ValueError if a size is
        invalid. ``others`` are the sizes that a subclass adds."""
        sizes = {name: getattr(config, f"linear_{name}") for name in LINEAR_SIZES}
        return cls(hidden_size=config.hidden_size, **sizes, **others)

    @property
    def config_fields(self) -> dict[str, int]:
        """These sizes as the ``linear_*`` fields of a config, from which `from_config`
        reads them."""
        return {f"linear_{name}": getattr(self, name) for name in LINEAR_SIZES}

    @property
    def qk_dim(self) -> int:
        """The width of the query section, which is also the width of the key
        section."""
        return self.num_key_heads * self.key_head_dim

    @property
    def v_dim(self) -> int:
        """The width of the value section."""
        return self.num_value_heads * self.value_head_dim

    @property
    def value_heads_per_key_head(self) -> int:
        """The number of value heads that share one key head."""
        return self.num_value_heads // self.num_key_heads

    @property
    def heads(self) -> HeadSizes:
        """The head counts and head dims as :class:`HeadSizes`, which kernels and rules
        take."""
        return HeadSizes(
            self.num_key_heads,
            self.num_value_heads,
            self.key_head_dim,
            self.value_head_dim,
        )

    @property
    def layout(self) -> Layout:
        """The layout of a projection row; every subclass has its own."""
        raise NotImplementedError

    @property
    def state_shape(self) -> StateShape:
        return self.heads.state_shape

    def shard(self, ranks: int) -> Self:
        """The sizes on one of ``ranks`` tensor-parallel ranks; ``ranks`` must divide
        the heads."""
        counts = {
            "num_key_heads": self.num_key_heads,
            "num_value_heads": self.num_value_heads,
        }
        heads = f"{self.num_key_heads} key heads and {self.num_value_heads} value heads"
        require_shares(ranks, tuple(counts.values()), heads)
        return replace(self, **{name: count // ranks for name, count in counts.items()})

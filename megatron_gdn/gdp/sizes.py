"""The sizes of a Gated DeltaProduct layer and of one rank's share of the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from ..ops.delta_rule.base import HeadSizes
from ..ops.layout import Layout, Section, SizeError, require_shares, require_sizes
from ..ops.state_maps.state_map import StateShape


@dataclass(frozen=True, slots=True, kw_only=True)
class GDPDims:
    """Sizes of a Gated DeltaProduct layer, or of one tensor-parallel rank's share."""

    hidden_size: int  # the model's; never split
    num_heads: int  # each head has a state
    num_groups: int  # groups of neighbouring heads that use the same queries and keys
    head_dim: int  # columns of a state
    state_dim: int  # width of a query or key, rows of a state
    conv_kernel_dim: int
    num_householder: int  # updates of the state per token

    def __post_init__(self) -> None:
        """Raise an error unless all sizes are at least 1, and groups divide the
        heads."""
        require_sizes(self)
        if self.num_heads % self.num_groups:
            raise SizeError(
                f"num_heads={self.num_heads} is not a multiple of "
                f"num_groups={self.num_groups}; every group must serve the same number "
                "of heads. Change mamba_num_heads or mamba_num_groups."
            )

    @classmethod
    def from_config(
        cls, config: Any, d_model: int, d_conv: int, num_householder: int
    ) -> GDPDims:
        """The sizes in the ``mamba_*`` fields of a ``TransformerConfig``; the others
        are arguments of the mixer's constructor."""
        if config.mamba_num_heads is None:
            raise SizeError(
                "mamba_num_heads is None: a GatedDeltaProduct needs the number of its "
                "heads. Set --mamba-num-heads."
            )
        return cls(
            hidden_size=d_model,
            num_heads=config.mamba_num_heads,
            num_groups=config.mamba_num_groups,
            head_dim=config.mamba_head_dim,
            state_dim=config.mamba_state_dim,
            conv_kernel_dim=d_conv,
            num_householder=num_householder,
        )

    @property
    def d_inner(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def heads(self) -> HeadSizes:
        """The head counts and head dims, as the delta rule takes them."""
        return HeadSizes(self.num_groups, self.num_heads, self.state_dim, self.head_dim)

    @property
    def state_shape(self) -> StateShape:
        return self.heads.state_shape

    @property
    def layout(self) -> Layout:
        return gdp_layout(self.heads, self.num_householder)

    def shard(self, ranks: int) -> GDPDims:
        """The sizes on one of ``ranks`` tensor-parallel ranks. A group and its heads
        are on one rank."""
        held = f"{self.num_groups} groups of {self.num_heads} heads"
        require_shares(ranks, (self.num_groups,), held)
        heads = self.num_heads // ranks
        return replace(self, num_heads=heads, num_groups=self.num_groups // ranks)


@lru_cache(maxsize=64)
def gdp_layout(sizes: HeadSizes, steps: int) -> Layout:
    """The columns z | V0 V1 .. | K0 K1 .. | Q | b0 b1 .. | a.

    V, K and b have a section for each of the ``steps`` updates. A front reads all
    sections of V as one run, and so for K and for b.
    """
    state_dim = sizes.key_dim
    head_dim = sizes.value_dim
    sections = [Section("z", "head", head_dim)]
    for n in range(steps):
        sections.append(Section(f"V{n}", "head", head_dim, conv=True, run_name="V"))
    for n in range(steps):
        sections.append(Section(f"K{n}", "group", state_dim, conv=True, run_name="K"))
    sections.append(Section("Q", "group", state_dim, conv=True))
    for n in range(steps):
        sections.append(Section(f"b{n}", "head", 1, gates=True, run_name="b"))
    sections.append(Section("a", "head", 1, gates=True))
    counts = (("head", sizes.value_heads), ("group", sizes.key_heads))
    return Layout(tuple(sections), counts)

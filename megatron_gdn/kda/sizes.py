"""The sizes of a Kimi Delta Attention layer and of one rank's share of the layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from ..ops.delta_rule.base import HeadSizes, delta_layout
from ..ops.delta_rule.sizes import LinearDims
from ..ops.layout import Layout, Section
from ..ops.state_maps.state_map import StateShape


class KDARuleSizes(NamedTuple):
    """What decides which rules can run."""

    state: StateShape
    lower_bound: float | None  # of the log-decay


@dataclass(frozen=True, slots=True, kw_only=True)
class KDADims(LinearDims):
    """Sizes of a Kimi Delta Attention layer, or of one tensor-parallel rank's share of
    the layer.

    Each value head has gates; Kimi Linear has as many key heads as value heads.
    """

    # columns of the forget gate's narrow half; 0: f is a section of in_proj
    forget_rank: int
    # columns of the output gate's narrow half; 0: z is a section of in_proj
    output_rank: int

    may_be_zero: ClassVar[tuple[str, ...]] = ("forget_rank", "output_rank")
    also_shared: ClassVar[tuple[str, ...]] = may_be_zero

    @classmethod
    def of(
        cls, config: Any, forget_rank: int | None = None, output_rank: int | None = None
    ) -> KDADims:
        """The sizes in ``config``; a gate's low rank that is None becomes the value
        head's dim."""
        ranks = {"forget_rank": forget_rank, "output_rank": output_rank}
        V = config.linear_value_head_dim
        return cls.from_config(
            config, **{k: V if n is None else n for k, n in ranks.items()}
        )

    @property
    def layout(self) -> Layout:
        """The columns of a row, with both gates in full width."""
        return kda_layout(*self.heads)

    @property
    def in_proj_layout(self) -> Layout:
        """The columns of in_proj: :attr:`layout` with each gate's narrow half in place
        of the gate.

        Each tensor-parallel rank has its own columns of a narrow half, not a copy of
        all.
        """
        sections = [
            Section(f"{x.name}_a", f"{x.name}_rank", 1) if self.ranks.get(x.name) else x
            for x in self.layout.sections
        ]
        counts = [(f"{gate}_rank", rank) for gate, rank in self.ranks.items() if rank]
        return Layout(tuple(sections), (*self.layout.counts, *counts), gate="")

    @property
    def ranks(self) -> dict[str, int]:
        """For each gate's section, the number of columns of its narrow half; 0 if it
        has none."""
        return {"f": self.forget_rank, "z": self.output_rank}


@lru_cache(maxsize=64)
def kda_layout(
    key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> Layout:
    """Columns query | key | value | f | z | beta: f is the forget gate, z the output
    gate."""
    return delta_layout(
        HeadSizes(key_heads, value_heads, key_dim, value_dim),
        Section("f", "value", key_dim),
        Section("z", "value", value_dim),
        Section("beta", "value", 1),
    )

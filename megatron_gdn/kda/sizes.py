"""The sizes of a Kimi Delta Attention layer and of one rank's share of the layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, ClassVar, NamedTuple

from ..ops.delta_rule.base import HeadSizes, delta_layout
from ..ops.delta_rule.sizes import LinearDims
from ..ops.layout import Layout, Section
from ..ops.state_maps.state_map import StateShape


class KDARuleSizes(NamedTuple):
    """What decides which rules can run."""

    state: StateShape
    lower_bound: float | None  # the least log-decay; None: it has no bound


@dataclass(frozen=True, slots=True, kw_only=True)
class KDADims(LinearDims):
    """Sizes of a Kimi Delta Attention layer, or of one tensor-parallel rank's share of
    the layer.

    Each value head has gates; Kimi Linear has as many key heads as value heads. Every
    tensor-parallel rank has all columns of a gate's narrow half.
    """

    # columns of the forget gate's narrow half, f_a_proj; 0: the gate has full width
    forget_rank: int
    # columns of the output gate's narrow half, g_a_proj; 0: the gate has full width
    output_rank: int

    may_be_zero: ClassVar[tuple[str, ...]] = ("forget_rank", "output_rank")

    @classmethod
    def of(
        cls, config: Any, forget_rank: int | None = None, output_rank: int | None = None
    ) -> KDADims:
        """The sizes in ``config``; a rank that is None is that of the config, whose
        fields are ``kda_f_lora_rank`` and ``kda_gate_lora_rank``, or else 0."""
        ranks = {"forget_rank": forget_rank, "output_rank": output_rank}
        for name, field in RANK_FIELDS.items():
            if ranks[name] is None:
                ranks[name] = getattr(config, field, None)
        known = {name: rank or 0 for name, rank in ranks.items()}
        return cls.from_config(config, **known)

    @property
    def layout(self) -> Layout:
        """The columns of a row, with both gates in full width."""
        return kda_layout(self.heads)

    @property
    def gates_in_in_proj(self) -> bool:
        """Whether in_proj makes both gates; if one has a narrow half, it makes none."""
        return not self.forget_rank and not self.output_rank

    @property
    def in_proj_layout(self) -> Layout:
        """The columns of in_proj: query | key | value, and g | gate if both gates have
        full width."""
        made = _OF_IN_PROJ if self.gates_in_in_proj else _OF_IN_PROJ[:3]
        whole = self.layout
        sections = [section for section in whole.sections if section.name in made]
        return Layout(tuple(sections), whole.counts, gate="")


# The fields of newer Megatrons' configs with the two ranks.
RANK_FIELDS = {
    "forget_rank": "kda_f_lora_rank",
    "output_rank": "kda_gate_lora_rank",
}
_OF_IN_PROJ = ("query", "key", "value", "g", "gate")


@lru_cache(maxsize=64)
def kda_layout(heads: HeadSizes) -> Layout:
    """Columns query | key | value | g | gate | beta: g is the forget gate, gate the
    output gate."""
    made = delta_layout(
        heads,
        Section("g", "value", heads.key_dim),
        Section("gate", "value", heads.value_dim),
        Section("beta", "value", 1, gates=True),
    )
    return replace(made, gate="gate")

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
    """The state's shape and the log-decay's bound, by which a rule says whether it can
    run."""

    state_shape: StateShape
    lower_bound: float | None  # the least log-decay; None: there is no bound


@dataclass(frozen=True, slots=True, kw_only=True)
class KDADims(LinearDims):
    """Sizes of a Kimi Delta Attention layer, or of one tensor-parallel rank's share of
    the layer.

    Each value head has gates; Kimi Linear has as many key heads as value heads. Every
    tensor-parallel rank has the same ``forget_rank`` and ``output_rank``.
    """

    # the rank of the forget gate's projection (columns of f_a_proj); 0: full rank
    forget_rank: int
    # the rank of the output gate's projection (columns of g_a_proj); 0: full rank
    output_rank: int

    may_be_zero: ClassVar[tuple[str, ...]] = ("forget_rank", "output_rank")

    @classmethod
    def of(
        cls, config: Any, forget_rank: int | None = None, output_rank: int | None = None
    ) -> KDADims:
        """The sizes in a ``TransformerConfig``. If ``forget_rank`` is None, it is the
        config's ``kda_f_lora_rank``; if ``output_rank`` is None,
        ``kda_gate_lora_rank``; 0 if the config lacks the field."""
        ranks = {"forget_rank": forget_rank, "output_rank": output_rank}
        for name, field in CONFIG_FIELD_OF_LOW_RANK.items():
            if ranks[name] is None:
                ranks[name] = getattr(config, field, None)
        ranks_or_zero = {name: rank or 0 for name, rank in ranks.items()}
        return cls.from_config(config, **ranks_or_zero)

    @property
    def layout(self) -> Layout:
        """The columns of a row, with both gates in full width."""
        return kda_layout(self.heads)

    @property
    def gates_in_in_proj(self) -> bool:
        """Whether in_proj makes both gates: neither has a low rank. Otherwise in_proj
        makes no gate."""
        return not self.forget_rank and not self.output_rank

    @property
    def in_proj_layout(self) -> Layout:
        """The columns of in_proj: query | key | value, and g | gate if both gates have
        full width."""
        names = ("query", "key", "value")
        if self.gates_in_in_proj:
            names += ("g", "gate")
        layout = self.layout
        sections = [section for section in layout.sections if section.name in names]
        # no output gate: a readout finds the gate in a full row, by `layout`
        return Layout(tuple(sections), layout.head_counts, output_gate="")


# For each of our two low ranks (of matrices, not of processes), the field of newer
# Megatrons' configs that has it.
CONFIG_FIELD_OF_LOW_RANK = {
    "forget_rank": "kda_f_lora_rank",
    "output_rank": "kda_gate_lora_rank",
}


@lru_cache(maxsize=64)
def kda_layout(heads: HeadSizes) -> Layout:
    """The columns query | key | value | g | gate | beta: g is the forget gate, gate the
    output gate."""
    layout = delta_layout(
        heads,
        Section("g", "value", heads.key_dim),
        Section("gate", "value", heads.value_dim),
        Section("beta", "value", 1, gates=True),
    )
    return replace(layout, output_gate="gate")

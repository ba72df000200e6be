"""The token recurrence as a rule, for the few tokens that a decode step has."""

from __future__ import annotations

import torch
from torch import Tensor

from ..documents import Documents
from ..rule import RuleOutput, Saved
from ..state_maps.state_map import StateMap
from .base import RuleInputs
from .recurrent import recurrent_gated_delta_rule


class RecurrentRule:
    """The definition itself, in plain torch: elementwise products and sums over one state's rows.

    A token's bits depend on its inputs and on the state before it alone, not on how many tokens a
    call has. It has no backward.
    """

    name = "recurrent"
    batch_invariant = True
    operand_dtype = None
    reads_again: frozenset[str] = frozenset()

    def why_not_heads(self, heads: int) -> None:
        """Any number of them can run."""

    def begin(self, inputs: RuleInputs, documents: Documents | None) -> RecurrentForward:
        return RecurrentForward(inputs, documents)

    def begin_backward(self, *args):
        raise NotImplementedError(
            "the token recurrence is for generation and has no backward; train with the rule that "
            "resolve_rule gives."
        )


class RecurrentForward:
    def __init__(self, inputs: RuleInputs, documents: Documents | None) -> None:
        self._inputs, self._documents = inputs, documents

    def state_map(self) -> StateMap:
        raise NotImplementedError("a step has no state map; use the rule that resolve_rule gives.")

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """``keep`` is of no meaning: there is no backward."""
        o, last = recurrent_gated_delta_rule(
            *self._inputs, initial, final, cu_seqlens=self._documents
        )
        return RuleOutput(o, last, Saved())

"""Token recurrences as rules, for the few tokens that a decode step has.

Legend: B batch, S seq, H heads with a state, K rows of a state, V columns.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from ..documents import Documents
from ..state_maps.state_map import StateMap
from .base import RuleOutput, Saved


class TokenRule:
    """The definition of a recurrence, one token after the other, as a :class:`.base.Rule`.

    A token's bits depend only on its inputs and on the state before it, not on how many tokens a
    call has. The rule has no backward and no state maps.
    """

    name = "recurrent"
    batch_invariant = True
    operand_dtype = None
    reads_again: frozenset[str] = frozenset()

    def tokens(
        self, inputs: Any, documents: Documents | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Output ``[B, S, H, V]`` and the states after it, ``[N, H, K, V]``."""
        raise NotImplementedError

    def why_not_heads(self, heads: int) -> None:
        """None: the rule can run any number of heads."""

    def begin(self, inputs: Any, documents: Documents | None) -> TokenForward:
        return TokenForward(self, inputs, documents)

    def begin_backward(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(
            "the token recurrence is for generation and has no backward; train with the layer's "
            "own rule."
        )


class TokenForward:
    def __init__(self, rule: TokenRule, inputs: Any, documents: Documents | None) -> None:
        self._rule, self._inputs, self._documents = rule, inputs, documents

    def state_map(self) -> StateMap:
        raise NotImplementedError("a decode step has no state map; use the layer's own rule.")

    @torch.no_grad()
    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """``keep`` has no effect: there is no backward."""
        o, last = self._rule.tokens(self._inputs, self._documents, initial)
        return RuleOutput(o, last if final else None, Saved())

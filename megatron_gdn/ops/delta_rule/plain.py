"""The gated delta rule in plain torch: any device, dtype and head dim; repeatable bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor

from ..documents import Documents
from ..rules.base import (
    Rule,
    RuleBackward,
    RuleOutput,
    Saved,
    in_one_row,
    in_rows,
    inputs_in_one_row,
)
from ..rules.chunk_table import CHUNK, lengths_of_sequences
from ..state_maps.state_map import StateMap
from ..static_documents import StaticDocuments
from .base import RuleGrads, RuleInputs
from .chunk import ChunkedRule
from .chunk_math import Chunks
from .static_chunks import chunks_of


class PlainRule(Rule):
    """The chunk form in plain torch (:mod:`.chunk`) as a rule: ``backend="reference"``.

    Attributes:
        chunks: as of :class:`.chunk.ChunkedRule`.
    """

    name = "reference"
    batch_invariant = True
    reads_again = frozenset(RuleInputs._fields)
    chunks: ClassVar[Callable[..., Chunks]] = staticmethod(chunks_of)

    def __init__(self, aligned: bool = False) -> None:
        self.aligned = aligned

    def begin(self, inputs: RuleInputs, documents: Documents | None) -> PlainForward:
        return PlainForward(self, inputs, documents)

    def begin_backward(
        self, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None
    ) -> PlainBackward:
        return PlainBackward(self, d_o, inputs, documents)


class _Pass:
    def __init__(
        self, rule: PlainRule, inputs: RuleInputs, documents: Documents | None, aligned: bool
    ) -> None:
        self._rows = inputs.v.shape[:2]
        self._inputs: RuleInputs = inputs if documents is None else inputs_in_one_row(inputs)
        if isinstance(documents, StaticDocuments):
            lengths = documents
        else:
            lengths = lengths_of_sequences(self._rows, documents)
        self._rule = ChunkedRule(lengths, CHUNK, inputs.k.shape[-1] ** -0.5, aligned, rule.chunks)

    def _state(self, state: Tensor | None) -> Tensor:
        """``[N, H, K, V]``, or None for zero, as ``[N, G, R, K, V]``."""
        zero = self._rule.zero_state(self._inputs.k, self._inputs.v)
        return zero if state is None else state.to(zero.dtype).reshape(zero.shape)


class PlainForward(_Pass):
    def __init__(self, rule: PlainRule, inputs: RuleInputs, documents: Documents | None) -> None:
        super().__init__(rule, inputs, documents, rule.aligned)

    def state_map(self) -> StateMap:
        """Final states with K more value columns, whose values are 0 and whose initial state is I.

        The first V columns are ``local``, the others ``through``.
        """
        inputs, rule = self._inputs, self._rule
        v, (K, V) = inputs.v, (inputs.k.shape[3], inputs.v.shape[3])
        wide_v = torch.cat([v, v.new_zeros(*v.shape[:3], K)], dim=-1)
        state = rule.zero_state(inputs.k, wide_v)
        state[..., V:].diagonal(dim1=-2, dim2=-1).fill_(1)
        _, final = rule.forward(*inputs._replace(v=wide_v), state, output=False)
        return StateMap(*final.flatten(1, 2).split([V, K], dim=-1))

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        o, last = self._rule.forward(*self._inputs, self._state(initial), final)
        return RuleOutput(in_rows(o, self._rows), last.flatten(1, 2) if final else None, Saved())


class PlainBackward(_Pass, RuleBackward):
    def __init__(
        self, rule: PlainRule, d_o: Tensor, inputs: RuleInputs, documents: Documents | None
    ) -> None:
        super().__init__(rule, inputs, documents, aligned=False)
        self._d_o = d_o if documents is None else in_one_row(d_o)

    def d_initial(self) -> Tensor:
        return self._rule.state_gradient(self._d_o, self._state(None), *self._inputs).flatten(1, 2)

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        state, d_state = self._state(initial), self._state(d_final)
        *grads, _ = self._rule.backward(self._d_o, d_state, *self._inputs, state)
        return RuleGrads(*(in_rows(x, self._rows) for x in grads))

"""The gated delta rule in plain torch: any device, dtype and head dim; repeatable bit for bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..rules.base import Rule, RuleBackward, RuleForward, RuleOutput, Saved, in_rows
from ..rules.chunk_table import CHUNK, lengths_of_sequences
from ..state_maps.state_map import StateMap
from ..static_documents import StaticDocuments
from .base import RuleGrads, RuleInputs
from .chunk import ChunkedRule, StaticChunks
from .chunk_math import Chunks


def _chunked(stage: Any, aligned: bool = False) -> ChunkedRule:
    """The chunk form over the sequences of a stage."""
    documents = stage._documents
    lengths = documents
    if not isinstance(documents, StaticDocuments):
        lengths = lengths_of_sequences(stage._rows, documents)
    K = stage._inputs.k.shape[-1]
    return ChunkedRule(lengths, CHUNK, K**-0.5, aligned, stage._rule.kinds)


def _state(chunked: ChunkedRule, inputs: RuleInputs, state: Tensor | None) -> Tensor:
    """``[N, H, K, V]``, or None for zero, as ``[N, G, R, K, V]``."""
    zero = chunked.zero_state(inputs.k, inputs.v)
    return zero if state is None else state.to(zero.dtype).reshape(zero.shape)


class PlainForward(RuleForward):
    def state_map(self) -> StateMap:
        """Final states with K more value columns, whose values are 0 and whose initial state is I.

        The first V columns are ``local``, the others ``through``.
        """
        inputs, chunked = self._inputs, _chunked(self, self._rule.aligned)
        v, (K, V) = inputs.v, (inputs.k.shape[3], inputs.v.shape[3])
        wide_v = torch.cat([v, v.new_zeros(*v.shape[:3], K)], dim=-1)
        state = chunked.zero_state(inputs.k, wide_v)
        state[..., V:].diagonal(dim1=-2, dim2=-1).fill_(1)
        _, final = chunked.forward(*inputs._replace(v=wide_v), state=state, output=False)
        return StateMap(*final.flatten(1, 2).split([V, K], dim=-1))

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        inputs, chunked = self._inputs, _chunked(self, self._rule.aligned)
        o, last = chunked.forward(*inputs, state=_state(chunked, inputs, initial), last=final)
        return RuleOutput(in_rows(o, self._rows), last.flatten(1, 2) if final else None, Saved())


class PlainBackward(RuleBackward):
    def d_initial(self) -> Tensor:
        inputs, chunked = self._inputs, _chunked(self)
        nothing = _state(chunked, inputs, None)
        return chunked.state_gradient(self._d_o, nothing, *inputs).flatten(1, 2)

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        inputs, chunked = self._inputs, _chunked(self)
        state, d_state = (_state(chunked, inputs, x) for x in (initial, d_final))
        *grads, _ = chunked.backward(self._d_o, d_state, *inputs, state=state)
        return RuleGrads(*(in_rows(x, self._rows) for x in grads))


class PlainRule(Rule):
    """The chunk form in plain torch (:mod:`.chunk`) as a rule: ``backend="reference"``."""

    name = "reference"
    batch_invariant = True
    reads_again = frozenset(RuleInputs._fields)
    kinds = Chunks, StaticChunks
    forward, backward = PlainForward, PlainBackward

    def __init__(self, aligned: bool = False) -> None:
        self.aligned = aligned

"""The plain-torch rule as a core: any device, any dtype, any head dim; repeatable bit for bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...chunk import ChunkedRule
from ...documents import Documents
from .base import RuleGrads, RuleInputs, Transition

CHUNK = 64


class _Sequences(NamedTuple):
    """The rule over the sequences of a batch, and states in and out of the rule's own order.

    The rule has states ``[N, G, R, K, V]``, longest sequence first; a core's are ``[N, H, K, V]``.
    """

    rule: ChunkedRule

    @classmethod
    def of(cls, k: Tensor, documents: Documents | None) -> _Sequences:
        rows, tokens = k.shape[:2]
        lengths = (tokens,) * rows
        if documents is not None:
            lengths = tuple(n for n in documents.lengths if n) or (0,)
        return cls(ChunkedRule.over(lengths, CHUNK, k.shape[-1] ** -0.5, k.device))

    def state_in(self, state: Tensor | None, k: Tensor, v: Tensor) -> Tensor:
        zero = self.rule.zero_state(k, v)
        if state is None:
            return zero
        return state.to(zero.dtype).reshape(zero.shape).index_select(0, self.rule.table.order)

    def state_out(self, state: Tensor) -> Tensor:
        place = torch.argsort(self.rule.table.order)
        return state.index_select(0, place).flatten(1, 2)


class TorchCore:
    name = "reference"

    def transition(self, inputs: RuleInputs, documents: Documents | None) -> Transition:
        """The rule on K more value columns that write nothing and start as the identity."""
        run = _Sequences.of(inputs.k, documents)
        v, (K, V) = inputs.v, (inputs.k.shape[3], inputs.v.shape[3])
        wide_v = torch.cat([v, v.new_zeros(*v.shape[:3], K)], dim=-1)
        state = run.rule.zero_state(inputs.k, wide_v)
        state[..., V:].diagonal(dim1=-2, dim2=-1).fill_(1)
        _, final = run.rule.forward(*inputs._replace(v=wide_v), state)
        local, through = run.state_out(final).split([V, K], dim=-1)
        return Transition(local, through, None)

    def forward(
        self,
        inputs: RuleInputs,
        documents: Documents | None,
        keep: bool,
        initial: Tensor | None = None,
        work: object = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]:
        run = _Sequences.of(inputs.k, documents)
        o, _ = run.rule.forward(*inputs, run.state_in(initial, inputs.k, inputs.v))
        return o, (inputs.g,), None

    def d_initial(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> tuple[Tensor, None]:
        run = _Sequences.of(inputs.k, documents)
        *_, d_state = self._backward(run, d_o, inputs, saved, None, None)
        return run.state_out(d_state), None

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
        initial: Tensor | None = None,
        d_final: Tensor | None = None,
        work: object = None,
    ) -> RuleGrads:
        run = _Sequences.of(inputs.k, documents)
        *grads, _ = self._backward(run, d_o, inputs, saved, initial, d_final)
        return RuleGrads(*grads)

    @staticmethod
    def _backward(run: _Sequences, d_o, inputs, saved, initial, d_final) -> tuple[Tensor, ...]:
        (g,) = saved
        state, d_state = (run.state_in(x, inputs.k, inputs.v) for x in (initial, d_final))
        return run.rule.backward(d_o, d_state, *inputs._replace(g=g), state)

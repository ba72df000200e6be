"""The plain-torch rule as a core: any device, any dtype, any head dim; repeatable bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ..documents import Documents
from .base import RuleGrads, RuleInputs, Transition
from .chunk import ChunkedRule

CHUNK = 64


class TorchCore:
    name = "reference"
    batch_invariant = True
    operand_dtype = None

    @staticmethod
    def _rule(k: Tensor, documents: Documents | None) -> ChunkedRule:
        rows, tokens = k.shape[:2]
        lengths = (tokens,) * rows
        if documents is not None:
            lengths = tuple(n for n in documents.lengths if n) or (0,)
        return ChunkedRule(lengths, CHUNK, k.shape[-1] ** -0.5)

    def transition(self, inputs: RuleInputs, documents: Documents | None) -> Transition:
        """The rule on K more value columns that write nothing and start as the identity."""
        rule = self._rule(inputs.k, documents)
        v, (K, V) = inputs.v, (inputs.k.shape[3], inputs.v.shape[3])
        wide_v = torch.cat([v, v.new_zeros(*v.shape[:3], K)], dim=-1)
        state = rule.zero_state(inputs.k, wide_v)
        state[..., V:].diagonal(dim1=-2, dim2=-1).fill_(1)
        final = rule.final_states(*inputs._replace(v=wide_v), state)
        local, through = final.flatten(1, 2).split([V, K], dim=-1)
        return Transition(local, through, None)

    def forward(
        self,
        inputs: RuleInputs,
        documents: Documents | None,
        keep: bool,
        initial: Tensor | None = None,
        work: object = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]:
        rule = self._rule(inputs.k, documents)
        o, _ = rule.forward(*inputs, _state(rule, inputs, initial))
        return o, (inputs.g,), None

    def d_initial(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> tuple[Tensor, None]:
        (g,) = saved
        rule = self._rule(inputs.k, documents)
        nothing = rule.zero_state(inputs.k, inputs.v)
        return rule.state_gradient(d_o, nothing, *inputs._replace(g=g)).flatten(1, 2), None

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
        (g,) = saved
        rule = self._rule(inputs.k, documents)
        state, d_state = (_state(rule, inputs, x) for x in (initial, d_final))
        *grads, _ = rule.backward(d_o, d_state, *inputs._replace(g=g), state)
        return RuleGrads(*grads)


def _state(rule: ChunkedRule, inputs: RuleInputs, state: Tensor | None) -> Tensor:
    """``[N, H, K, V]``, or nothing, as the rule has it: ``[N, G, R, K, V]``."""
    zero = rule.zero_state(inputs.k, inputs.v)
    return zero if state is None else state.to(zero.dtype).reshape(zero.shape)

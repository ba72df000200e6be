"""The plain-torch rule as a core: any device, any dtype, any head dim; repeatable bit for bit."""

from __future__ import annotations

import torch
from torch import Tensor

from ...chunk import ChunkedRule
from ...documents import Documents
from .base import RuleGrads, RuleInputs

CHUNK = 64


class TorchCore:
    name = "reference"

    @staticmethod
    def _rule(k: Tensor, documents: Documents | None) -> ChunkedRule:
        rows, tokens = k.shape[:2]
        lengths = (tokens,) * rows if documents is None else documents.lengths
        return ChunkedRule(lengths, CHUNK, k.shape[-1] ** -0.5)

    def forward(
        self, inputs: RuleInputs, documents: Documents | None, keep: bool
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]:
        rule = self._rule(inputs.k, documents)
        o, _ = rule.forward(*inputs, rule.zero_state(inputs.k, inputs.v))
        return o, (inputs.g,), None

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> RuleGrads:
        (g,) = saved
        rule = self._rule(inputs.k, documents)
        state = rule.zero_state(inputs.k, inputs.v)
        d_final = torch.zeros_like(state)
        *grads, _ = rule.backward(d_o, d_final, *inputs._replace(g=g), state)
        return RuleGrads(*grads)

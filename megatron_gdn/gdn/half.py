"""Operands of the delta rule in fp16 where the layer's dtype is bf16.

The GPU rules multiply on tensor cores: operands of 16 bits, sums in fp32. An operand that is itself
a product of the chunk (the inverse, gated scores, written values, states and their gradients) is
rounded to the dtype of q, k and v. bf16 keeps 8 bits, fp16 keeps 11, at the same speed. But fp16
has full precision only from 2^-14 to 65504:

- q and k have unit length. v is the output of a SiLU, the state is a mean of such values, and o is
  a fraction of the state. They are not scaled. With beta above 1 the state is no mean: values of
  alternating sign may let it grow, by less than twice the largest value a token. Values beyond
  65504 become inf, and the output and gradients inf or NaN; no value is clamped. Values below 2^-14
  lose bits; those below 2^-17 have fewer than in bf16.
- Gradients may have any size. So d_o is multiplied by a power of two. The rule's backward is linear
  in d_o and returns gradients multiplied by the same power, and the front multiplies them by the
  inverse, in fp32 (:class:`..ops.delta_rule.base.RuleGrads`). Both products are exact.

The power is chosen for each key head, on the device. It brings the largest |d_o| of the key head's
value heads below 1. The range above 1 is left for sums. With g <= 0, beta <= 2 and unit keys no
step of the backward recurrence makes the state's gradient longer. So over T tokens one of its
columns is at most T / sqrt(K) long: 2^13.5 for K = 128 and T = 2^17 tokens that all have the same,
largest gradient. Sums over V of its products with written values, in dk and dbeta, grow further.
Example: 8192 tokens of the largest gradient; gradients and values have one sign in all of V; the
head neither forgets nor writes (beta = 5e-4). The largest sum came to 2^15. Gradients that agree
in a hundredth of their largest leave 2^6 more. Sums beyond fp16's range become inf, and that is
seen.

An element under 2^-13 of the largest loses bits, and one under 2^-16 has fewer than in bf16; the
error there is at most 2^-24 of the largest. Where one token in 500 has gradients 2^10 times the
others', dq, dk, dv and dbeta as a whole still have 0.97 to 1.05 times the plain rule's error, and
dg at most 1.15 times, in simulation (``benchmarks/rounding.py --loud 10``).

In state passing the gradient of the final states is held below 2^5 too (a column below 2^8.5): it
may come from tokens of other ranks whose gradients are far larger than any here.

Legend: B batch, S seq, G key heads, H value heads, K key dim, V value dim, N sequences.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleGrads, RuleInputs
from ..ops.documents import Documents
from ..ops.layout import Layout
from ..ops.rules import base as again
from ..ops.rules.base import PreparedRule, Rule, RuleForward, RuleOutput, Saved, ScalableBackward
from . import half_torch

LARGEST_D_O = 0  # log2, after scaling
LARGEST_D_FINAL = 5


class HalfOperands(Rule):
    """A rule on fp16 operands in a layer of another dtype; see the top of this file.

    q, k and v come in fp16 and o leaves in fp16. d_o comes in the layer's dtype. States and their
    gradients are unscaled here; only the wrapped rule sees scaled ones.

    Args:
        rule: must not be batch invariant: the power of two depends on all documents of a batch,
            and the power decides which small numbers lose bits.
    """

    operand_dtype = torch.float16
    batch_invariant = False

    def __init__(self, rule: Rule) -> None:
        assert not rule.batch_invariant
        self.name, self.reads_again, self._rule = rule.name, rule.reads_again, rule

    def prepare(self, layout: Layout, dtype: torch.dtype, states: bool) -> None:
        if isinstance(self._rule, PreparedRule):
            self._rule.prepare(layout, self.operand_dtype, states)

    def why_not_heads(self, heads: int) -> str | None:
        return self._rule.why_not_heads(heads)

    def begin(self, inputs: RuleInputs, documents: Documents | None) -> RuleForward:
        return self._rule.begin(inputs, documents)

    def kept_to_run_again(self, saved: Saved) -> Saved:
        return again.kept_to_run_again(self._rule, saved)

    def run_again(
        self, inputs: RuleInputs, kept: Saved, documents: Documents | None, initial: Tensor | None
    ) -> RuleOutput:
        return again.run_again(self._rule, inputs, kept, documents, initial)

    def begin_backward(
        self, d_o: Tensor, inputs: RuleInputs, saved: Saved, documents: Documents | None
    ) -> HalfBackward:
        return HalfBackward(self._rule, d_o, inputs, saved, documents)


class HalfBackward:
    """Scales d_o and d_final for the wrapped rule's backward, and scales d_initial back."""

    def __init__(
        self,
        rule: Rule,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: Saved,
        documents: Documents | None,
    ) -> None:
        self._key_heads = inputs.k.shape[2]
        self._half, self._up, self._down = _kernels(d_o).to_half(d_o, self._key_heads, LARGEST_D_O)
        del d_o  # frees its memory if the caller keeps no reference
        begun = rule.begin_backward(self._half, inputs, saved, documents)
        self._backward = cast(ScalableBackward, begun)

    def d_initial(self) -> Tensor:
        return self._backward.d_initial() * _of_states(self._down)

    def run(self, initial: Tensor | None = None, d_final: Tensor | None = None) -> RuleGrads:
        if d_final is not None:
            ratio, self._up, self._down = _kernels(self._half).lower(
                self._half, self._up, d_final, self._key_heads, LARGEST_D_FINAL
            )
            self._backward.d_o_was_scaled(_of_states(ratio))
            d_final = d_final * _of_states(self._up)
        grads = self._backward.run(initial, d_final)
        return RuleGrads(grads.q, grads.k, grads.v, grads.g, grads.beta, self._down)


def _kernels(x: Tensor) -> ModuleType:
    return _triton_kernels() if x.is_cuda and x.dtype != torch.float64 else half_torch


@cache
def _triton_kernels() -> ModuleType:
    from . import half_kernels

    return half_kernels


def _of_states(x_H: Tensor) -> Tensor:
    return x_H.view(-1, 1, 1)

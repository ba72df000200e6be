"""Rounds the operands of the delta rule's products to fp16 in a bf16 layer
(docs/precision.md).

Operands of a chunk's products are rounded to the dtype of q, k and v. bf16 has 8 bits.
fp16 has 11 bits at the same speed, but only for numbers of 2^-14 to 65504:

- q, k, v and states are not scaled: q and k have unit length, v is the output of a
  SiLU, and a state is a weighted mean of values v.
- Gradients may have any size. So d_o is multiplied by a power of two for each key head,
  and the front multiplies the rule's gradients by the inverse of this power
  (`RuleGrads.factor`). Both steps are exact.

This power of two brings the largest |d_o| of the key head's value heads below 1. This
leaves room for sums: with g <= 0, beta <= 2 and unit keys, a column of the state's
gradient has a norm up to T / sqrt(K). This is 2^13.5 for K = 128 and T = 2^17 tokens. A
value beyond 65504 becomes inf, a visible error.

In context parallelism the power of two also brings gradients of final states below 2^5,
because tokens of other ranks may have far larger gradients. All documents of a rank
have the same powers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import torch
from torch import Tensor

from ..ops.delta_rule.base import RuleGrads, RuleInputs
from ..ops.documents import Documents
from ..ops.rules.base import Rule, RuleBackward, SavedForBackward
from . import half_torch

LOG2_BOUND_OF_D_O = 0  # after scaling, |d_o| is below 2^0
LOG2_BOUND_OF_D_FINAL = 5  # after scaling, |d_final| is below 2^5


class HalfBackward(RuleBackward):
    """Scales d_o and d_final for the backward of the wrapped rule, and scales d_initial
    back."""

    def __init__(
        self,
        rule: HalfOperands,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: SavedForBackward,
        documents: Documents | None,
    ) -> None:
        """Scale ``d_o [B, S, H, V]`` to fp16, and begin the backward of the wrapped
        rule with it."""
        self._key_heads = inputs.k.shape[2]
        # d_o times the powers, in fp16; the powers and the inverse powers, fp32 [H]
        scaling = _scaling_module_for(d_o)
        self._scaled_d_o, self._powers, self._inverse_powers = scaling.to_half(
            d_o, self._key_heads, LOG2_BOUND_OF_D_O
        )
        self._backward = rule.rule.begin_backward(
            self._scaled_d_o, inputs, saved, documents
        )

    def d_initial(self) -> Tensor:
        return self._backward.d_initial() * _as_state_factor(self._inverse_powers)

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> RuleGrads:
        """The gradients of the inputs, times the powers of two; ``factor`` has the
        inverse powers ``[H]``. ``initial`` are the forward's initial states.

        If ``d_final`` times the powers is 2^5 or more, the powers are lowered, and
        ``d_o`` is scaled again in place.
        """
        if d_final is not None:
            scaling = _scaling_module_for(self._scaled_d_o)
            ratio, self._powers, self._inverse_powers = scaling.lower_powers(
                self._scaled_d_o,
                self._powers,
                d_final,
                self._key_heads,
                LOG2_BOUND_OF_D_FINAL,
            )
            # the wrapped backward may have gradients of states from the old d_o
            self._backward.scale_with_d_o(_as_state_factor(ratio))
            d_final = d_final * _as_state_factor(self._powers)
        grads = self._backward.run(initial, d_final)
        return RuleGrads(
            grads.q, grads.k, grads.v, grads.g, grads.beta, self._inverse_powers
        )


class HalfOperands(Rule):
    """Wraps a rule, which then gets fp16 operands in a bf16 layer.

    The front makes the operands, since it reads :attr:`operand_dtype`. This rule is not
    batch-invariant: the powers of two depend on all documents of a batch.
    """

    operand_dtype = torch.float16
    backward_class = HalfBackward

    def __init__(self, rule: Rule) -> None:
        """Wrap ``rule``, whose forward runs unchanged; only the backward scales."""
        assert not rule.batch_invariant
        self.name = rule.name
        self.backward_reads = rule.backward_reads
        self.rule = rule
        self.begin = rule.begin
        self.why_not_heads = rule.why_not_heads
        self.kept_to_recompute = rule.kept_to_recompute
        self.recompute = rule.recompute

    def wrapped_by(self, wrapper: Callable[[Rule], Rule]) -> Rule:
        """This rule with its inner rule replaced by ``wrapper(self.rule)``."""
        return HalfOperands(wrapper(self.rule))


def _scaling_module_for(x: Tensor) -> ModuleType:
    """The module whose functions ``to_half`` and ``lower_powers`` scale ``x``: Triton
    kernels, or plain torch on a CPU and for fp64."""
    if not x.is_cuda or x.dtype == torch.float64:
        return half_torch
    from . import half_kernels

    return half_kernels


def _as_state_factor(x_H: Tensor) -> Tensor:
    """Reshape ``x_H``, a factor per value head, to multiply states ``[N, H, K, V]``."""
    return x_H.view(-1, 1, 1)

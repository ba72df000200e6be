"""Operands of the delta rule in fp16 where the layer's dtype is bf16.

The GPU cores multiply on tensor cores, in fp32 from operands of 16 bits: whatever goes from one
product of a chunk into the next (the inverse, gated scores, written values, states and their
gradients) is rounded to the dtype of q, k and v. bf16 keeps 8 bits of it, fp16 11, at the same
speed. fp16's price is its range, 2^-14 to 65504 at full precision, and this file pays it:

- q and k have unit length; v is the output of a SiLU, like the state a mean of such values, and o
  a fraction of the state. They are used as they are. Beyond 65504 they are inf, and the output and
  the gradients inf or NaN: nothing saturates. Values below 2^-14 lose bits, those below 2^-17 have
  fewer than in bf16.
- Gradients may have any size, so d_o is multiplied by a power of two, and the rule's backward,
  which is linear in it, returns gradients so much larger. Whoever reads them multiplies with the
  inverse, in fp32 (:class:`.base.RuleGrads`). Both are exact.

The power is chosen for each key head, from the largest |d_o| of its value heads, on the device, and
brings that below 1. Above, there is room for sums. With g <= 0, beta <= 1 and unit keys no step of
the backward recurrence makes the state's gradient longer, so over T tokens a column of it is at
most T / sqrt(K) long: 2^13.5 for K = 128 and T = 2^17 tokens of the largest gradient, all alike.
What grows further are sums over V of its products with written values, in dk and dbeta. Of 8192
tokens of the largest gradient, alike in sign in all of V as the values are, in a head that neither
forgets nor writes (beta = 5e-4), the largest came to 2^15; gradients that agree in a hundredth of
their largest leave 2^6 more. Beyond, inf comes out, and is seen.

Below, an element under 2^-13 of the largest loses bits and one under 2^-16 has fewer than in bf16;
the error there is at most 2^-24 of the largest. Where one token in 500 has gradients 2^10 times the
others', dq, dk, dv and dbeta as a whole still have 0.97 to 1.05 times the plain rule's error, and
dg at most 1.15 times, in simulation (``benchmarks/rounding.py --loud 10``).

A gradient of final states, given in state passing, is held below 2^5 as well (a column of 2^8.5):
it may come from tokens of other ranks whose gradients are far larger than any here.

Legend: B batch, S seq, G key heads, H value heads, K key dim, V value dim, N sequences.
"""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ..documents import Documents
from . import half_torch
from .base import RuleGrads, RuleInputs, StatePassing, Transition

LARGEST_D_O = 0  # log2, after scaling
LARGEST_D_FINAL = 5


class Scaled(NamedTuple):
    """d_o in fp16, from the gradient of initial states to the backward."""

    half: Tensor
    up: Tensor  # [H] fp32
    down: Tensor  # [H] fp32
    work: Tensor | None = None  # the wrapped core's, of `half`


class HalfOperands:
    """A core that works on fp16, in a layer of another dtype; see the top of this file.

    q, k and v come in fp16 and o leaves in fp16. d_o comes in the layer's dtype. States and their
    gradients are in true units on this side of the wrapped core.

    Args:
        core: not batch invariant: the power of two depends on all documents of a batch, and which
            small numbers lose bits depends on it.
    """

    operand_dtype = torch.float16
    batch_invariant = False

    def __init__(self, core: StatePassing) -> None:
        assert not core.batch_invariant
        self.name, self._core = core.name, core

    def transition(self, inputs: RuleInputs, documents: Documents | None) -> Transition:
        return self._core.transition(inputs, documents)

    def forward(
        self,
        inputs: RuleInputs,
        documents: Documents | None,
        keep: bool,
        initial: Tensor | None = None,
        work: object = None,
    ) -> tuple[Tensor, tuple[Tensor | None, ...], object]:
        return self._core.forward(inputs, documents, keep, initial, work)

    def d_initial(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
    ) -> tuple[Tensor, Scaled]:
        scaled = _scaled(d_o, inputs.k.shape[2])
        d_local, work = self._core.d_initial(scaled.half, inputs, saved, plan, documents)
        return d_local * _of_states(scaled.down), scaled._replace(work=work)

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
        initial: Tensor | None = None,
        d_final: Tensor | None = None,
        work: Scaled | None = None,
    ) -> RuleGrads:
        key_heads = inputs.k.shape[2]
        half, up, down, work = _scaled(d_o, key_heads) if work is None else work
        del d_o  # frees it where the caller has handed it over
        if d_final is not None:
            ratio, up, down = _kernels(half).lower(half, up, d_final, key_heads, LARGEST_D_FINAL)
            work = None if work is None else work * _of_states(ratio)
        grads = self._core.backward(
            half, inputs, saved, plan, documents, initial,
            None if d_final is None else d_final * _of_states(up), work,
        )  # fmt: skip
        return grads._replace(factor=down)


def _kernels(x: Tensor) -> ModuleType:
    if x.is_cuda and x.dtype != torch.float64:
        from . import half_kernels

        return half_kernels
    return half_torch


def _scaled(d_o: Tensor, key_heads: int) -> Scaled:
    return Scaled(*_kernels(d_o).to_half(d_o, key_heads, LARGEST_D_O))


def _of_states(x_H: Tensor) -> Tensor:
    return x_H[:, None, None]

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
most T / sqrt(K) long: 2^13.5 for K = 128 and T = 2^17 tokens of the largest gradient, all alike. What
grows further are sums over V of its products with written values, in dk and dbeta. Of 8192 tokens
of the largest gradient, alike in sign in all of V as the values are, in a head that neither forgets
nor writes (beta = 5e-4), the largest came to 2^15; gradients that agree in a hundredth of their
largest leave 2^6 more. Beyond, inf comes out, and is seen.

Below, an element under 2^-13 of the largest loses bits and one under 2^-16 has fewer than in bf16;
the error there is at most 2^-24 of the largest. Where one token in 500 has gradients 2^10 times the
others', every gradient as a whole is still within 1.05 of the plain rule's error in simulation
(``benchmarks/rounding.py``); with 2^-3 in place of 1 it was 1.5.

A gradient of final states, given in state passing, is held below 2^5 as well (a column of 2^8.5):
it may come from tokens of other ranks whose gradients are far larger than any here.

Legend: B batch, S seq, G key heads, H value heads, K key dim, V value dim, N sequences.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...documents import Documents
from .base import RuleGrads, RuleInputs, StatePassing, Transition

_LARGEST_D_O = 0  # log2, after scaling
_LARGEST_D_FINAL = 5
_BIAS, _MANTISSA = 127, 23  # of fp32


def power_exponent(x: Tensor, key_heads: int, largest: int, dims: tuple[int, ...]) -> Tensor:
    """Biased exponents ``[G]`` int32 of the powers of two that bring |x| below ``2^largest``.

    To within a factor of two: the largest |x| of a key head then lies in ``[2^(largest - 1),
    2^largest)``. The powers lie in 2^-126 .. 2^126, so they and their inverses are normal numbers
    whatever x holds: zeros (the largest power), inf or NaN (the smallest). An |x| near fp32's end
    comes to 2^2 at most. Exact, since it reads the exponent's bits.

    Args:
        x: any dtype, with H value heads in the dimension that ``dims``, all others, leave out.
    """
    most_H = torch.linalg.vector_norm(x, float("inf"), dim=dims)
    most_G = most_H.float().view(key_heads, -1).amax(1)
    exponent = most_G.view(torch.int32) >> _MANTISSA & 0xFF
    return (2 * _BIAS - 1 + largest - exponent).clamp(1, 2 * _BIAS - 1)


def _power(exponent: Tensor, value_heads: int) -> Tensor:
    """``[G]`` biased exponents to ``[H]`` fp32 powers of two."""
    power = (exponent << _MANTISSA).view(torch.float32)
    return power.repeat_interleave(value_heads // len(exponent), output_size=value_heads)


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
    ) -> tuple[Tensor, Tensor | None]:
        up, down = _scales(d_o, None, inputs.k.shape[2])
        d_local, work = self._core.d_initial(_to_half(d_o, up), inputs, saved, plan, documents)
        true = d_local * _of_states(down)
        if work is None or work is d_local:
            return true, None if work is None else true
        return true, work * _of_states(down)

    def backward(
        self,
        d_o: Tensor,
        inputs: RuleInputs,
        saved: tuple[Tensor | None, ...],
        plan: object,
        documents: Documents | None,
        initial: Tensor | None = None,
        d_final: Tensor | None = None,
        work: Tensor | None = None,
    ) -> RuleGrads:
        up, down = _scales(d_o, d_final, inputs.k.shape[2])
        grads = self._core.backward(
            _to_half(d_o, up), inputs, saved, plan, documents, initial,
            None if d_final is None else d_final * _of_states(up),
            None if work is None else work * _of_states(up),
        )  # fmt: skip
        return grads._replace(factor=down)


def _scales(d_o: Tensor, d_final: Tensor | None, key_heads: int) -> tuple[Tensor, Tensor]:
    """What gradients are multiplied by on the way in and on the way out, ``[H]`` fp32 each."""
    exponent = power_exponent(d_o, key_heads, _LARGEST_D_O, (0, 1, 3))
    if d_final is not None:
        other = power_exponent(d_final, key_heads, _LARGEST_D_FINAL, (0, 2, 3))
        exponent = torch.minimum(exponent, other)
    heads = d_o.shape[2]
    return _power(exponent, heads), _power(2 * _BIAS - exponent, heads)


def _to_half(d_o: Tensor, up_H: Tensor) -> Tensor:
    """One pass, rounded once."""
    half = torch.empty_like(d_o, dtype=torch.float16)
    return torch.mul(d_o, up_H[:, None], out=half)


def _of_states(x_H: Tensor) -> Tensor:
    return x_H[:, None, None]

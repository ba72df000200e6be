"""The readout of a Gated DeltaNet: RMSNorm over each head, then the gate.

    y = o * rsqrt(mean(o^2) + eps) * gamma * act(gate)

:mod:`.per_head_triton` has the kernels; :class:`PerHead` is their plain twin.

Legend: S seq, B batch, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..norm import rms_norm
from .base import ACTIVATIONS
from .plain import PlainReadout


@dataclass(frozen=True)
class PerHead(PlainReadout):
    """In plain torch; gamma is ``[V]``.

    Attributes:
        eps: added to the mean square.
        zero_centered: scale by ``1 + gamma``.
    """

    eps: float = 1e-6
    zero_centered: bool = False

    def _of(self, o: Tensor, gate: Tensor, gamma: Tensor | None) -> Tensor:
        normed = rms_norm(o, gamma, self.eps, self.zero_centered)
        gate = gate.unflatten(-1, o.shape[2:]).transpose(0, 1)
        y = normed * ACTIVATIONS[self.activation](gate)
        return y.transpose(0, 1).flatten(2)

"""Readouts in plain torch, from one differentiable function: any device, fp64 for fp64.

Legend: S seq, B batch, P projection width, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True)
class PlainReadout:
    """A :class:`.base.Readout` whose backward is autograd of its forward.

    Attributes:
        gate: columns of a row, H * V of them.
        activation: ``"silu"`` or ``"sigmoid"``, of the gate.
    """

    gate: slice
    activation: str = "silu"
    reads_o: ClassVar[bool] = True

    def _of(self, o: Tensor, gate: Tensor, gamma: Tensor | None) -> Tensor:
        """``[B, S, H, V]`` and ``[S, B, H V]`` to ``[S, B, H V]``, all in fp32 or wider."""
        raise NotImplementedError

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        wide = torch.promote_types(rows.dtype, torch.float32)
        of_norm = None if gamma is None else gamma.to(wide)
        y = self._of(o.to(wide), rows[..., self.gate].to(wide), of_norm)
        return y.to(rows.dtype).contiguous() if out is None else out.copy_(y)

    def backward(
        self, d_out: Tensor, o: Tensor, rows: Tensor, gamma: Tensor | None, d_rows: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        wide = torch.promote_types(rows.dtype, torch.float32)
        given = (o, rows[..., self.gate]) if gamma is None else (o, rows[..., self.gate], gamma)
        leaves = [x.detach().to(wide).requires_grad_() for x in given]
        with torch.enable_grad():
            y = self._of(leaves[0], leaves[1], None if gamma is None else leaves[2])
        d_o, d_gate, *d_gamma = torch.autograd.grad(y, leaves, d_out.to(wide))
        d_rows[..., self.gate] = d_gate
        of_norm = None if gamma is None else d_gamma[0].to(gamma.dtype)
        return d_o.to(rows.dtype).contiguous(), of_norm

"""The SSD recurrence one token after the other, for decode steps.

Legend: B batch, S seq, G groups, R heads per group, H = G R, K state dim, V head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...documents import Documents
from ...rules.token_rule import TokenRule
from .base import SSDInputs, wide_dtype


class RecurrentSSD(TokenRule):
    """The definition itself, in plain torch: elementwise products and sums over a state's rows."""

    def tokens(
        self, inputs: SSDInputs, documents: Documents | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Rows of a batch only, in fp32 (fp64 for fp64).

        Raises:
            NotImplementedError: packed documents.
        """
        if documents is not None:
            raise NotImplementedError(
                "the token recurrence of Mamba2 takes rows of one length, not packed documents."
            )
        x, B, C, dt, g, D = inputs
        wide, grouped = wide_dtype(x), (B.shape[2], -1)
        x_BSGRV, dt_BSGR, g_BSGR, D_BSGRV = (
            t.to(wide).unflatten(2, grouped) for t in (x, dt, g, D)
        )
        B_BSGK, C_BSGK = B.to(wide), C.to(wide)
        if initial is None:
            shape = (x.shape[0], x.shape[2], B.shape[3], x.shape[3])
            initial = x.new_zeros(shape, dtype=wide)
        S_BGRKV = initial.to(wide).unflatten(1, grouped)
        outputs = []
        for t in range(x.shape[1]):
            key, query = (y[:, t, :, None, :, None] for y in (B_BSGK, C_BSGK))
            written = dt_BSGR[:, t, :, :, None] * x_BSGRV[:, t]
            S_BGRKV = g_BSGR[:, t, :, :, None, None].exp() * S_BGRKV + key * written[..., None, :]
            read = (S_BGRKV * query).sum(-2)
            outputs.append((read + D_BSGRV[:, t] * x_BSGRV[:, t]).flatten(1, 2))
        o = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(x)
        return o.to(x.dtype), S_BGRKV.flatten(1, 2)

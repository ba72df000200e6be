"""Chains of affine maps in plain torch: the twin of :mod:`.chains_kernels`.

Legend as in :mod:`.chains`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..fp32_matmul import full_fp32_matmul
from .state_map import NONE, Steps


def follow(
    local: Tensor, through: Tensor, steps: Steps, out: Tensor, start: Tensor | str | None
) -> Tensor:
    """As :func:`.chains.follow`; stops each chain at its last write."""
    V, identity = local.shape[-1], isinstance(start, str)
    rows_decay = through.shape[-1] < through.shape[-2]
    with full_fp32_matmul(local.device.type):
        for n, chain in enumerate(steps.chains):
            state = start[n] if isinstance(start, Tensor) else None
            last = max(j for j, (target, _) in enumerate(chain) if target != NONE)
            for j, (target, place) in enumerate(chain[: last + 1]):
                if target != NONE:
                    out[target] = 0 if state is None else state
                if j == last or place == NONE:
                    continue
                if state is not None:
                    product = through[place] * state if rows_decay else through[place] @ state
                    product[..., :V].add_(local[place])
                    state = product
                elif identity:
                    state = torch.cat([local[place], through[place]], dim=-1)
                else:
                    state = local[place]
    return out

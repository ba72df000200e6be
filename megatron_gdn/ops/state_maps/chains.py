"""Chains of affine maps of a state, followed from one end to the other.

    S_after = through @ S_before + local

The maps are those of the parts of a sequence (:mod:`.parts`), or of its pieces on different ranks.
On a GPU one launch follows all chains (:mod:`.chains_kernels`).

Legend: N chains, L steps of the longest, P maps, Q states written, X columns of a followed state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..switches import full_fp32_matmul
from .state_map import NONE, Cuts, Steps

IDENTITY = "identity"
MOST_ROWS = 128  # of a state that one program of the kernel holds


def follow(
    local: Tensor,
    through: Tensor,
    steps: Steps,
    out: Tensor,
    start: Tensor | str | None = None,
    cuts: Cuts | None = None,
) -> Tensor:
    """Follow every chain and write the states at its targets.

    Args:
        local: ``[P, H, K, V]`` fp32 (or fp64, in plain torch).
        through: ``[P, H, K, K]``, any strides; or ``[P, H, K, 1]``, one factor per row.
        out: ``[Q, H, K, X]``, written; X is V, or from the identity V and ``through``'s columns.
        start: ``[N, H, K, V]``, the states before the first maps; None is zero. IDENTITY starts
            from the identity map and follows maps, ``local`` beside ``through``, not states.
        cuts: of every chain; not with IDENTITY.

    Returns:
        ``out``, in fp32; torch's TF32 switches have no effect. On a GPU each factor is a sum of
        two TF32 numbers, within 2^-20 of the factor, and sums have a fixed order.
    """
    P, H, K, V = local.shape
    identity = isinstance(start, str)
    assert through.shape[:3] == (P, H, K) and out.shape[1:3] == (H, K)
    dense = through.shape[3] == K
    assert dense or through.shape[3] == 1
    assert out.shape[3] == V + through.shape[3] * identity
    assert not identity or all(chain[0][0] == NONE for chain in steps.chains), "not the identity"
    if local.is_cuda and local.dtype == torch.float32 and dense and K <= MOST_ROWS:
        from . import chains_kernels

        return chains_kernels.follow(local, through, steps, out, start, cuts)
    return follow_in_torch(local, through, steps, out, start, cuts)


def follow_in_torch(
    local: Tensor,
    through: Tensor,
    steps: Steps,
    out: Tensor,
    start: Tensor | str | None,
    cuts: Cuts | None = None,
) -> Tensor:
    """The plain twin; stops each chain at its last write."""
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
                cut = False if cuts is None else cuts.at(j)
                if state is not None and cut is not True:
                    product = through[place] * state if rows_decay else through[place] @ state
                    product[..., :V].add_(local[place])
                    state = product if cut is False else torch.where(cut, local[place], product)
                elif identity:
                    state = torch.cat([local[place], through[place]], dim=-1)
                else:
                    state = local[place]
    return out

"""Chains of affine maps of a state, followed from one end to the other.

    S_after = through @ S_before + local

The maps are those of the parts of a sequence (:mod:`.parts`) or of its pieces on different ranks
(:mod:`megatron_gdn.context_parallel.chunkwise.map_exchange`). The products of a chain depend on
each other. So on a GPU one launch follows all chains, and every program keeps some columns of one
head's state in registers (:mod:`.chains_kernels`). The plain-torch twin is :mod:`.chains_torch`.

Legend: N chains, L steps of the longest, P maps, Q states written, H heads, K rows of a state,
V columns of ``local``, X columns of the states that are followed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .state_map import NONE, Steps

IDENTITY = "identity"
MOST_ROWS = 128  # of a state that one program of the kernel holds


def follow(
    local: Tensor,
    through: Tensor,
    steps: Steps,
    out: Tensor,
    start: Tensor | str | None = None,
) -> Tensor:
    """Follow every chain and write the states at its targets.

    Args:
        local: ``[P, H, K, V]`` fp32 (or fp64, in plain torch).
        through: ``[P, H, K, K]``, any strides; or ``[P, H, K, 1]``, one factor per row.
        out: ``[Q, H, K, X]``, written; X is V, or from the identity V and ``through``'s columns.
        start: ``[N, H, K, V]``, the states before the first maps; None is zero. IDENTITY starts
            from the identity map and follows maps, ``local`` beside ``through``, not states.

    Returns:
        ``out``, in fp32; torch's TF32 switches have no effect. On a GPU each factor is a sum of
        two TF32 numbers, within 2^-20 of the factor (fp32 rounds to 2^-24), and sums have a fixed
        order. The error of 16 maps of 128 rows was 1.7e-6 of the state, with fp32 products 4.5e-7.
    """
    P, H, K, V = local.shape
    identity = isinstance(start, str)
    assert through.shape[:3] == (P, H, K) and out.shape[1:3] == (H, K)
    dense = through.shape[3] == K
    assert dense or through.shape[3] == 1
    assert out.shape[3] == V + through.shape[3] * identity
    assert not identity or all(chain[0][0] == NONE for chain in steps.chains), "not the identity"
    on_triton = local.is_cuda and local.dtype == torch.float32 and dense and K <= MOST_ROWS
    return _follow_of(on_triton)(local, through, steps, out, start)


@cache
def _follow_of(on_triton: bool) -> Callable[..., Tensor]:
    if on_triton:
        from .chains_kernels import follow
    else:
        from .chains_torch import follow
    return follow

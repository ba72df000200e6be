"""A Triton kernel that applies chains of affine maps to states.

Legend: N chains, H heads, L steps of the longest chain; a map is for states [K, V]. It
is applied to states [K, X], with X > V when maps are composed.
"""

from __future__ import annotations

from functools import lru_cache

import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch import LAUNCH_CACHE_SIZE, Launch
from ..kernels.tiles import block_dim, require_32_bits

_COLUMNS_OF_PROGRAM = 64  # columns of a state per program
# what each chain starts from: zeros, a given state, or the identity (to compose maps)
_ZERO, _GIVEN, _IDENTITY = range(3)


@triton.jit
def _follow_kernel(
    local_ptr,
    through_ptr,
    start_ptr,
    out_ptr,
    steps_ptr,
    cuts_ptr,
    L,
    V,
    X,
    local_p,
    local_h,
    local_i,
    through_p,
    through_h,
    through_i,
    through_j,
    start_n,
    start_h,
    start_i,
    out_q,
    out_h,
    out_i,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    COLUMNS: tl.constexpr,
    START: tl.constexpr,
    GIVEN: tl.constexpr,
    IDENTITY: tl.constexpr,
    CUT: tl.constexpr,
):
    """Apply one chain of maps for one head; grid (N, H, tiles of columns).

    Reads the maps at ``local_ptr`` and ``through_ptr``, and writes states to
    ``out_ptr``. ``steps_ptr``: ``ChainSteps.table``. ``cuts_ptr``: [L], read if CUT; 1
    at a step that ignores the state before it. START is GIVEN (the chain starts from
    the state at ``start_ptr``), IDENTITY or 0 (zeros). Strides are in elements and
    named by tensor and axis: n chains, p maps, q written states, h heads, i rows, j
    columns. Of the grid's three sizes, only N may exceed 65535.
    """
    n = tl.cast(tl.program_id(0), tl.int64)
    h = tl.cast(tl.program_id(1), tl.int64)
    i_K = tl.arange(0, BLOCK_K)
    x_C = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    real_KC = (x_C < X)[None, :]
    of_local_KC = (x_C < V)[None, :]
    if BLOCK_K > K:
        real_KC = real_KC & (i_K < K)[:, None]
        of_local_KC = of_local_KC & (i_K < K)[:, None]
    local_ptr += h * local_h + i_K[:, None] * local_i + x_C[None, :]
    out_ptr += h * out_h + i_K[:, None] * out_i + x_C[None, :]
    through_ptr += h * through_h
    at_KK = i_K[:, None] * through_i + i_K[None, :] * through_j
    state_KC = tl.zeros((BLOCK_K, COLUMNS), tl.float32)
    if START == GIVEN:
        at_start = (
            start_ptr
            + n * start_n
            + h * start_h
            + i_K[:, None] * start_i
            + x_C[None, :]
        )
        state_KC = tl.load(at_start, mask=real_KC, other=0.0)
    for step in range(L):
        target = tl.load(steps_ptr + (n * L + step) * 2)
        map_index = tl.load(steps_ptr + (n * L + step) * 2 + 1)
        if target >= 0:
            tl.store(
                out_ptr + tl.cast(target, tl.int64) * out_q, state_KC, mask=real_KC
            )
        if map_index >= 0:
            p = tl.cast(map_index, tl.int64)
            # A first map needs no product if the state before it is zero or the
            # identity.
            if (START == GIVEN) | (step > 0):
                if BLOCK_K > K:
                    real_KK = (i_K < K)[:, None] & (i_K < K)[None, :]
                    through_KK = tl.load(
                        through_ptr + p * through_p + at_KK, real_KK, other=0.0
                    )
                else:
                    through_KK = tl.load(through_ptr + p * through_p + at_KK)
                # three TF32 products: nearly fp32, on tensor cores
                state_KC = tl.dot(through_KK, state_KC, input_precision="tf32x3")
                if CUT:
                    state_KC = tl.where(tl.load(cuts_ptr + step) > 0, 0.0, state_KC)
            elif START == IDENTITY:
                j_C = x_C - V
                at_KC = i_K[:, None] * through_i + j_C[None, :] * through_j
                beside_KC = ((j_C >= 0) & (j_C < K))[None, :]
                if BLOCK_K > K:
                    beside_KC = beside_KC & (i_K < K)[:, None]
                state_KC = tl.load(
                    through_ptr + p * through_p + at_KC, mask=beside_KC, other=0.0
                )
            state_KC += tl.load(local_ptr + p * local_p, mask=of_local_KC, other=0.0)


def follow_chains_on_gpu(
    local: Tensor,
    through: Tensor,
    table: Tensor,
    out: Tensor,
    start: Tensor | None,
    cuts: Tensor | None,
    compose: bool,
) -> Tensor:
    """Write the states or maps of :func:`.state_map.follow_chains` to ``out`` by one
    launch, from the maps ``local [P, H, K, V]`` and ``through [P, H, K, K]``. ``table``
    is ``ChainSteps.table``; the other arguments are those of that function."""
    N, L, _ = table.shape
    _, H, K, V = local.shape
    X = out.shape[3]
    # Without initial states the kernel does not read this pointer.
    given = local if start is None else start
    assert local.stride(3) == out.stride(3) == given.stride(3) == 1
    kind = _ZERO if start is None else _GIVEN
    if compose:
        kind = _IDENTITY
    strides = (
        local.stride()[:3] + through.stride() + given.stride()[:3] + out.stride()[:3]
    )
    launch = _follow_launch(N, L, H, K, V, X, strides, kind, cuts is not None)
    # ``table`` stands for absent cuts, which the kernel does not read
    launch(local, through, given, out, table, table if cuts is None else cuts)
    return out


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _follow_launch(
    N: int,
    L: int,
    H: int,
    K: int,
    V: int,
    X: int,
    strides: tuple[int, ...],
    kind: int,
    has_cuts: bool,
) -> Launch:
    """The kernel's launch. ``kind``: _ZERO, _GIVEN or _IDENTITY; ``has_cuts``: whether
    the argument ``cuts`` of :func:`.state_map.follow_chains` is given; ``strides``: the
    kernel's arguments from ``local_p`` to ``out_i``."""
    local_i = strides[2]
    through_i, through_j = strides[5:7]
    start_i = strides[9]
    out_i = strides[12]
    within_a_map = max(local_i, through_i + through_j, start_i, out_i)
    require_32_bits(
        "the size of a state map with its strides",
        within_a_map * K + X + _COLUMNS_OF_PROGRAM,
    )
    return Launch(
        _follow_kernel,
        (N, H, triton.cdiv(X, _COLUMNS_OF_PROGRAM)),
        L,
        V,
        X,
        *strides,
        K=K,
        BLOCK_K=block_dim(K),
        COLUMNS=_COLUMNS_OF_PROGRAM,
        START=kind,
        GIVEN=_GIVEN,
        IDENTITY=_IDENTITY,
        CUT=has_cuts,
        num_warps=8,
    )

"""Second stage of every cross-token sum: partial rows, added in one fixed order.

Legend: N partial rows, M columns.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import MOST_PLANS, Launch

_ROWS_AT_ONCE = 8
_MOST_ROWS = 256  # of one program: more are summed by several, whose sums are summed again
_COLUMNS = 128


@triton.jit
def _sum_rows_kernel(
    partial_ptr, out_ptr, N, M,
    ROWS: tl.constexpr, REPEATS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """grid (column blocks, groups of ROWS * REPEATS rows): one row of sums per group."""
    m_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * (ROWS * REPEATS)
    total_NM = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for repeat in tl.range(0, REPEATS):
        n_N = first + repeat * ROWS + tl.arange(0, ROWS)
        at_NM = tl.cast(n_N, tl.int64)[:, None] * M + m_M[None, :]
        total_NM += tl.load(
            partial_ptr + at_NM, mask=(n_N < N)[:, None] & (m_M < M)[None, :], other=0.0
        )
    out_ptr += tl.cast(tl.program_id(1), tl.int64) * M
    tl.store(out_ptr + m_M, tl.sum(total_NM, axis=0), mask=m_M < M)


def sum_rows(partial_NM: Tensor) -> Tensor:
    """``partial_NM.sum(0)`` for contiguous fp32, in an order that depends on N alone."""
    for groups, launch in _stages(*partial_NM.shape):
        sums_NM = torch.empty(
            groups, partial_NM.shape[1], dtype=torch.float32, device=partial_NM.device
        )
        launch(partial_NM, sums_NM)
        partial_NM = sums_NM
    return partial_NM[0]


@lru_cache(maxsize=MOST_PLANS)
def _stages(N: int, M: int) -> tuple[tuple[int, Launch], ...]:
    """The rows that every launch leaves, down to one, and the launch."""
    stages = []
    while True:
        span = N if N <= _MOST_ROWS else 64
        repeats = triton.cdiv(span, _ROWS_AT_ONCE)
        groups = max(1, triton.cdiv(N, _ROWS_AT_ONCE * max(1, repeats)))
        launch = Launch(
            _sum_rows_kernel, (triton.cdiv(M, _COLUMNS), groups), N, M,
            ROWS=_ROWS_AT_ONCE, REPEATS=repeats, BLOCK_M=_COLUMNS, num_warps=4,
        )  # fmt: skip
        stages.append((groups, launch))
        if groups == 1:
            return tuple(stages)
        N = groups

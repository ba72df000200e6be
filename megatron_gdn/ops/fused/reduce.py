"""Second stage of every cross-token sum: partial rows, added in one fixed order.

Legend: N partial rows, M columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .tiles import reduce_tile


@triton.jit
def _sum_rows_kernel(
    partial_ptr, out_ptr, N, M,
    ROWS: tl.constexpr, REPEATS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    m_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    total_NM = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for repeat in tl.range(0, REPEATS):
        n_N = repeat * ROWS + tl.arange(0, ROWS)
        at_NM = tl.cast(n_N, tl.int64)[:, None] * M + m_M[None, :]
        total_NM += tl.load(
            partial_ptr + at_NM, mask=(n_N < N)[:, None] & (m_M < M)[None, :], other=0.0
        )
    tl.store(out_ptr + m_M, tl.sum(total_NM, axis=0), mask=m_M < M)


def sum_rows(partial_NM: Tensor) -> Tensor:
    """``partial_NM.sum(0)`` for contiguous fp32, in an order that depends on N alone."""
    N, M = partial_NM.shape
    tile = reduce_tile(N)
    out_M = torch.empty(M, dtype=torch.float32, device=partial_NM.device)
    block = 128
    _sum_rows_kernel[(triton.cdiv(M, block),)](
        partial_NM, out_M, N, M,
        ROWS=tile.rows, REPEATS=tile.repeats, BLOCK_M=block, num_warps=tile.warps,
    )  # fmt: skip
    return out_M

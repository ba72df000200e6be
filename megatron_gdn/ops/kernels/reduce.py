"""The second stage of every sum over tokens: rows of partial sums are added in a fixed
order.

Legend: N partial rows, M columns.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from .launch import LAUNCH_CACHE_SIZE, Launch
from .tiles import MOST_PROGRAMS, require_32_bits

_ROWS_AT_ONCE = 8  # the rows that a program adds at a time
# if there are more rows, a further launch adds the programs' sums
_MOST_ROWS_OF_PROGRAM = 256
_COLUMNS_OF_PROGRAM = 128
_MOST_OUTPUTS = 4


class _SumStage(NamedTuple):
    """One launch of a sum of rows."""

    rows_written: int  # 1 for the last stage, which writes the outputs
    launch: Launch


@triton.jit
def _store_columns(out_ptr, sum_M, m_M, first_column, end_column):
    """Store ``sum_M``, the sums of columns ``m_M``, for ``first_column`` <= m <
    ``end_column``.

    ``out_ptr`` is the output of these columns, in any dtype; None: there is no output.
    """
    if out_ptr is not None:
        rounded_M = sum_M.to(out_ptr.dtype.element_ty)
        kept_M = (m_M >= first_column) & (m_M < end_column)
        tl.store(out_ptr + m_M - first_column, rounded_M, mask=kept_M)


@triton.jit
def _sum_rows_kernel(
    partial_ptr,
    a_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    N,
    M,
    a_end,
    b_end,
    c_end,
    ROWS: tl.constexpr,
    REPEATS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Sum each group of ROWS * REPEATS rows; grid (blocks of BLOCK_M columns, groups of
    rows).

    ``partial_ptr``: the N rows of M columns. A program adds ROWS rows at a time. If
    there are several groups, each writes one row of M columns to ``a_ptr``. A single
    group writes up to four outputs: ``a_ptr`` gets the columns before ``a_end``,
    ``b_ptr`` those from ``a_end`` to ``b_end``, ``c_ptr`` those from ``b_end`` to
    ``c_end``, ``d_ptr`` those from ``c_end`` on. The pointer of an absent output is
    None.
    """
    m_M = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    first = tl.program_id(1) * (ROWS * REPEATS)
    total_NM = tl.zeros((ROWS, BLOCK_M), tl.float32)
    for repeat in tl.range(0, REPEATS):
        n_N = first + repeat * ROWS + tl.arange(0, ROWS)
        at_NM = tl.cast(n_N, tl.int64)[:, None] * M + m_M[None, :]
        total_NM += tl.load(
            partial_ptr + at_NM, mask=(n_N < N)[:, None] & (m_M < M)[None, :], other=0.0
        )
    sum_M = tl.sum(total_NM, axis=0)
    a_ptr += tl.cast(tl.program_id(1), tl.int64) * M
    _store_columns(a_ptr, sum_M, m_M, 0, a_end)
    _store_columns(b_ptr, sum_M, m_M, a_end, b_end)
    _store_columns(c_ptr, sum_M, m_M, b_end, c_end)
    _store_columns(d_ptr, sum_M, m_M, c_end, M)


def sum_rows(partial_NM: Tensor, *outs: Tensor) -> None:
    """Sum the rows of ``partial_NM`` in fp32 and write the sums to ``outs``. The order
    of the additions depends only on N.

    ``outs`` are one to four contiguous tensors of any dtype; each gets the next numel()
    columns.
    """
    sizes = tuple([out.numel() for out in outs])
    N, M = partial_NM.shape
    stages = _stages_of_sum(N, M, sizes)
    for stage in stages[:-1]:
        sums_NM = partial_NM.new_empty(stage.rows_written, M)
        stage.launch(partial_NM, sums_NM, None, None, None)
        partial_NM = sums_NM
    absent = (None,) * (_MOST_OUTPUTS - len(outs))  # the kernel has four pointers
    stages[-1].launch(partial_NM, *(outs + absent))


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _stages_of_sum(N: int, M: int, sizes: tuple[int, ...]) -> tuple[_SumStage, ...]:
    """The launches that sum N rows of M columns; the last writes outputs of ``sizes``
    columns.

    A launch sums the rows in groups, one program per group and block of columns. If
    there are several groups, the next launch sums their sums.
    """
    assert sum(sizes) == M and 1 <= len(sizes) <= _MOST_OUTPUTS
    require_32_bits("the number of columns of partial sums", M + _COLUMNS_OF_PROGRAM)
    # absent outputs end at M too, so they get no columns
    ends_of_outputs = tuple(accumulate(sizes)) + (M, M, M)
    stages = []
    while True:
        rows_of_program = N
        if N > _MOST_ROWS_OF_PROGRAM:
            # at least so many rows that the groups fit on the grid's second axis
            rows_of_program = max(64, triton.cdiv(N, MOST_PROGRAMS))
        require_32_bits(
            "the number of rows of partial sums", N + rows_of_program + _ROWS_AT_ONCE
        )
        repeats = triton.cdiv(rows_of_program, _ROWS_AT_ONCE)
        # without rows (N = 0) one group writes zeros
        groups = max(1, triton.cdiv(N, _ROWS_AT_ONCE * max(1, repeats)))
        # Only the last launch writes the outputs; the others write rows of M columns.
        if groups == 1:
            a_end, b_end, c_end = ends_of_outputs[:3]
        else:
            a_end, b_end, c_end = M, M, M
        launch = Launch(
            _sum_rows_kernel,
            (triton.cdiv(M, _COLUMNS_OF_PROGRAM), groups),
            N,
            M,
            a_end,
            b_end,
            c_end,
            ROWS=_ROWS_AT_ONCE,
            REPEATS=repeats,
            BLOCK_M=_COLUMNS_OF_PROGRAM,
            num_warps=4,
        )
        stages.append(_SumStage(groups, launch))
        if groups == 1:
            return tuple(stages)
        N = groups

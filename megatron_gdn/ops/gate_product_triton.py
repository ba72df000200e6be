"""Few columns of a projection behind an RMSNorm: x is read once each way (Triton).

The plain-torch twin, with the same signatures, is :mod:`.gate_product`.

Legend: T tokens, D hidden size, P columns; in tile names t, d, p a block of each.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .kernels.launch import MOST_PLANS, Launch
from .kernels.reduce import sum_rows

_TOKENS, _COLUMNS = 64, 128
_MOST_SPLITS = 32  # partial sums of the factor's gradient


@triton.jit(do_not_specialize=["T"])
def _forward_kernel(
    x_ptr, factor_ptr, y_ptr, r_ptr, T, eps,
    D: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """grid (token blocks,)."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    at_t = tl.cast(t, tl.int64)
    y_tp = tl.zeros((BLOCK_T, BLOCK_P), tl.float32)
    squares_t = tl.zeros((BLOCK_T,), tl.float32)
    for start in tl.range(0, D, BLOCK_D):
        real_d = start + d < D
        x_td = tl.load(
            x_ptr + at_t[:, None] * D + (start + d)[None, :],
            mask=(t < T)[:, None] & real_d[None, :], other=0.0,
        )  # fmt: skip
        factor_pd = tl.load(
            factor_ptr + p[:, None] * D + (start + d)[None, :],
            mask=(p < P)[:, None] & real_d[None, :], other=0.0,
        )  # fmt: skip
        y_tp += tl.dot(x_td, tl.trans(factor_pd), input_precision="ieee")
        if NORMED:
            wide_td = x_td.to(tl.float32)
            squares_t += tl.sum(wide_td * wide_td, axis=1)
    if NORMED:
        r_t = 1.0 / tl.sqrt(squares_t / D + eps)
        tl.store(r_ptr + t, r_t, mask=t < T)
        y_tp *= r_t[:, None]
    out_tp = y_ptr + at_t[:, None] * P + p[None, :]
    tl.store(out_tp, y_tp.to(y_ptr.dtype.element_ty), mask=(t < T)[:, None] & (p < P)[None, :])


@triton.jit(do_not_specialize=["T", "blocks"])
def _backward_kernel(
    x_ptr, factor_ptr, d_y_ptr, y_ptr, r_ptr, d_x_ptr, partial_ptr, T, blocks,
    D: tl.constexpr, P: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """grid (blocks of D, splits): each split walks ``blocks`` token blocks, one after the other.

    It writes its own ``partial [P, D]``; another launch adds them in a fixed order.
    """
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    p = tl.arange(0, BLOCK_P)
    real_pd = (p < P)[:, None] & (d < D)[None, :]
    factor_pd = tl.load(factor_ptr + p[:, None] * D + d[None, :], mask=real_pd, other=0.0)
    outer_pd = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    first = tl.program_id(1) * blocks
    for block in tl.range(first, first + blocks):
        t = block * BLOCK_T + tl.arange(0, BLOCK_T)
        at_t = tl.cast(t, tl.int64)
        real_tp = (t < T)[:, None] & (p < P)[None, :]
        real_td = (t < T)[:, None] & (d < D)[None, :]
        in_tp = at_t[:, None] * P + p[None, :]
        in_td = at_t[:, None] * D + d[None, :]
        x_td = tl.load(x_ptr + in_td, mask=real_td, other=0.0)
        d_y_tp = tl.load(d_y_ptr + in_tp, mask=real_tp, other=0.0)
        if NORMED:
            r_t = tl.load(r_ptr + t, mask=t < T, other=0.0)
            y_tp = tl.load(y_ptr + in_tp, mask=real_tp, other=0.0).to(tl.float32)
            along_t = tl.sum(y_tp * d_y_tp.to(tl.float32), axis=1) * r_t * r_t / D
            d_y_tp = (d_y_tp.to(tl.float32) * r_t[:, None]).to(x_td.dtype)
        d_x_td = tl.dot(d_y_tp, factor_pd, input_precision="ieee")
        if NORMED:
            d_x_td -= along_t[:, None] * x_td.to(tl.float32)
        tl.store(d_x_ptr + in_td, d_x_td.to(d_x_ptr.dtype.element_ty), mask=real_td)
        outer_pd += tl.dot(tl.trans(d_y_tp), x_td, input_precision="ieee")
    out_ptr = partial_ptr + tl.cast(tl.program_id(1), tl.int64) * (P * D)
    tl.store(out_ptr + p[:, None] * D + d[None, :], outer_pd, mask=real_pd)


def forward(
    x_TD: Tensor, factor_PD: Tensor, eps: float, normed: bool
) -> tuple[Tensor, Tensor | None]:
    """As :func:`.gate_product.forward`; x and factor of one dtype, contiguous."""
    (T, D), P = x_TD.shape, factor_PD.shape[0]
    y = x_TD.new_empty(T, P)
    r_T = torch.empty(T, dtype=torch.float32, device=x_TD.device) if normed else None
    if T:
        _forward_launch(T, D, P, eps, normed)(x_TD, factor_PD, y, r_T)
    return y, r_T


def backward(
    x_TD: Tensor, factor_PD: Tensor, d_y_TP: Tensor, y_TP: Tensor, r_T: Tensor | None
) -> tuple[Tensor, Tensor]:
    """As :func:`.gate_product.backward`."""
    (T, D), P = x_TD.shape, factor_PD.shape[0]
    blocks = triton.cdiv(T, _TOKENS)
    per_split = max(1, triton.cdiv(blocks, _MOST_SPLITS))
    splits = triton.cdiv(blocks, per_split)
    d_x = torch.empty_like(x_TD)
    partial = torch.empty(splits, P * D, dtype=torch.float32, device=x_TD.device)
    outer = torch.empty(P, D, dtype=torch.float32, device=x_TD.device)
    if not T:
        return d_x, outer.zero_()
    _backward_launch(T, D, P, per_split, splits, r_T is not None)(
        x_TD, factor_PD, d_y_TP, y_TP, r_T, d_x, partial
    )
    sum_rows(partial, outer)
    return d_x, outer


def _blocks(D: int, P: int) -> dict[str, int]:
    columns = min(_COLUMNS, max(16, triton.next_power_of_2(D)))
    return {
        "D": D, "P": P, "BLOCK_T": _TOKENS, "BLOCK_D": columns,
        "BLOCK_P": max(16, triton.next_power_of_2(P)),
    }  # fmt: skip


@lru_cache(maxsize=MOST_PLANS)
def _forward_launch(T: int, D: int, P: int, eps: float, normed: bool) -> Launch:
    grid = (triton.cdiv(T, _TOKENS),)
    return Launch(_forward_kernel, grid, T, eps, **_blocks(D, P), NORMED=normed, num_warps=4)


@lru_cache(maxsize=MOST_PLANS)
def _backward_launch(T: int, D: int, P: int, blocks: int, splits: int, normed: bool) -> Launch:
    sizes = _blocks(D, P)
    grid = (triton.cdiv(D, sizes["BLOCK_D"]), splits)
    return Launch(_backward_kernel, grid, T, blocks, **sizes, NORMED=normed, num_warps=8)

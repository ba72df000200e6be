"""Mamba2's convolution over strided rows: conv + SiLU of x, B and C, one launch each way (Triton).

The walks along the sequence are those of every front.

Legend: S seq, B batch, P projection width, C conv channels, W taps, H heads, G groups, V head dim,
K state dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.documents import Documents
from ..ops.front.conv_backward import conv_head_backward
from ..ops.front.conv_forward import conv_head
from ..ops.front.history import History
from ..ops.front.history_kernels import lead_in, lead_in_backward, pieces_in
from ..ops.kernels.reduce import sum_rows
from ..ops.kernels.tiles import (
    Walk,
    block_dim,
    prepare_backward_tile,
    prepare_forward_tile,
    within_grid,
    within_reach,
    within_shared_memory,
)
from ..ops.layout import Layout


@triton.jit(do_not_specialize=["S", "steps"])
def conv_forward_kernel(
    rows_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr, x_ptr, B_ptr, C_ptr,
    S, steps, stride_s, stride_b,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, HAS_HISTORY: tl.constexpr,
    ONE_PATH: tl.constexpr,
):  # fmt: skip
    """grid (H + 2G, token tiles, B). Slots are heads of x, then groups of B, then of C.

    ``rows_ptr`` is at the first convolved column.
    """
    slot = tl.program_id(0)
    start = tl.program_id(1) * (ROWS * steps)
    b = tl.cast(tl.program_id(2), tl.int64)
    rows_ptr += b * stride_b
    CHANNELS: tl.constexpr = H * V + 2 * G * K
    lead_stride = tl.num_programs(2) * CHANNELS
    if HAS_HISTORY:
        lead_ptr += b * CHANNELS
    if slot < H:
        conv_head(
            rows_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr,
            x_ptr + b * S * (H * V) + slot * V,
            slot * V, start, S, steps, stride_s, lead_stride, H * V, 0.0,
            V, ROWS, STAGES, BLOCK_V, W, HAS_BIAS, PACKED, HAS_HISTORY, ONE_PATH, False,
        )  # fmt: skip
    else:
        group = slot - H
        out_ptr = B_ptr + group * K if group < G else C_ptr + (group - G) * K
        conv_head(
            rows_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr,
            out_ptr + b * S * (G * K),
            H * V + group * K, start, S, steps, stride_s, lead_stride, G * K, 0.0,
            K, ROWS, STAGES, BLOCK_K, W, HAS_BIAS, PACKED, HAS_HISTORY, ONE_PATH, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["S", "steps"])
def conv_backward_kernel(
    rows_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr, dx_ptr, dB_ptr, dC_ptr,
    d_rows_ptr, partial_ptr, d_lead_ptr,
    S, steps, stride_s, stride_b, d_stride_s, d_stride_b,
    H: tl.constexpr, G: tl.constexpr, V: tl.constexpr, K: tl.constexpr, W: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr,
    HAS_BIAS: tl.constexpr, PACKED: tl.constexpr, HAS_HISTORY: tl.constexpr,
    ONE_PATH: tl.constexpr,
):  # fmt: skip
    """grid (H + 2G, token tiles, B).

    Each program writes its own stretch of one partial row per tile: conv weight [C, W], conv
    bias [C]. A second launch adds the rows in a fixed order.
    """
    CHANNELS: tl.constexpr = H * V + 2 * G * K
    slot = tl.program_id(0)
    tile = tl.program_id(1)
    start = tile * (ROWS * steps)
    b = tl.cast(tl.program_id(2), tl.int64)
    rows_ptr += b * stride_b
    d_rows_ptr += b * d_stride_b
    PARTIAL: tl.constexpr = CHANNELS * (W + 1 if HAS_BIAS else W)
    partial_ptr += (b * tl.num_programs(1) + tile) * PARTIAL
    lead_stride = tl.num_programs(2) * CHANNELS
    if HAS_HISTORY:
        lead_ptr += b * CHANNELS
        d_lead_ptr += b * CHANNELS
    if slot < H:
        conv_head_backward(
            rows_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr,
            dx_ptr + b * S * (H * V) + slot * V, d_rows_ptr, partial_ptr, d_lead_ptr,
            slot * V, start, S, steps, stride_s, d_stride_s, lead_stride, H * V, 1.0, 0.0,
            V, CHANNELS, 1, W, ROWS, STAGES, BLOCK_V, HAS_BIAS, PACKED, HAS_HISTORY, ONE_PATH,
            False, False,
        )  # fmt: skip
    else:
        group = slot - H
        grad_ptr = dB_ptr + group * K if group < G else dC_ptr + (group - G) * K
        conv_head_backward(
            rows_ptr, weight_ptr, bias_ptr, position_ptr, lead_ptr, place_ptr,
            grad_ptr + b * S * (G * K), d_rows_ptr, partial_ptr, d_lead_ptr,
            H * V + group * K, start, S, steps, stride_s, d_stride_s, lead_stride, G * K, 1.0, 0.0,
            K, CHANNELS, 1, W, ROWS, STAGES, BLOCK_K, HAS_BIAS, PACKED, HAS_HISTORY, ONE_PATH,
            False, False,
        )  # fmt: skip


def sizes_of(layout: Layout) -> tuple[int, int, int, int]:
    """H, G, V and K."""
    of = {section.name: section.width for section in layout.sections}
    return layout.heads("head"), layout.heads("group"), of["x"], of["B"]


def conv_forward(
    proj: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: Layout,
    documents: Documents | None,
    batch_invariant: bool,
    history: History | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``SiLU(conv(x, B, C))``: x ``[B, S, H, V]``, B and C ``[B, S, G, K]``; rounded once.

    The strides of S and B of ``proj`` are any; the weight ``[C, 1, W]`` is contiguous, W >= 2.
    """
    S, B, _ = proj.shape
    H, G, V, K = sizes_of(layout)
    x = proj.new_empty(B, S, H, V)
    made = x, proj.new_empty(B, S, G, K), proj.new_empty(B, S, G, K)
    tile = within_grid(prepare_forward_tile(S * B, max(K, V)), S, B)
    tile = within_reach(tile, S, weight.shape[-1], (proj.stride(0), G * K, H * V))
    lead = lead_in(history, weight)
    if S * B:
        conv_forward_kernel[(H + 2 * G, triton.cdiv(S, tile.tokens), B)](
            *_given(proj, weight, bias, layout, documents), lead, _places(history), *made,
            S, tile.steps, proj.stride(0), proj.stride(1),
            **_constants(tile, weight, bias, layout, documents, batch_invariant),
            HAS_HISTORY=lead is not None,
        )  # fmt: skip
    return made


def conv_backward(
    proj: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: Layout,
    grads: tuple[Tensor, Tensor, Tensor],
    d_proj: Tensor,
    documents: Documents | None,
    batch_invariant: bool,
    history: History | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of weight and bias; writes the convolved columns of ``d_proj``."""
    S, B, _ = proj.shape
    H, G, V, K = sizes_of(layout)
    W = weight.shape[-1]
    strides = (proj.stride(0), d_proj.stride(0), G * K, H * V)
    tile = within_grid(prepare_backward_tile(S * B, max(K, V)), S, B)
    tile = within_reach(tile, S, W, strides)
    row_bytes = max(block_dim(K), block_dim(V)) * (proj.element_size() + grads[0].element_size())
    tile = within_shared_memory(tile, row_bytes)
    tiles = triton.cdiv(S, tile.tokens)
    columns = layout.conv_width * (W + (bias is not None))
    lead = lead_in(history, weight)
    d_lead = None if lead is None else torch.empty_like(lead)
    rows = B * (tiles + pieces_in(history))
    partial = torch.empty(rows, columns, dtype=torch.float32, device=proj.device)
    if S * B:
        conv_backward_kernel[(H + 2 * G, tiles, B)](
            *_given(proj, weight, bias, layout, documents), lead, _places(history),
            *(x.contiguous() for x in grads), d_proj[..., layout.conv_columns.start :], partial,
            d_lead,
            S, tile.steps, proj.stride(0), proj.stride(1), d_proj.stride(0), d_proj.stride(1),
            **_constants(tile, weight, bias, layout, documents, batch_invariant),
            HAS_HISTORY=lead is not None,
        )  # fmt: skip
    if history is not None and d_lead is not None:
        lead_in_backward(history, weight, d_lead, partial[B * tiles :])
    d_weight, d_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    sum_rows(partial, *(x for x in (d_weight, d_bias) if x is not None))
    return d_weight, d_bias


def _given(
    proj: Tensor, weight: Tensor, bias: Tensor | None, layout: Layout, documents: Documents | None
) -> tuple[Tensor | None, ...]:
    position_T = None if documents is None else documents.position_T
    return proj[..., layout.conv_columns.start :], weight, bias, position_T


def _places(history: History | None) -> Tensor | None:
    return history.table.place if pieces_in(history) and history is not None else None


def _constants(
    tile: Walk, weight: Tensor, bias: Tensor | None, layout: Layout, documents: Documents | None,
    batch_invariant: bool,
) -> dict[str, Any]:  # fmt: skip
    H, G, V, K = sizes_of(layout)
    packed, one_path = documents is not None, batch_invariant and documents is not None
    return {
        "H": H, "G": G, "V": V, "K": K, "W": weight.shape[-1], "ROWS": tile.rows,
        "STAGES": tile.stages, "BLOCK_V": block_dim(V), "BLOCK_K": block_dim(K),
        "HAS_BIAS": bias is not None, "PACKED": packed, "ONE_PATH": one_path,
        "num_warps": tile.warps, "maxnreg": tile.registers, "enable_fp_fusion": not one_path,
    }  # fmt: skip

"""Mamba2's convolution over strided rows, as one launch each way (Triton).

Legend: S seq, B batch, P projection width, C conv channels, W taps, H heads, G groups, V head dim,
K state dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from ..documents import Documents
from ..front.fused_edges import FusedEdges
from ..kernels.launch import MOST_PLANS
from ..kernels.reduce import sum_rows
from ..kernels.tiles import (
    block_dim,
    prepare_backward_tile,
    prepare_forward_tile,
    within_grid,
    within_reach,
    within_shared_memory,
)
from ..layout import Layout
from .front_kernels import conv_backward_kernel, conv_forward_kernel


def sizes_of(layout: Layout) -> tuple[int, int, int, int]:
    """H, G, V and K."""
    of = {section.name: section.width for section in layout.sections}
    return layout.heads("head"), layout.heads("group"), of["x"], of["B"]


@lru_cache(maxsize=MOST_PLANS)
def edges_of(layout: Layout, batch_invariant: bool = False) -> FusedEdges:
    """How the first tokens of pieces are computed, from the convolved sections of the rows."""
    H, G, V, K = sizes_of(layout)
    return FusedEdges(
        ("x", "B", "C"), layout.conv_columns.start, (H, G, G), (V, K, K),
        batch_invariant=batch_invariant,
    )  # fmt: skip


def conv_forward(
    proj: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layout: Layout,
    documents: Documents | None,
    batch_invariant: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """``SiLU(conv(x, B, C))``, taps within a document; fp32 inside, rounded once.

    Args:
        proj: ``[S, B, P]``, any strides of S and B.
        weight, bias: ``[C, 1, W]``, W >= 2, contiguous; ``[C]`` or None.
        layout: rows z | x | B | C | dt.
        documents: boundaries, the same in every batch row; None when a row is one sequence.
        batch_invariant: the bits of a document do not depend on where it lies.

    Returns:
        x ``[B, S, H, V]``, B and C ``[B, S, G, K]``, in ``proj``'s dtype.
    """
    S, B, _ = proj.shape
    H, G, V, K = sizes_of(layout)
    x = proj.new_empty(B, S, H, V)
    made = x, proj.new_empty(B, S, G, K), proj.new_empty(B, S, G, K)
    tile = within_grid(prepare_forward_tile(S * B, max(K, V)), S, B)
    tile = within_reach(tile, S, weight.shape[-1], (proj.stride(0), G * K, H * V))
    one_path = batch_invariant and documents is not None
    if S * B:
        conv_forward_kernel[(H + 2 * G, triton.cdiv(S, tile.tokens), B)](
            proj[..., layout.conv_columns.start :], weight, bias,
            None if documents is None else documents.position_T, *made,
            S, tile.steps, 0, proj.stride(0), proj.stride(1),
            H=H, G=G, V=V, K=K, W=weight.shape[-1], ROWS=tile.rows, STAGES=tile.stages,
            BLOCK_V=block_dim(V), BLOCK_K=block_dim(K), HAS_BIAS=bias is not None,
            PACKED=documents is not None, ONE_PATH=one_path, num_warps=tile.warps,
            maxnreg=tile.registers, enable_fp_fusion=not one_path,
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
) -> tuple[Tensor, Tensor | None]:
    """The backward of :func:`conv_forward`; writes the convolved columns of ``d_proj``.

    Args:
        grads: of x, B and C.

    Returns:
        The gradients of weight and bias.
    """
    S, B, _ = proj.shape
    H, G, V, K = sizes_of(layout)
    W, channels = weight.shape[-1], layout.conv_width
    strides = (proj.stride(0), d_proj.stride(0), G * K, H * V)
    tile = within_grid(prepare_backward_tile(S * B, max(K, V)), S, B)
    tile = within_reach(tile, S, W, strides)
    row_bytes = max(block_dim(K), block_dim(V)) * (proj.element_size() + grads[0].element_size())
    tile = within_shared_memory(tile, row_bytes)
    tiles = triton.cdiv(S, tile.tokens)
    one_path = batch_invariant and documents is not None
    with_bias = 0 if bias is None else channels
    partial = torch.empty(
        B * tiles, channels * W + with_bias, dtype=torch.float32, device=proj.device
    )
    first = layout.conv_columns.start
    if S * B:
        conv_backward_kernel[(H + 2 * G, tiles, B)](
            proj[..., first:], weight, bias, None if documents is None else documents.position_T,
            *(x.contiguous() for x in grads), d_proj[..., first:], partial,
            S, tile.steps, proj.stride(0), proj.stride(1), d_proj.stride(0), d_proj.stride(1),
            H=H, G=G, V=V, K=K, W=W, ROWS=tile.rows, STAGES=tile.stages,
            BLOCK_V=block_dim(V), BLOCK_K=block_dim(K), HAS_BIAS=bias is not None,
            PACKED=documents is not None, ONE_PATH=one_path, num_warps=tile.warps,
            maxnreg=tile.registers, enable_fp_fusion=not one_path,
        )  # fmt: skip
    d_weight, d_bias = torch.empty_like(weight), None if bias is None else torch.empty_like(bias)
    sum_rows(partial, *(x for x in (d_weight, d_bias) if x is not None))
    return d_weight, d_bias

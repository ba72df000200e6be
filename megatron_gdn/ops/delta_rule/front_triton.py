"""Everything between the projection and the delta rule, as one launch each way (Triton).

:mod:`.front_torch` is the plain-torch twin, with the same signatures.

Legend: S seq, B batch, P projection width, G key heads, H value heads, K key dim, V value dim,
C conv channels, W taps.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from ..documents import Documents
from ..elementwise import largest_beta
from ..front.history import History
from ..front.history_kernels import lead_in, lead_in_backward, pieces_in
from ..kernels.launch import MOST_PLANS, Launch
from ..kernels.reduce import sum_rows
from ..kernels.tiles import (
    Walk,
    block_dim,
    prepare_backward_tile,
    prepare_forward_tile,
    within_grid,
    within_reach,
    within_shared_memory,
)
from .base import HeadSizes, RuleInputs
from .front_kernels import prepare_backward_kernel, prepare_forward_kernel
from .front_torch import GDNParameterGrads

_EPS = 1e-6  # of l2norm


def prepare_forward(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    documents: Documents | None = None,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    parts: str = "qkvg",
    dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    tile: Walk | None = None,
    gates: Tensor | None = None,
    history: History | None = None,
) -> RuleInputs:
    """Projection rows to the inputs of the delta rule.

        q, k = l2norm(silu(conv(x)));  v = silu(conv(x))
        g    = -exp(A_log) * softplus(alpha + dt_bias);  beta = sigmoid(b), or twice that

    Args:
        proj: ``[S, B, P]``, query | key | value | z | beta | alpha; any strides of S and B.
        conv_weight, conv_bias: ``[C, 1, W]`` or ``[C, W]``, W >= 2, contiguous; ``[C]`` or None.
        documents: the same in every batch row; None when every row is one sequence. Taps never
            cross a boundary, in either direction.
        batch_invariant: the bits of a packed document do not depend on its place. Tokens near
            boundaries and far from them take one path, without fused multiply-adds: a compiler may
            use these in one copy of a loop and not in another.
        parts: what to compute, a substring of ``"qkvg"`` (g is both gates); the rest is None.
        dtype: of q, k and v; None is the projection's.
        tile: overrides the table of :mod:`..kernels.tiles`, for tuning and tests.
        gates: ``[S, B, 2 H]``, beta | alpha, contiguous, if they are not columns of ``proj``.
        history: the rows before the pieces of ``documents``; None where all begin a sequence.

    Returns:
        :class:`RuleInputs`, all contiguous. Arithmetic is fp32, rounded once.

    Raises:
        ValueError: tokens too far apart for any tile, or more than 65535 batch rows.
    """
    S, B, _ = proj.shape
    G, H, K, V = sizes
    assert parts and parts in "qkvg"
    q = proj.new_empty(B, S, G, K, dtype=dtype) if "q" in parts else None
    k = proj.new_empty(B, S, G, K, dtype=dtype) if "k" in parts else None
    v = proj.new_empty(B, S, H, V, dtype=dtype) if "v" in parts else None
    g = beta = None
    if "g" in parts:
        g = torch.empty(B, S, H, dtype=torch.float32, device=proj.device)
        beta = torch.empty_like(g)
    position_T = None if documents is None else documents.position_T
    stride_s, stride_b, _ = proj.stride()
    lead = lead_in(history, conv_weight) if parts != "g" else None
    place = None if lead is None or history is None else history.table.place
    launch = _forward_launch(
        sizes, S, B, conv_weight.shape[-1], stride_s, stride_b, parts, conv_bias is not None,
        documents is not None, batch_invariant, normalise_qk, largest_beta(allow_neg_eigval),
        gates is not None, lead is not None, tile,
    )  # fmt: skip
    if launch is not None:
        # Kernels take no None, so each part left out gets a pointer that is never read. It has the
        # dtype of the part, so that one compilation serves all choices of parts.
        heads = next((x for x in (q, k, v) if x is not None), proj)
        outputs = [heads if x is None else x for x in (q, k, v)]
        outputs += [A_log if x is None else x for x in (g, beta)]
        launch(
            proj, gates, conv_weight, conv_bias, A_log, dt_bias, position_T, lead, place, *outputs
        )
    made: list[Any] = [q, k, v, g, beta]
    return RuleInputs(*made)


@lru_cache(maxsize=MOST_PLANS)
def _forward_launch(
    sizes: HeadSizes, S: int, B: int, W: int, stride_s: int, stride_b: int, parts: str,
    has_bias: bool, packed: bool, batch_invariant: bool, normalise: bool, most_beta: float,
    apart: bool, continued: bool, tile: Walk | None,
) -> Launch | None:  # fmt: skip
    """None if there are no rows."""
    G, H, K, V = sizes
    slots = {"q": G, "k": G, "v": H, "g": 1}
    first = sum(slots[part] for part in "qkvg"[: "qkvg".index(parts[0])])
    one_path = batch_invariant and packed
    tile = prepare_forward_tile(S * B, max(K, V)) if tile is None else tile
    tile = within_grid(tile, S, B)
    tile = within_reach(tile, S, W, (stride_s, G * K, H * V))
    assert tile.steps % 4 == 0, "the loop is unrolled four times"
    if not S * B:
        return None
    return Launch(
        prepare_forward_kernel,
        (sum(slots[part] for part in parts), triton.cdiv(S, tile.tokens), B),
        S, tile.steps, first, stride_s, stride_b, _EPS, most_beta,
        G=G, H=H, K=K, V=V, W=W, ROWS=tile.rows, STAGES=tile.stages,
        BLOCK_K=block_dim(K), BLOCK_V=block_dim(V), BLOCK_H=block_dim(H),
        HAS_BIAS=has_bias, PACKED=packed, HAS_HISTORY=continued, ONE_PATH=one_path,
        NORMALISE=normalise, APART=apart,
        num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=not one_path,
    )  # fmt: skip


def prepare_backward(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor | None,
    dbeta: Tensor | None,
    d_proj: Tensor,
    *,
    documents: Documents | None = None,
    factor: Tensor | None = None,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    batch_invariant: bool = False,
    tile: Walk | None = None,
    gates: Tensor | None = None,
    d_gates: Tensor | None = None,
    history: History | None = None,
) -> GDNParameterGrads:
    """The backward of :func:`prepare_forward`, from its inputs; writes all of ``d_proj`` but z.

    Args:
        dq, dk: ``[B, S, G, K]``, or ``[B, S, H, K]`` with one gradient per value head: heads that
            share a key head are summed here, in fp32.
        dg, dbeta: ``[B, S, H]``. None for rows whose gates are made elsewhere: only the convolved
            columns are written then, and A_log and dt_bias get zeros.
        factor: ``[H]`` fp32, see :class:`.base.RuleGrads`; None is 1.
        gates, d_gates: ``[S, B, 2 H]``, contiguous, the second written, if the gates are not
            columns of ``proj`` and ``d_proj``.
        history: as in the forward; its ``d_rows`` are written.
    """
    S, B, _ = proj.shape
    position_T = None if documents is None else documents.position_T
    dq, dk, dv = (x.contiguous() for x in (dq, dk, dv))
    gated = dg is not None
    # Kernels take no None: without gates, a pointer that is never read.
    of_gates = [A_log if x is None else x.contiguous() for x in (dg, dbeta)]
    assert dq.shape[2] % sizes.key_heads == 0 and dq.shape == dk.shape
    lead = lead_in(history, conv_weight)
    place = None if lead is None or history is None else history.table.place
    d_lead = None if lead is None else torch.empty_like(lead)
    launch, shape = _backward_plan(
        sizes, S, B, conv_weight.shape[-1], proj.stride(), d_proj.stride(), dq.shape[2],
        proj.element_size(), dv.element_size(), conv_bias is not None, documents is not None,
        batch_invariant, normalise_qk, largest_beta(allow_neg_eigval), factor is not None,
        gates is not None, gated, lead is not None, tile,
    )  # fmt: skip
    # Every piece with a history leaves one more row for each batch row.
    rows = shape[0] + B * pieces_in(history)
    partial = torch.empty(rows, shape[1], dtype=torch.float32, device=proj.device)
    if launch is not None:
        launch(
            proj, conv_weight, conv_bias, A_log, dt_bias, position_T, lead, place,
            dq, dk, dv, *of_gates, factor, d_proj, partial, d_lead, gates, d_gates,
        )  # fmt: skip
    if history is not None and d_lead is not None:
        lead_in_backward(history, conv_weight, d_lead, partial[shape[0] :])
    grads = GDNParameterGrads(
        torch.empty_like(conv_weight),
        None if conv_bias is None else torch.empty_like(conv_bias),
        torch.empty_like(A_log) if gated else torch.zeros_like(A_log),
        torch.empty_like(dt_bias) if gated else torch.zeros_like(dt_bias),
    )
    sum_rows(partial, *[x for x in grads[: 4 if gated else 2] if x is not None])
    return grads


@lru_cache(maxsize=MOST_PLANS)
def _backward_plan(
    sizes: HeadSizes, S: int, B: int, W: int, strides: tuple[int, ...], d_strides: tuple[int, ...],
    d_heads: int, size: int, d_size: int, has_bias: bool, packed: bool,
    batch_invariant: bool, normalise: bool, most_beta: float, scaled: bool, apart: bool,
    gated: bool, continued: bool, tile: Walk | None,
) -> tuple[Launch | None, tuple[int, int]]:  # fmt: skip
    """The launch, None if there are no rows, and the shape of partial sums.

    These have a row per batch row and token tile: weight | bias | A_log | dt_bias. ``d_heads``:
    heads of dq and dk; ``size``, ``d_size``: bytes of an element of proj, of dv.
    """
    G, H, K, V = sizes
    tile = prepare_backward_tile(S * B, max(K, V)) if tile is None else tile
    tile = within_grid(tile, S, B)
    tile = within_reach(tile, S, W, (strides[0], d_strides[0], d_heads * K, H * V))
    of_key_head = block_dim(K) * (size + d_heads // G * d_size)
    tile = within_shared_memory(tile, max(of_key_head, block_dim(V) * (size + d_size)))
    assert tile.steps >= W - 1, "a segment must be longer than the halo"
    assert tile.steps % 4 == 0, "the loop is unrolled four times"
    tiles = triton.cdiv(S, tile.tokens)
    one_path = batch_invariant and packed
    launch = None
    if S * B:
        launch = Launch(
            prepare_backward_kernel,
            (gated + 2 * G + H, tiles, B),
            S, tile.steps, *strides[:2], *d_strides[:2], _EPS, most_beta,
            G=G, H=H, K=K, V=V, W=W, GROUP=d_heads // G, ROWS=tile.rows, STAGES=tile.stages,
            BLOCK_K=block_dim(K), BLOCK_V=block_dim(V), BLOCK_H=block_dim(H),
            HAS_BIAS=has_bias, PACKED=packed, HAS_HISTORY=continued, ONE_PATH=one_path,
            NORMALISE=normalise, SCALED=scaled, APART=apart, GATES=gated,
            num_warps=tile.warps, maxnreg=tile.registers, enable_fp_fusion=not one_path,
        )  # fmt: skip
    channels = sizes.conv_width
    return launch, (B * tiles, channels * (W + has_bias) + 2 * H * gated)

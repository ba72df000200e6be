"""The gated output norm over strided rows, as one launch each way (Triton).

The plain-torch twin, with the same signatures, is :mod:`.per_head`.

Legend: S seq, B batch, P projection width, H value heads, V value dim.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from ..kernels.launch import MOST_PLANS, Launch
from ..kernels.reduce import sum_rows
from ..kernels.tiles import Block, block_dim, norm_backward_tile, norm_forward_tile
from .per_head_kernels import gated_norm_backward_kernel, gated_norm_forward_kernel


def gated_norm_forward(
    o: Tensor,
    proj: Tensor,
    gamma: Tensor,
    z: slice,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """``o * rsqrt(mean(o^2) + eps) * gamma * silu(z)`` per head, rounded once.

    Args:
        o: ``[B, S, H, V]`` contiguous, the output of the delta rule, in any dtype.
        proj: ``[S, B, P]``; the gate is read from its columns ``z``.
        z: those columns, H * V of them.
        gamma: ``[V]``; ``1 + gamma`` scales when ``zero_centered``.
        out: write here instead of into a new tensor.

    Returns:
        ``[S, B, H * V]`` contiguous, in ``proj``'s dtype.
    """
    S, B, _ = proj.shape
    H, V = o.shape[2:]
    assert o.is_contiguous() and o.shape[:2] == (B, S) and z.stop - z.start == H * V
    out = proj.new_empty(S, B, H * V) if out is None else out
    launch = _forward_launch(
        S * H, B, H, V, z.start, proj.stride(), out.stride(), eps, zero_centered
    )
    if launch is not None:
        launch(o, proj, gamma, out)
    return out


@lru_cache(maxsize=MOST_PLANS)
def _forward_launch(
    rows: int, B: int, H: int, V: int, z: int, strides: tuple[int, ...],
    out_strides: tuple[int, ...], eps: float, zero_centered: bool,
) -> Launch | None:  # fmt: skip
    """None where there are no rows."""
    if not rows * B:
        return None
    tile = norm_forward_tile(V)
    return Launch(
        gated_norm_forward_kernel,
        (triton.cdiv(rows, tile.rows), B),
        rows, z, *strides[:2], *out_strides[:2], eps,
        H=H, V=V, ROWS=tile.rows, BLOCK_V=block_dim(V), ZERO_CENTERED=zero_centered,
        num_warps=tile.warps,
    )  # fmt: skip


def gated_norm_backward(
    d_out: Tensor,
    o: Tensor,
    proj: Tensor,
    gamma: Tensor,
    z: slice,
    d_proj: Tensor,
    *,
    eps: float = 1e-6,
    zero_centered: bool = False,
    tile: Block | None = None,
) -> tuple[Tensor, Tensor]:
    """The backward of :func:`gated_norm_forward`; writes z's columns of ``d_proj``.

    Args:
        d_out: ``[S, B, H * V]``, columns adjacent.
        tile: overrides the table of :mod:`.tiles`, for tuning and tests.

    Returns:
        The gradient of o ``[B, S, H, V]`` in ``proj``'s dtype, and of gamma in its dtype.
    """
    S, B, _ = proj.shape
    H, V = o.shape[2:]
    if d_out.stride(2) != 1:
        d_out = d_out.contiguous()
    programs, launch = _backward_launch(
        S * H, B, H, V, z.start, proj.stride(), d_proj.stride(), d_out.stride(), eps,
        zero_centered, tile,
    )  # fmt: skip
    d_o = torch.empty_like(o, dtype=proj.dtype)
    partial = torch.empty(B * programs, V, dtype=torch.float32, device=o.device)
    if launch is not None:
        launch(o, proj, gamma, d_out, d_o, d_proj, partial)
    d_gamma = torch.empty_like(gamma)
    sum_rows(partial, d_gamma)
    return d_o, d_gamma


@lru_cache(maxsize=MOST_PLANS)
def _backward_launch(
    rows: int, B: int, H: int, V: int, z: int, strides: tuple[int, ...],
    d_strides: tuple[int, ...], out_strides: tuple[int, ...], eps: float, zero_centered: bool,
    tile: Block | None,
) -> tuple[int, Launch | None]:  # fmt: skip
    """Also how many programs share the rows of a batch row."""
    tile = norm_backward_tile(rows * B, V) if tile is None else tile
    programs = triton.cdiv(rows, tile.rows * tile.repeats)
    if not rows * B:
        return programs, None
    return programs, Launch(
        gated_norm_backward_kernel,
        (programs, B),
        rows, z, *strides[:2], *d_strides[:2], *out_strides[:2], eps,
        H=H, V=V, ROWS=tile.rows, REPEATS=tile.repeats, BLOCK_V=block_dim(V),
        ZERO_CENTERED=zero_centered, num_warps=tile.warps,
    )  # fmt: skip

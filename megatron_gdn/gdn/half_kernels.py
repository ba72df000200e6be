"""Scales gradients to fp16 in two Triton launches: find each key head's largest |x|,
then scale.

:mod:`.half_torch` is the plain-torch twin.

Legend: x gradients of tokens or of states; G key heads; H value heads; T rows of x per
key head (tokens, or rows of states); C columns of such a row; N tiles of rows; R rows
of a tile. x has RUN neighbouring rows of one key head (1 for tokens), then RUN rows of
the next key head.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..ops.kernels.launch import LAUNCH_CACHE_SIZE, Launch
from ..ops.kernels.tiles import block_dim, require_32_bits
from .half_torch import BIAS, MANTISSA

# the largest number of tiles; the second launch reads the maxima of all tiles
_MOST_TILES = 64
_ELEMENTS_PER_LOAD = 4096  # the number of elements that a program loads at a time


@triton.jit
def _largest_kernel(
    x_ptr,
    largest_ptr,
    T,
    tile_rows,
    G: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    RUN: tl.constexpr,
):
    """Store the fp32 bits of a key head's largest |x| in a tile of ``tile_rows`` rows;
    grid (N, G).

    x is ``[T / RUN, G, RUN, C]``, ``largest`` int32 ``[N, G]``. A program loads
    ``[ROWS, BLOCK_C]`` elements at a time. Bits without the sign, read as integers, are
    in the order of |x|. The bits of inf and NaN are the largest, and are skipped.
    """
    INFINITY: tl.constexpr = 0x7F800000
    g = tl.program_id(1)
    first = tl.program_id(0) * tile_rows
    c_C = tl.arange(0, BLOCK_C)
    largest_RC = tl.zeros((ROWS, BLOCK_C), tl.int32)
    for start in tl.range(0, tile_rows, ROWS):
        t_R = start + tl.arange(0, ROWS)
        real_RC = ((t_R < tile_rows) & (first + t_R < T))[:, None] & (c_C < C)[None, :]
        at_R = tl.cast(first + t_R, tl.int64)
        at_R = (at_R // RUN * G + g) * (RUN * C) + at_R % RUN * C
        x_RC = tl.load(x_ptr + at_R[:, None] + c_C[None, :], mask=real_RC, other=0.0)
        bits_RC = x_RC.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        bits_RC = tl.where(bits_RC < INFINITY, bits_RC, 0)
        largest_RC = tl.maximum(largest_RC, bits_RC)
    largest = tl.max(tl.max(largest_RC, axis=1), axis=0)
    tl.store(largest_ptr + tl.program_id(0) * G + g, largest)


@triton.jit
def _scale_kernel(
    x_ptr,
    out_ptr,
    largest_ptr,
    old_ptr,
    ratio_ptr,
    up_ptr,
    down_ptr,
    T,
    N,
    EXPONENT: tl.constexpr,
    BIAS: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWER: tl.constexpr,
    G: tl.constexpr,
    RATIO: tl.constexpr,
    C: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    TILES: tl.constexpr,
):
    """Write x times a power of two, in fp16, to ``out``; grid (tiles of ROWS rows, G).

    ``largest`` ``[N, G]`` has N <= TILES maxima for each key head. The power's exponent
    is EXPONENT minus the exponent of the largest maximum, clamped so that the power and
    its inverse are normal numbers. ``up`` gets the power, ``down`` the inverse power,
    for each of the head's RATIO value heads. With LOWER, x was scaled by the power
    ``old`` before. Then the new power is at most ``old``, x is scaled by new / old, and
    ``ratio`` gets this quotient. If the power stays, x is not read and not written.
    BIAS, MANTISSA: fp32's exponent bias, and its number of mantissa bits.
    """
    g = tl.program_id(1)
    n_N = tl.arange(0, TILES)
    largest = tl.max(tl.load(largest_ptr + n_N * G + g, mask=n_N < N, other=0), axis=0)
    exponent = tl.minimum(tl.maximum(EXPONENT - (largest >> MANTISSA), 1), 2 * BIAS - 1)
    first = tl.program_id(0) * ROWS
    c_C = tl.arange(0, BLOCK_C)
    t_R = tl.arange(0, ROWS)
    real_RC = (first + t_R < T)[:, None] & (c_C < C)[None, :]
    change = exponent
    if LOWER:
        old = tl.load(old_ptr + g * RATIO).to(tl.int32, bitcast=True) >> MANTISSA
        exponent = tl.minimum(old, exponent)
        change = tl.maximum(exponent - old + BIAS, 0)
        real_RC = real_RC & (exponent < old)
    factor = (change << MANTISSA).to(tl.float32, bitcast=True)
    if tl.program_id(0) == 0:
        up = (exponent << MANTISSA).to(tl.float32, bitcast=True)
        down = ((2 * BIAS - exponent) << MANTISSA).to(tl.float32, bitcast=True)
        for member in tl.static_range(RATIO):
            if LOWER:
                tl.store(ratio_ptr + g * RATIO + member, factor)
            tl.store(up_ptr + g * RATIO + member, up)
            tl.store(down_ptr + g * RATIO + member, down)
    base = tl.cast(first, tl.int64) * (G * C) + g * C
    at_RC = t_R[:, None] * (G * C) + c_C[None, :]
    x_RC = tl.load(x_ptr + base + at_RC, mask=real_RC).to(tl.float32)
    tl.store(out_ptr + base + at_RC, (x_RC * factor).to(tl.float16), mask=real_RC)


def _largest_of(
    x: Tensor, key_heads: int, columns: int, run: int = 1
) -> tuple[Tensor, int]:
    """The fp32 bits ``[N, G]`` of each key head's largest |x| in each tile, and N.

    x is ``[.., G, run, columns]``; ``run`` is RUN, ``columns`` is C.
    """
    tiles, launch = _largest_launch(
        x.numel() // (key_heads * columns), key_heads, columns, run
    )
    largest = torch.empty(tiles, key_heads, dtype=torch.int32, device=x.device)
    launch(x, largest)
    return largest, tiles


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _largest_launch(
    T: int, key_heads: int, columns: int, run: int
) -> tuple[int, Launch]:
    """The number N of tiles, and the launch of `_largest_kernel`; ``columns`` is C,
    ``run`` is RUN."""
    block = block_dim(columns)
    rows = max(1, _ELEMENTS_PER_LOAD // block)
    tile_rows = triton.cdiv(triton.cdiv(T, _MOST_TILES), rows) * rows
    tiles = triton.cdiv(T, max(1, tile_rows))
    require_32_bits("the number of rows of a key head", T + tile_rows + rows)
    return tiles, Launch(
        _largest_kernel,
        (tiles, key_heads),
        T,
        tile_rows,
        G=key_heads,
        C=columns,
        ROWS=rows,
        BLOCK_C=block,
        RUN=run,
        num_warps=4,
    )


@lru_cache(maxsize=LAUNCH_CACHE_SIZE)
def _scale_launch(
    T: int,
    tiles: int,
    log2_bound: int,
    key_heads: int,
    ratio: int,
    columns: int,
    lower: bool,
) -> Launch:
    """The launch of `_scale_kernel` that brings |x| below 2^log2_bound; ``tiles`` is N,
    ``ratio`` RATIO, ``columns`` C, ``lower`` LOWER."""
    block = block_dim(columns)
    # Most programs of LOWER read nothing, so they are fewer and larger.
    rows = max(1, (4 if lower else 1) * _ELEMENTS_PER_LOAD // block)
    require_32_bits("the number of rows of a key head", T + rows)
    require_32_bits("the number of elements of a tile", rows * key_heads * columns)
    return Launch(
        _scale_kernel,
        (max(1, triton.cdiv(T, rows)), key_heads),
        T,
        tiles,
        # as in `half_torch.power_exponent`
        EXPONENT=2 * BIAS - 1 + log2_bound,
        BIAS=BIAS,
        MANTISSA=MANTISSA,
        LOWER=lower,
        G=key_heads,
        RATIO=ratio,
        C=columns,
        ROWS=rows,
        BLOCK_C=block,
        TILES=_MOST_TILES,
        num_warps=4,
    )


def lower_powers(
    half: Tensor, up: Tensor, d_final: Tensor, key_heads: int, log2_bound: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Lower the powers of two ``up [H]`` of ``half``, in place, so that powers times
    ``d_final`` are below ``2^log2_bound``.

    Returns the ratios new / old, the new powers and their inverses, each ``[H]`` fp32,
    as :func:`.half_torch.lower_powers` does.
    """
    B, S, H, V = half.shape
    assert half.is_contiguous()
    ratio = H // key_heads
    K = d_final.shape[2]
    largest, tiles = _largest_of(
        d_final.contiguous(), key_heads, d_final.shape[3], ratio * K
    )
    ratio_H, up_H, down_H = torch.empty(
        3, H, dtype=torch.float32, device=half.device
    ).unbind()
    launch = _scale_launch(
        B * S, tiles, log2_bound, key_heads, ratio, ratio * V, lower=True
    )
    launch(half, half, largest, up, ratio_H, up_H, down_H)
    return ratio_H, up_H, down_H


def to_half(
    x: Tensor, key_heads: int, log2_bound: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Scale ``x [B, S, H, V]``, which is not fp64, to fp16 by powers of two, so that
    |x| < ``2^log2_bound``. The value heads of one key head have the same power.

    Returns the result, the powers of two and the inverse powers, each ``[H]`` fp32, as
    :func:`.half_torch.to_half` does.
    """
    x = x.contiguous()
    B, S, H, V = x.shape
    ratio = H // key_heads
    largest, tiles = _largest_of(x, key_heads, ratio * V)
    half = torch.empty_like(x, dtype=torch.float16)
    up, down = torch.empty(2, H, dtype=torch.float32, device=x.device).unbind()
    launch = _scale_launch(
        B * S, tiles, log2_bound, key_heads, ratio, ratio * V, lower=False
    )
    # None: only LOWER has old powers and ratios
    launch(x, half, largest, None, None, up, down)
    return half, up, down

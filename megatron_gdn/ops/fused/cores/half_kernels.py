"""Two Triton launches that bring gradients to fp16: the largest of every key head, then the rest.

The plain-torch twin, :mod:`.half_torch`, says what they do.

Legend: T tokens (of all batch rows), G key heads, H value heads, V value dim, C columns of one key
head (of all its value heads); N tiles of tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..tiles import block_dim
from .half_torch import BIAS, MANTISSA

_TILES = 64  # whose maxima every program of the second launch reads
_ELEMENTS = 4096  # of one step of a program


@triton.jit
def _largest_kernel(
    x_ptr, largest_ptr, T, tokens,
    G: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """grid (N, G): bits of the largest |x| in fp32 of one key head in ``tokens`` tokens.

    As integers, inf is above every number and NaN above inf.
    """
    g = tl.program_id(1)
    first = tl.program_id(0) * tokens
    c_C = tl.arange(0, BLOCK_C)
    x_ptr += tl.cast(first, tl.int64) * (G * C) + g * C
    largest_RC = tl.zeros((ROWS, BLOCK_C), tl.int32)
    for start in tl.range(0, tokens, ROWS):
        t_R = start + tl.arange(0, ROWS)
        real_RC = ((t_R < tokens) & (first + t_R < T))[:, None] & (c_C < C)[None, :]
        x_RC = tl.load(x_ptr + t_R[:, None] * (G * C) + c_C[None, :], mask=real_RC, other=0.0)
        bits_RC = x_RC.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        largest_RC = tl.maximum(largest_RC, bits_RC)
    largest = tl.max(tl.max(largest_RC, axis=1), axis=0)
    tl.store(largest_ptr + tl.program_id(0) * G + g, largest)


@triton.jit
def _scale_kernel(
    x_ptr, largest_ptr, ceiling_ptr, out_ptr, up_ptr, down_ptr, T, N,
    EXPONENT: tl.constexpr, BIAS: tl.constexpr, MANTISSA: tl.constexpr,
    G: tl.constexpr, RATIO: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr, TILES: tl.constexpr, HAS_CEILING: tl.constexpr,
):  # fmt: skip
    """grid (tiles of ROWS tokens, G). EXPONENT less the largest's is that of the power of two."""
    g = tl.program_id(1)
    n_N = tl.arange(0, TILES)
    largest = tl.max(tl.load(largest_ptr + n_N * G + g, mask=n_N < N, other=0), axis=0)
    exponent = tl.minimum(tl.maximum(EXPONENT - (largest >> MANTISSA), 1), 2 * BIAS - 1)
    if HAS_CEILING:
        exponent = tl.minimum(exponent, tl.load(ceiling_ptr + g))
    up = (exponent << MANTISSA).to(tl.float32, bitcast=True)
    if tl.program_id(0) == 0:
        down = ((2 * BIAS - exponent) << MANTISSA).to(tl.float32, bitcast=True)
        for member in tl.static_range(RATIO):
            tl.store(up_ptr + g * RATIO + member, up)
            tl.store(down_ptr + g * RATIO + member, down)
    first = tl.program_id(0) * ROWS
    c_C = tl.arange(0, BLOCK_C)
    t_R = tl.arange(0, ROWS)
    base = tl.cast(first, tl.int64) * (G * C) + g * C
    at_RC = t_R[:, None] * (G * C) + c_C[None, :]
    real_RC = (first + t_R < T)[:, None] & (c_C < C)[None, :]
    x_RC = tl.load(x_ptr + base + at_RC, mask=real_RC, other=0.0).to(tl.float32)
    tl.store(out_ptr + base + at_RC, (x_RC * up).to(tl.float16), mask=real_RC)


def to_half(
    x: Tensor, key_heads: int, largest: int, ceiling: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """As :func:`.half_torch.to_half`, for any dtype but fp64."""
    x = x.contiguous()
    B, S, H, V = x.shape
    T, C = B * S, H // key_heads * V
    block = block_dim(C)
    rows = max(1, _ELEMENTS // block)
    tokens = triton.cdiv(triton.cdiv(T, _TILES), rows) * rows
    tiles = triton.cdiv(T, max(1, tokens))
    half = torch.empty_like(x, dtype=torch.float16)
    up, down = torch.empty(2, H, dtype=torch.float32, device=x.device)
    found = torch.empty(tiles, key_heads, dtype=torch.int32, device=x.device)
    size = {"G": key_heads, "C": C, "ROWS": rows, "BLOCK_C": block, "num_warps": 4}
    if T:
        _largest_kernel[(tiles, key_heads)](x, found, T, tokens, **size)
    _scale_kernel[(max(1, triton.cdiv(T, rows)), key_heads)](
        x, found, ceiling, half, up, down, T, tiles,
        EXPONENT=2 * BIAS - 1 + largest, BIAS=BIAS, MANTISSA=MANTISSA, RATIO=H // key_heads,
        TILES=_TILES, HAS_CEILING=ceiling is not None, **size,
    )  # fmt: skip
    return half, up, down

"""Inputs and gradients of the state-space dual (SSD): linear attention with a scalar decay.

    S_t = exp(g_t) S_{t-1} + dt_t B_t x_t^T        o_t = S_t^T C_t + D_t x_t

per head; heads h R .. h R + R - 1 read group h of B and C (Dao, Gu, *Transformers are SSMs*, 2024).

Legend: B batch, S seq, G groups, H heads, R = H / G, K state dim, V head dim.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ...documents import Documents

UNLIMITED = (0.0, math.inf)


class SSDInputs(NamedTuple):
    """What the front makes; also the gradients of these, in the same shapes."""

    x: Tensor  # [B, S, H, V]
    B: Tensor  # [B, S, G, K], the keys
    C: Tensor  # [B, S, G, K], the queries
    dt: Tensor  # [B, S, H] fp32, >= 0
    g: Tensor  # [B, S, H] fp32 log-decay, <= 0
    D: Tensor  # [B, S, H, 1 or V] fp32; a parameter, so all tokens share its memory


def sequence_lengths(inputs: SSDInputs, documents: Documents | None) -> tuple[int, ...]:
    """Tokens of the N sequences: batch rows, or non-empty documents of all rows end to end."""
    if documents is None:
        rows, tokens = inputs.x.shape[:2]
        return (tokens,) * rows
    return tuple(n for n in documents.lengths if n) or (0,)


def decays_of_sequences(g: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """``[N, H]``: what is left of a state after every sequence, ``exp(sum of g)``."""
    sums = [x.sum(0) for x in g.flatten(0, 1).split(lengths)]
    return torch.stack(sums).exp()


def wide_dtype(x: Tensor) -> torch.dtype:
    """fp32, or fp64 for fp64."""
    return torch.promote_types(x.dtype, torch.float32)

"""Rows with both gates in full width, from what in_proj gives.

Legend: s tokens, B batch, p width of in_proj, P width of a row, r columns of a narrow half on one
of tp tensor-parallel ranks, R = tp r of them, C columns of a gate.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from torch import Tensor

from ...ops.layout import Layout


def full_rows(narrow: Tensor, in_proj: Layout, row: Layout, group: Any, *weights: Tensor) -> Tensor:
    """``[s, B, p]`` to ``[s, B, P]``. The backward keeps the narrow halves ``[s, B, R]``.

    Args:
        narrow: in_proj's rows.
        in_proj, row: their sections, and those of a row, in one order; the narrow half of ``f`` is
            called ``f_a``.
        group: the tensor-parallel ranks, which share the columns of the narrow halves.
        weights: ``[C, R]`` of every gate that has a narrow half, this rank's heads.
    """
    sections = list(narrow.split(in_proj.widths, -1))
    halved = [i for i, name in enumerate(row.names) if name != in_proj.names[i]]
    own = torch.cat([sections[i] for i in halved], -1)
    of_ranks = all_gather_last_dim_from_tensor_parallel_region(own, group)
    lows = of_ranks.unflatten(-1, (group.size(), -1)).split([in_proj.widths[i] for i in halved], -1)
    for i, low, weight in zip(halved, lows, weights, strict=True):
        # Contiguous: a view would keep all of ``own``, and its strides change a product's bits.
        sections[i] = F.linear(low.flatten(-2).contiguous(), weight)
    return torch.cat(sections, -1)

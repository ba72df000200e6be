"""The projections of a transformers linear-attention module, as the mixer's rows.

    side by side  the outputs of the family's projections, in the order of the rows' sections
    Qwen3-Next    in_proj_qkvz: per key head [q | k | v of its value heads | z of them]
                  in_proj_ba:   per key head [b of its value heads | a of them]

Legend: B batch, S tokens, H hidden size, P width of the mixer's rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...gdn.hf import ba_rows, qkvz_rows
from .families import LinearAttention, family_of


def project(module: LinearAttention, x_BSH: Tensor, dims: Any) -> Tensor:
    """``[B, S, P]``, rows with the sections of ``dims.layout``.

    The projections are called as modules, so adapters and hooks on them work.
    """
    names = family_of(module).projections
    if names:
        return torch.cat([_called(module, name, x_BSH) for name in names], dim=-1)
    heads = dims.num_key_heads
    qkvz, ba = (getattr(module, f"in_proj_{name}")(x_BSH) for name in ("qkvz", "ba"))
    qkvz = qkvz.unflatten(-1, (heads, -1)).split(qkvz_rows(dims), -1)
    ba = ba.unflatten(-1, (heads, -1)).split(ba_rows(dims), -1)
    return torch.cat([section.flatten(-2) for section in (*qkvz, *ba)], dim=-1)


def _called(module: LinearAttention, chain: str, x_BSH: Tensor) -> Tensor:
    for name in chain.split(" > "):
        x_BSH = module.get_submodule(name)(x_BSH)
    return x_BSH

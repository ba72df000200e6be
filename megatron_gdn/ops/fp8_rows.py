"""Rows that a kernel writes in FP8, for a linear that multiplies in FP8 with delayed scaling.

    data = round(clamp(x * scale));    amax = max(amax, max |x|)

The scale was made of earlier steps' amax, so it is known before x is. The linear gets its operand
as it reads it, and no pass rounds rows that were written wide before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Scaling(NamedTuple):
    """Both ``[1]``, fp32, on the rows' device."""

    scale: Tensor
    amax: Tensor  # of |x|, raised in place


NO_SCALING = (None, None)  # in place of its tensors, for a kernel


class Fp8Rows(NamedTuple):
    """How rows are written in FP8.

    Attributes:
        dtype: ``torch.float8_e5m2`` or ``torch.float8_e4m3fn``.
        scaling: asked for when the rows are written.
        wrapped: makes of the written rows the tensor that the linear takes.
    """

    dtype: torch.dtype
    scaling: Callable[[], Scaling]
    wrapped: Callable[[Tensor], Tensor]


class Fp8Operands(NamedTuple):
    """Which rows of a mixer are written in FP8; None: in their own dtype."""

    gradient: Fp8Rows | None = None  # of the projection rows
    mixed: Fp8Rows | None = None  # the rows for out_proj


WIDE = Fp8Operands()


def quantised(x: Tensor, scaling: Scaling, dtype: torch.dtype) -> Tensor:
    """``x`` as a kernel writes it, in plain torch."""
    scaling.amax.copy_(torch.maximum(scaling.amax, x.abs().amax().to(scaling.amax.dtype)))
    most = torch.finfo(dtype).max
    return (x * scaling.scale).clamp(-most, most).to(dtype)

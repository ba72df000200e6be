"""Batch rows laid end to end, as kernels for one long row take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def in_one_row(x: Any) -> Any:
    """``[B, S, ...]`` to ``[1, B S, ...]``, batch rows end to end, without a copy; None stays."""
    if x is None or x.shape[0] == 1:
        return x
    return x.reshape(1, x.shape[0] * x.shape[1], *x.shape[2:])


def in_rows(x: Tensor, rows: Sequence[int]) -> Tensor:
    """The reverse of :func:`in_one_row`, to ``rows`` = ``[B, S]``."""
    return x if x.shape[0] == rows[0] else x.reshape(*rows, *x.shape[2:])

"""The fp32 parameters of a mixer, each declared by an :class:`Fp32Parameter`, and their
usual first values.

A mixer class lists these declarations in ``fp32``, in the order in which its front
takes the parameters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..ops.layout import Layout


@dataclass(frozen=True, kw_only=True)
class Fp32Parameter:
    """The declaration of a parameter that stays in fp32.

    It has a value for each head of one section of projection rows, or for each column
    of these heads.
    """

    name: str  # the attribute of the mixer, and the key in checkpoints
    section: str  # the section of a projection row whose heads have the values
    # A function ``first_values(mixer, x)`` that fills ``x``, the values of all
    # tensor-parallel ranks. Or a number that all values get; then no random number is
    # drawn.
    first_values: Callable[..., object] | float
    # whether every column of a head has a value of its own
    has_value_per_column: bool = False
    # Megatron's layers register this parameter before the others. Optimizers number
    # parameters in this order, so it is part of checkpoints.
    is_registered_first: bool = False

    def count(self, layout: Layout) -> int:
        """The number of values for the heads of ``layout``."""
        heads, width = layout.shape_of(self.section)
        if self.has_value_per_column:
            return heads * width
        return heads


def fill_A_log(mixer: Any, A_log: Tensor) -> None:
    """Fill ``A_log`` with the logarithms of numbers drawn from U(A_init_range)."""
    low, high = mixer.A_init_range
    A_log.uniform_(low, high)
    if low == 0:
        # A draw may be 0, and log(0) is -inf. The least draw above 0 is high * 2**-24.
        A_log.clamp_(min=high * 2**-24)
    A_log.log_()


def fill_with_ones(mixer: object, x: Tensor) -> None:
    """Fill ``x`` with 1.

    The number 1 in place of this function would draw no seed, and so change the first
    values of later parameters.
    """
    x.fill_(1)


def fill_dt_bias(mixer: Any, dt_bias: Tensor) -> None:
    """Fill ``dt_bias`` so that softplus(dt_bias) is log-uniform in
    ``dt_init_range``."""
    low, high = map(math.log, mixer.dt_init_range)
    dt = dt_bias.uniform_(low, high).exp_().clamp_(min=mixer.dt_init_floor)
    # the inverse of softplus
    dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))

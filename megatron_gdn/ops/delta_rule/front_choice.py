"""The choice of a front's kernels: Triton, plain torch, or causal-conv1d with the rest in torch."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from ..front.conv_package import convolve_rows, why_not_conv_package
from ..obstacles import say_once, why_not_triton
from . import front_torch
from .base import HeadSizes

# The plain twin with its convolution by the package causal-conv1d.
front_conv_package = SimpleNamespace(
    prepare_forward=partial(front_torch.prepare_forward, convolve=convolve_rows),
    prepare_backward=partial(front_torch.prepare_backward, convolve=convolve_rows),
)


def is_triton(kernels: Any) -> bool:
    """Whether :func:`kernels_for` returned the Triton kernels."""
    return kernels not in (front_torch, front_conv_package)


def kernels_for(
    device: str,
    dtype: torch.dtype,
    taps: int,
    sizes: HeadSizes,
    kernels: str = "auto",
    aligned: bool = False,
) -> Any:
    """The functions of a front: our Triton kernels or their plain-torch twins.

    Args:
        kernels: ``"auto"`` (Triton on a GPU, for 2 to 8 taps and any dtype but fp64), ``"triton"``
            or ``"torch"``. Where ``"auto"`` cannot take Triton on a GPU, causal-conv1d computes the
            convolution if it is installed, unless the rows are ``aligned``.
    """
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown kernels {kernels!r}; use 'auto', 'triton' or 'torch'.")
    if kernels == "torch":
        return front_torch
    why = why_not_triton(device, dtype, taps) if kernels == "auto" else None
    if why is None:
        from . import front_triton

        return front_triton
    if device == "cuda":
        why_not = why_not_conv_package(device, dtype, taps, sizes.layout.conv_widths, aligned)
        if why_not is None:
            which = "gates and norm in plain torch, conv by causal-conv1d"
            say_once(f"Gated DeltaNet runs {which}: {why}.", device)
            return front_conv_package
        why = f"{why}; {why_not}"
    say_once(f"Gated DeltaNet runs conv, gates and norm in plain torch: {why}.", device)
    return front_torch

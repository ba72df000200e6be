"""The choice of a front's kernels: Triton, plain torch, or causal-conv1d with the rest in torch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from ..conv import convolve_rows, package_convolution, why_not_conv_package
from ..obstacles import say_once, why_not_triton
from ..rules.base import Bits
from .plain import PlainFront
from .table import FrontTable, TableFront

# Conv + SiLU by causal-conv1d, where :func:`..conv.why_not_conv_package` has no objection.
PACKAGE = partial(convolve_rows, convolution=package_convolution)


def front_of(
    table: FrontTable,
    device: str,
    rows_dtype: torch.dtype,
    taps: int,
    kernels: str = "auto",
    bits: Bits = Bits.FREE,
    **options: Any,
) -> TableFront:
    """The front of rows in ``rows_dtype``, with options of :class:`TableFront`.

    Args:
        kernels: ``"auto"`` (Triton on a GPU, for 2 to 8 taps and any dtype but fp64), ``"triton"``
            or ``"torch"``. Where ``"auto"`` cannot take Triton on a GPU, causal-conv1d computes the
            convolution if it is installed, unless ``bits`` bars it.
        bits: what is promised, as by the rule that the front is for.
    """
    if kernels not in ("auto", "triton", "torch"):
        raise ValueError(f"unknown kernels {kernels!r}; use 'auto', 'triton' or 'torch'.")
    options["batch_invariant"] = bits >= Bits.DETERMINISTIC
    if kernels == "torch":
        return PlainFront(table, **options)
    why = why_not_triton(device, rows_dtype, taps) if kernels == "auto" else None
    if why is None:
        from .launches import TritonFront

        return TritonFront(table, **options)
    if device == "cuda":
        why_not = why_not_conv_package(device, rows_dtype, taps, table.layout.conv_widths)
        if bits is Bits.ON_GRID:
            why_not = (
                "causal-conv1d was not seen to keep a token's bits, which batch_invariant_mode asks"
            )
        if why_not is None:
            say_once(f"gates and norm run in plain torch, conv by causal-conv1d: {why}.", device)
            return PlainFront(table, **options, convolve=PACKAGE)
        why = f"{why}; {why_not}"
    say_once(f"conv, gates and norm run in plain torch: {why}.", device)
    return PlainFront(table, **options)

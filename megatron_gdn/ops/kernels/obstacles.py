"""Why our Triton kernels cannot run: device, dtype, sizes, packages."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch


@cache
def why_not_triton(device: str, dtype: torch.dtype, taps: int) -> str | None:
    """Why our Triton kernels cannot run on rows like these; None if they can."""
    if device != "cuda":
        return f"the Triton kernels run on a GPU, not on {device}"
    if dtype == torch.float64:
        return "the Triton kernels compute in fp32, not in fp64"
    if not 2 <= taps <= 8:
        return f"the Triton kernels take 2 to 8 conv taps, not {taps}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None

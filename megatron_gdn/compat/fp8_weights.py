"""Weights that Transformer Engine stores in FP8 (``fp8_param``), read without importing it."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def dequantised(tensor: Tensor) -> Tensor:
    """The values of a weight that Transformer Engine (2.0 and newer) stores in FP8.

    Any other tensor is returned itself.
    """
    # Where nobody imported it, no tensor is of its class.
    engine: Any = sys.modules.get("transformer_engine.pytorch.tensor")
    stored = getattr(engine, "QuantizedTensor", ())
    for held in (tensor, tensor.data):  # a parameter may hold it as its data
        if isinstance(held, stored):
            return held.dequantize()
    return tensor

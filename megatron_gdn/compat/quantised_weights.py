"""Weights that Transformer Engine stores quantised (``fp8_param``), read without importing it."""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor


def stored_quantised(tensor: Tensor) -> bool:
    """Whether Transformer Engine (2.0 and newer) stores this weight quantised."""
    # Where nobody imported it, no tensor is of its class.
    engine: Any = sys.modules.get("transformer_engine.pytorch.tensor")
    return isinstance(tensor, getattr(engine, "QuantizedTensor", ()))


def dequantised(tensor: Tensor) -> Tensor:
    """The values of a weight that is stored quantised; any other tensor itself."""
    return tensor.dequantize() if stored_quantised(tensor) else tensor

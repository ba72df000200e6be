"""SiLU, sigmoid and softplus whose bits depend on the element alone, on a CPU too.

On a CPU, torch computes whole vectors of a tensor with one code and the last few elements with
another, which rounds differently. A token's value would then depend on how many tokens follow it:
a packed document would differ in its last bits from the same document alone. Here a tensor is
filled up to whole vectors first. (With several threads, torch cuts a tensor of more than 32768
elements at other places. So this holds for one thread, or for smaller tensors.)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_WHOLE = 64  # elements: torch takes two vectors at a time, 2 * 512 bits / 16 bits at most


def silu(x: Tensor) -> Tensor:
    """``x * sigmoid(x)``, of any shape."""
    return _in_whole_vectors(F.silu, x)


def sigmoid(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``, of any shape."""
    return _in_whole_vectors(torch.sigmoid, x)


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``, of any shape; x itself above 20."""
    return _in_whole_vectors(F.softplus, x)


def _in_whole_vectors(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    if x.device.type != "cpu":
        return function(x)
    flat = x.reshape(-1)
    missing = -len(flat) % _WHOLE
    if not missing:
        return function(flat).view(x.shape)
    return function(F.pad(flat, (0, missing)))[: len(flat)].view(x.shape)

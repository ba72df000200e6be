"""Spares the mixer's buffers the fill that deterministic mode gives to uninitialised memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.utils.deterministic


@contextmanager
def unfilled_memory() -> Iterator[None]:
    """Hand out memory as it is, inside code that writes every element before it reads any.

    Under ``torch.use_deterministic_algorithms(True)`` torch fills whatever ``torch.empty`` returns
    with NaN, so that a program that reads it at least repeats. The kernels' buffers are about twice
    the layer's activations, and filling them is a launch each and as many bytes again as the
    kernels write. That nothing unwritten is read is tested, over memory poisoned with NaN
    (:mod:`megatron_gdn.testing`).
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    settings = torch.utils.deterministic
    kept = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        settings.fill_uninitialized_memory = kept

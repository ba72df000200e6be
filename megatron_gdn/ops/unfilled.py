"""Spares the mixer's buffers the fill that deterministic mode gives to uninitialised memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import torch
import torch.utils.deterministic

_lock = Lock()
_inside, _kept = 0, True


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
    global _inside, _kept
    settings = torch.utils.deterministic
    with _lock:  # the setting is the process's, and backward passes run in threads of their own
        if _inside == 0:
            _kept = settings.fill_uninitialized_memory
            settings.fill_uninitialized_memory = False
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                settings.fill_uninitialized_memory = _kept

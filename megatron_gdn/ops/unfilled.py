"""Switches off, for the mixer's buffers, the fill of uninitialised memory in deterministic mode."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Lock
from typing import Any, cast

import torch
import torch.utils.deterministic

_lock = Lock()
_inside, _kept = 0, True


@contextmanager
def unfilled_memory() -> Iterator[None]:
    """Inside, ``torch.empty`` fills nothing: for code that writes every element before reading it.

    Under ``torch.use_deterministic_algorithms(True)`` torch fills what ``torch.empty`` returns with
    NaN, so that a program that reads it gives the same result in every run. The kernels' buffers
    are about twice the layer's activations. To fill them takes one launch each and writes as many
    bytes as the kernels do.
    Tests over memory poisoned with NaN show that no unwritten element is read.
    """
    if not torch.are_deterministic_algorithms_enabled():
        yield
        return
    global _inside, _kept
    settings = cast(Any, torch.utils.deterministic)  # torch declares no types for it
    with _lock:  # one setting per process, and backward passes run in other threads
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


def leaves_memory_unfilled[**Arguments, Made](
    function: Callable[Arguments, Made],
) -> Callable[Arguments, Made]:
    """``function`` inside :func:`unfilled_memory`, entered only if torch would fill memory."""

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        if not torch.are_deterministic_algorithms_enabled():
            return function(*args, **kwargs)
        with unfilled_memory():
            return function(*args, **kwargs)

    return call

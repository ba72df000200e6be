"""Settings of the whole process that the mixer changes while it runs: fp32 products, memory."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.utils.deterministic

_REDUCED = ("tf32", "bf16")


class _Switch:
    """A context manager for several threads: the first that enters calls ``turn``, which returns
    the function that the last one calls when it leaves.
    """

    def __init__(self, turn: Callable[[], Callable[[], None] | None]) -> None:
        self._turn, self._turn_back = turn, None
        self._inside, self._lock = 0, threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            if self._inside == 0:
                self._turn_back = self._turn()
            self._inside += 1

    def __exit__(self, *_error: Any) -> None:
        with self._lock:
            self._inside -= 1
            if self._inside == 0 and self._turn_back is not None:
                self._turn_back()


def full_fp32_matmul(device_type: str) -> AbstractContextManager[None]:
    """fp32 products with 24-bit factors: autocast and the TF32 switches have no effect inside.

    The rule sums over thousands of tokens, for which 11-bit factors are too coarse.
    """
    switch = _full_fp32[device_type == "cuda"]
    # Entering autocast costs more than a small product, so this is skipped if autocast is off.
    return (
        _outside_autocast(device_type, switch) if torch.is_autocast_enabled(device_type) else switch
    )


@contextmanager
def _outside_autocast(device_type: str, switch: _Switch) -> Iterator[None]:
    with torch.autocast(device_type, enabled=False), switch:
        yield


def _turn(cuda: bool) -> Callable[[], None] | None:
    """Turn the switches to full fp32; returns what restores them, None if nothing changed."""
    backend = torch.backends.cuda if cuda else torch.backends.mkldnn
    matmul: Any = getattr(backend, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):  # torch < 2.9
        precision = torch.get_float32_matmul_precision()
        if precision == "highest":
            return None
        torch.set_float32_matmul_precision("highest")
        return lambda: torch.set_float32_matmul_precision(precision)
    kept = matmul.fp32_precision
    if kept not in _REDUCED:
        return None
    if cuda and (old := _old_switch()) is not None:
        # Turn the old switch: if a new switch contradicts it, torch refuses to read the old one.
        matmul.allow_tf32 = False
        return lambda: _put_back_old(old)
    matmul.fp32_precision = "ieee"
    return lambda: _put_back(matmul, kept)


def _old_switch() -> str | None:
    """``torch.get_float32_matmul_precision()``; None if a new switch contradicts it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _put_back_old(precision: str) -> None:
    """Set torch's old switch, and restore the CPU's switch, which the old one also sets."""
    host: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - torch declares no type
    kept_host = host.fp32_precision
    torch.set_float32_matmul_precision(precision)
    _put_back(host, kept_host)


def _put_back(switch: Any, kept: str) -> None:
    """Restore ``kept``: follow the more general switch if this gives ``kept``, else set it."""
    switch.fp32_precision = "none"
    if switch.fp32_precision != kept:
        switch.fp32_precision = kept


_full_fp32 = [_Switch(partial(_turn, False)), _Switch(partial(_turn, True))]


def leaves_memory_unfilled[**Arguments, Made](
    function: Callable[Arguments, Made],
) -> Callable[Arguments, Made]:
    """``function``, inside which ``torch.empty`` fills nothing: it writes before it reads.

    In deterministic mode torch fills with NaN what ``torch.empty`` returns: one launch for each
    buffer of the kernels. Tests over memory poisoned with NaN show that no unwritten element is
    read.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        if not torch.are_deterministic_algorithms_enabled():
            return function(*args, **kwargs)
        with _unfilled:
            return function(*args, **kwargs)

    return call


def _do_not_fill() -> Callable[[], None]:
    settings = cast(Any, torch.utils.deterministic)  # torch declares no types for it
    kept, settings.fill_uninitialized_memory = settings.fill_uninitialized_memory, False
    return lambda: setattr(settings, "fill_uninitialized_memory", kept)


_unfilled = _Switch(_do_not_fill)

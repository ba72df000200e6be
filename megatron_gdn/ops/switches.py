"""Process-wide settings of torch that a mixer changes while the mixer runs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from typing import Any, cast

import torch
import torch.utils.deterministic

_REDUCED_PRECISIONS = ("tf32", "bf16")


class _ProcessWideSetting:
    """A context in which a setting of the process is changed, for all threads.

    The first thread that enters calls ``change``. The last thread that leaves calls the
    function that ``change`` returned, which undoes the change (None: nothing was
    changed).
    """

    def __init__(self, change: Callable[[], Callable[[], None] | None]) -> None:
        """``change`` changes the setting, and returns the function that undoes the
        change, or None."""
        self._change = change
        self._undo = None
        self._threads_inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        """Change the setting, unless another thread is inside already."""
        with self._lock:
            if self._threads_inside == 0:
                self._undo = self._change()
            self._threads_inside += 1

    def __exit__(self, *_error: object) -> None:
        """Undo the change if no other thread is inside."""
        with self._lock:
            self._threads_inside -= 1
            if self._threads_inside == 0 and self._undo is not None:
                self._undo()


def full_fp32_matmul(device_type: str) -> AbstractContextManager[None]:
    """A context in which matrix products do not round fp32 factors, even under autocast
    or if the user switched TF32 on.

    The rule sums over thousands of tokens; TF32's factors of 11 bits are too coarse for
    this.
    """
    if device_type == "cuda":
        switch = _full_fp32_on_gpu
    else:
        switch = _full_fp32_on_cpu
    # Entering torch.autocast takes longer than a small product, so enter it only if
    # autocast is on.
    if not torch.is_autocast_enabled(device_type):
        return switch
    return _outside_autocast(device_type, switch)


@contextmanager
def _outside_autocast(device_type: str, switch: _ProcessWideSetting) -> Iterator[None]:
    """A context in which autocast is off and ``switch`` is on."""
    with torch.autocast(device_type, enabled=False), switch:
        yield


def _set_full_fp32(cuda: bool) -> Callable[[], None] | None:
    """Set full fp32 for products on a GPU (``cuda``) or on a CPU.

    torch has an old switch, float32_matmul_precision, which also sets the new ones.
    Since 2.9 it has a new switch for each backend, ``matmul.fp32_precision``. Returns a
    function that restores the setting; None if nothing was changed.
    """
    if cuda:
        backend = torch.backends.cuda
    else:
        backend = torch.backends.mkldnn
    matmul: Any = getattr(backend, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):  # torch < 2.9
        precision = torch.get_float32_matmul_precision()
        if precision == "highest":
            return None
        torch.set_float32_matmul_precision("highest")
        return lambda: torch.set_float32_matmul_precision(precision)
    kept = matmul.fp32_precision
    if kept not in _REDUCED_PRECISIONS:
        return None
    if cuda and (old := _old_switch()) is not None:
        # This also sets the old switch, which torch refuses to read if a new switch
        # contradicts it.
        matmul.allow_tf32 = False
        return lambda: _restore_old_switch(old)
    matmul.fp32_precision = "ieee"
    return lambda: _restore_switch(matmul, kept)


def _old_switch() -> str | None:
    """``torch.get_float32_matmul_precision()``; None if a new switch contradicts it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _restore_old_switch(precision: str) -> None:
    """Set the old switch, float32_matmul_precision, to ``precision``. Then give the
    CPU's new switch its value back, which the old switch may have changed."""
    host: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - torch declares no type
    kept_host = host.fp32_precision
    torch.set_float32_matmul_precision(precision)
    _restore_switch(host, kept_host)


def _restore_switch(switch: Any, value: str) -> None:
    """Give ``switch`` its former ``value``: let it follow torch's general switch if the
    general switch has this value, else set it."""
    switch.fp32_precision = "none"
    if switch.fp32_precision != value:
        switch.fp32_precision = value


_full_fp32_on_cpu = _ProcessWideSetting(partial(_set_full_fp32, False))
_full_fp32_on_gpu = _ProcessWideSetting(partial(_set_full_fp32, True))


def leaves_memory_unfilled[**Arguments, Made](
    function: Callable[Arguments, Made],
) -> Callable[Arguments, Made]:
    """A decorator: in ``function`` torch does not fill new memory.

    In deterministic mode torch fills every result of ``torch.empty`` with NaN, by one
    launch each. The mixers need no filling: they write every element before they read
    it, as tests show.
    """

    @wraps(function)
    def call(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Made:
        """Run ``function``; torch does not fill new memory until it returns."""
        if not torch.are_deterministic_algorithms_enabled():
            return function(*args, **kwargs)
        with _memory_unfilled:
            return function(*args, **kwargs)

    return call


def _do_not_fill() -> Callable[[], None]:
    """Switch torch's filling of new memory off; return a function that restores it."""
    # torch declares no type for this attribute
    settings = cast(Any, torch.utils.deterministic)
    kept = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    return lambda: setattr(settings, "fill_uninitialized_memory", kept)


_memory_unfilled = _ProcessWideSetting(_do_not_fill)

"""Keeps fp32 matrix products in fp32."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

_REDUCED = ("tf32", "bf16")


@contextmanager
def full_fp32_matmul(device_type: str) -> Iterator[None]:
    """fp32 products with 24-bit factors; autocast and the TF32 switches have no effect inside.

    ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.set_float32_matmul_precision`` are meant
    for the model's projections. The rule sums over thousands of tokens, for which 11-bit factors
    are too coarse. The switches hold for the whole process and are read when a product is launched.
    So the first thread that enters turns them off, and the last one that leaves restores them;
    other products of the process are in full fp32 meanwhile.
    """
    # Entering autocast costs more than a small product, so this is skipped if autocast is off.
    autocasts = torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False) if autocasts else nullcontext():
        with _lock:
            users = _users.setdefault(device_type, _Users())
            if users.count == 0:
                users.put_back = _turn(device_type)
            users.count += 1
        try:
            yield
        finally:
            with _lock:
                users.count -= 1
                if users.count == 0:
                    users.put_back()


@dataclass
class _Users:
    """How many threads are inside :func:`full_fp32_matmul`, and what the last of them calls."""

    count: int = 0
    put_back: Callable[[], None] = lambda: None


_lock = threading.Lock()
_users: dict[str, _Users] = {}  # by device type: each has switches of its own


def _turn(device_type: str) -> Callable[[], None]:
    """Turn the switches to full fp32; returns a function that restores them."""
    backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
    matmul: Any = getattr(backend, "matmul", None)
    if not hasattr(matmul, "fp32_precision"):  # torch < 2.9
        precision = torch.get_float32_matmul_precision()
        if precision == "highest":
            return _nothing
        torch.set_float32_matmul_precision("highest")
        return lambda: torch.set_float32_matmul_precision(precision)
    kept = matmul.fp32_precision
    if kept not in _REDUCED:
        return _nothing
    if device_type == "cuda" and (old := _old_switch()) is not None:
        # Turn the old switch: if a new switch contradicts it, torch refuses to read the old one.
        matmul.allow_tf32 = False
        return lambda: _put_back_old(old)
    matmul.fp32_precision = "ieee"
    return lambda: _put_back(matmul, kept)


def _nothing() -> None:
    """The switches were in full fp32 already."""


def _old_switch() -> str | None:
    """``torch.get_float32_matmul_precision()``; None if a new switch contradicts it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _put_back_old(precision: str) -> None:
    """Set torch's old switch. This also sets the CPU's switch, so that one is restored after."""
    host: Any = getattr(torch.backends.mkldnn, "matmul")  # noqa: B009 - torch declares no type
    kept_host = host.fp32_precision
    torch.set_float32_matmul_precision(precision)
    _put_back(host, kept_host)


def _put_back(switch: Any, kept: str) -> None:
    """Restore ``kept``: follow the more general switch if this gives ``kept``, else set it."""
    switch.fp32_precision = "none"
    if switch.fp32_precision != kept:
        switch.fp32_precision = kept

"""Keeps fp32 matrix products in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

_REDUCED = ("tf32", "bf16")


@contextmanager
def full_fp32_matmul(device_type: str) -> Iterator[None]:
    """fp32 products with 24-bit factors, whatever autocast and the TF32 switches say.

    ``torch.backends.cuda.matmul.allow_tf32`` and ``torch.set_float32_matmul_precision`` are for
    the model's own projections; sums over thousands of tokens with 11-bit factors are another
    model. The switches are torch's global ones: they are read when a product is launched, and put
    back at the end.
    """
    backend = torch.backends.cuda if device_type == "cuda" else torch.backends.mkldnn
    matmul = getattr(backend, "matmul", None)
    # Entering autocast costs more than a small product, so it is left alone where it is off.
    autocasts = torch.is_autocast_enabled(device_type)
    with torch.autocast(device_type, enabled=False) if autocasts else nullcontext():
        if not hasattr(matmul, "fp32_precision"):  # torch < 2.9
            with _legacy_full_fp32():
                yield
        elif (kept := matmul.fp32_precision) not in _REDUCED:
            yield
        elif device_type == "cuda" and (old := _old_switch()) is not None:
            # By the switch it was set with: torch refuses to read it while a new one contradicts.
            host = torch.backends.mkldnn.matmul
            kept_host = host.fp32_precision
            matmul.allow_tf32 = False
            try:
                yield
            finally:
                torch.set_float32_matmul_precision(old)
                _put_back(host, kept_host)
        else:
            matmul.fp32_precision = "ieee"
            try:
                yield
            finally:
                _put_back(matmul, kept)


def _old_switch() -> str | None:
    """``torch.get_float32_matmul_precision()``; None where a new switch contradicts it."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _put_back(switch: Any, kept: str) -> None:
    """A switch that followed a more general one shall follow it again."""
    switch.fp32_precision = "none"
    if switch.fp32_precision != kept:
        switch.fp32_precision = kept


@contextmanager
def _legacy_full_fp32() -> Iterator[None]:
    kept = torch.get_float32_matmul_precision()
    if kept == "highest":
        yield
        return
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(kept)

"""Implementations of the delta rule for the mixer, and the choice among them."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import torch

from ...fla import why_not_fla
from ..once import say_once
from ..sizes import HeadSizes
from .base import Core, RuleGrads, RuleInputs
from .torch_rule import TorchCore

__all__ = ["CORES", "Choice", "Core", "RuleGrads", "RuleInputs", "resolve_core"]

CORES = ("flash_qla", "fla", "reference")
_FLASH_QLA_OLDEST = (0, 1, 3)  # earlier ones race, and round dg through bf16
_FLASH_QLA_CAPABILITIES = ((9, 0), (10, 0), (10, 3))


class Choice(NamedTuple):
    core: Core
    reason: str


@cache
def _flash_qla_is_missing() -> str | None:
    if find_spec("flash_qla") is None:
        return "flash-qla is not installed (pip install 'flash-qla>=0.1.3')"
    try:
        installed = version("flash-qla")
    except PackageNotFoundError:
        return "flash_qla carries no version; install flash-qla 0.1.3 or newer from a wheel"
    numbers = tuple(int(part) for part in installed.split("+")[0].split(".")[:3] if part.isdigit())
    if numbers < _FLASH_QLA_OLDEST:
        return f"flash-qla {installed} computes wrong gradients at times; install 0.1.3 or newer"
    return None


def why_not_flash_qla(device: torch.device, dtype: torch.dtype, sizes: HeadSizes) -> str | None:
    """Why FlashQLA cannot train these heads here, and the fix; None when it can."""
    if device.type != "cuda":
        return f"flash_qla runs on a GPU, not on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"flash_qla takes bf16 or fp16, not {dtype}"
    if (sizes.key_dim, sizes.value_dim) != (128, 128):
        return (
            f"flash_qla takes head dims of 128, not key_head_dim={sizes.key_dim} and "
            f"value_head_dim={sizes.value_dim}"
        )
    if torch.cuda.get_device_capability(device) not in _FLASH_QLA_CAPABILITIES:
        return "flash_qla trains on compute capability 9.0, 10.0 and 10.3 only"
    return _flash_qla_is_missing()


def _why_not_fla(device: torch.device, dtype: torch.dtype, sizes: HeadSizes) -> str | None:
    if device.type != "cuda":
        return f"fla runs on a GPU, not on {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"fla would round {dtype} to tf32"
    if sizes.key_dim > 256:
        return f"fla takes key_head_dim up to 256, not {sizes.key_dim}"
    return why_not_fla(device)


def _make(name: str) -> Core:
    if name == "flash_qla":
        from .flash_qla import FlashQlaCore

        return FlashQlaCore()
    if name == "fla":
        from .fla import FlaCore

        return FlaCore()
    return TorchCore()


def resolve_core(
    backend: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    sizes: HeadSizes,
    deterministic: bool = False,
) -> Choice:
    """Choose the delta rule of the mixer, from shapes, dtype and architecture alone.

    Args:
        backend: ``"flash_qla"``, ``"fla"``, ``"reference"`` (plain torch), or ``"auto"``: the
            first of these that fits; the log says once why not an earlier one. A name that is not
            ``"auto"`` is never replaced by another.
        deterministic: ``"auto"`` then takes the reference. fla is refused, since it picks its
            kernels by timing; flash_qla has a fixed choice and may be asked for by name.

    Raises:
        ValueError: an unknown name, or one that these sizes, this dtype, device or
            ``deterministic`` rule out.
        ImportError: the backend's package is missing, too old, or known to compute wrong results
            here.
    """
    device = torch.device(device)
    obstacles = {
        "flash_qla": why_not_flash_qla(device, dtype, sizes),
        "fla": _why_not_fla(device, dtype, sizes),
        "reference": None,
    }
    if backend == "auto":
        if deterministic:
            return Choice(_make("reference"), "deterministic mode")
        name = next(name for name in CORES if obstacles[name] is None)
        passed = "; ".join(f"not {n}: {why}" for n, why in obstacles.items() if why is not None)
        if passed:
            say_once(f"Gated DeltaNet takes a slower delta rule, {name!r} ({passed}).", device.type)
        return Choice(_make(name), passed or f"{dtype} heads of 128 on this GPU")
    if backend not in CORES:
        raise ValueError(
            f"unknown backend {backend!r}; use 'auto' or one of "
            f"{', '.join(repr(name) for name in CORES)}."
        )
    if backend == "fla" and deterministic:
        raise ValueError(
            "backend='fla' picks its kernels by timing, so its results are not repeatable; in "
            "deterministic mode use 'auto', 'flash_qla' or 'reference'."
        )
    why = obstacles[backend]
    if why is not None:
        packages = why in (_flash_qla_is_missing(), why_not_fla(device))
        raise (ImportError if packages else ValueError)(f"backend={backend!r}: {why}.")
    return Choice(_make(backend), "requested")

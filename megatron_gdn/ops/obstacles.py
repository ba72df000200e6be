"""The reasons why kernels cannot run on a device: hardware, dtypes, sizes, versions."""

from __future__ import annotations

import logging
import re
import warnings
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import NamedTuple

import torch

FLA_INSTALL_HINT = 'pip install "megatron-gdn[fla]"'
# The times are from docs/determinism.md: 34.73 ms in plain torch and 3.51 ms in kernels
# per layer.
PLAIN_ON_GPU_WARNING = (
    "On this GPU the recurrence runs in plain torch, since its kernels are not "
    "installed: a Gated DeltaNet layer took 34.7 ms in place of 3.5 (one H200, "
    "deterministic mode). Install them: "
    'pip install "flash-qla>=0.1.3" tilelang "flash-linear-attention>=0.6,<0.7"'
)
# fla's version in pyproject.toml; other versions may give other results
_FLA_VERSION = (0, 6)
_FLA_PACKAGES = ("flash-linear-attention", "fla-core")  # fla-core holds the kernels
# earlier versions have data races, and round dg through bf16
_OLDEST_FLASH_QLA_VERSION = (0, 1, 3)
_FLASH_QLA_CAPABILITIES = ((9, 0), (10, 0), (10, 3))


class Obstacle(NamedTuple):
    """Why a rule cannot run here."""

    why: str
    # the error to raise if the user asked for this rule by name; ImportError if
    # installing a package would help
    error: type[Exception] = ValueError


def advice_about_plain_rule(
    device: torch.device | str, *obstacles: Obstacle | None
) -> str:
    """The advice to install kernels, if a GPU runs a rule in plain torch for lack of
    packages; else "". The function also warns once.

    ``obstacles``: why rules were skipped.
    """
    missing = any(each is not None and each.error is ImportError for each in obstacles)
    if torch.device(device).type != "cuda" or not missing:
        return ""
    warn_once(PLAIN_ON_GPU_WARNING)
    return f". {PLAIN_ON_GPU_WARNING}"


def no_kernels_installed() -> bool:
    """Whether neither flash_qla nor fla is installed; the check does not initialise
    CUDA."""
    return not any(map(find_spec, ("flash_qla", "fla")))


def version_tuple(text: str) -> tuple[int, ...]:
    """``"3.7.1rc1+cu130"`` -> ``(3, 7, 1)``, to compare releases."""
    numbers = []
    for part in text.split("+")[0].split(".")[:3]:
        digits = re.match(r"\d+", part)
        numbers.append(int(digits[0]) if digits else 0)
    return tuple(numbers)


def installed_version(package: str) -> str | None:
    """The version of the installed ``package``; None if the package is not
    installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def why_not_flash_qla(
    device: torch.device, dtype: torch.dtype, key_dim: int, value_dim: int
) -> Obstacle | None:
    """Why FlashQLA cannot train heads of these dims on ``device``, and the fix; None if
    it can."""
    if device.type != "cuda":
        return Obstacle(f"flash_qla runs on a GPU, not on {device}")
    if dtype not in (torch.bfloat16, torch.float16):
        return Obstacle(f"flash_qla takes bf16 or fp16, not {dtype}")
    if (key_dim, value_dim) != (128, 128):
        return Obstacle(
            f"flash_qla takes head dims of 128, not key_head_dim={key_dim} and "
            f"value_head_dim={value_dim}"
        )
    if torch.cuda.get_device_capability(device) not in _FLASH_QLA_CAPABILITIES:
        return Obstacle(
            "flash_qla trains on compute capability 9.0, 10.0 and 10.3 only"
        )
    return why_not_flash_qla_package()


@cache
def why_not_flash_qla_package() -> Obstacle | None:
    """Why the installed flash-qla cannot be used, and the fix; None when it can.

    Versions before 0.1.3 have data races. A source tree on the path can be imported,
    but has no version.
    """
    installed = installed_version("flash-qla")
    if find_spec("flash_qla") is None:
        why = "flash-qla is not installed (pip install 'flash-qla>=0.1.3')"
    elif installed is None:
        why = (
            "flash_qla carries no version; install flash-qla 0.1.3 or newer from a "
            "wheel"
        )
    elif version_tuple(installed) < _OLDEST_FLASH_QLA_VERSION:
        why = (
            f"flash-qla {installed} computes wrong gradients at times; install 0.1.3 "
            "or newer"
        )
    else:
        return None
    return Obstacle(why, ImportError)


@cache
def _needs_tilelang(major: int) -> bool:
    """Whether Triton miscompiles fla's backward on GPUs of compute capability
    ``major``.x.

    With Triton from 3.4.0 to before 3.7.1, dg and db are wrong on Hopper (fla issue
    640).
    """
    triton = installed_version("triton")
    return (
        major == 9
        and triton is not None
        and (3, 4, 0) <= version_tuple(triton) < (3, 7, 1)
    )


def fla_needs_tilelang(device: torch.device) -> bool:
    """Whether fla needs TileLang, since Triton miscompiles fla's backward on
    ``device``."""
    return device.type == "cuda" and _needs_tilelang(
        torch.cuda.get_device_capability(device)[0]
    )


@cache
def why_not_fla_package(major: int) -> Obstacle | None:
    """Why fla cannot run on GPUs of compute capability ``major``.x, and the fix; None
    if it can."""
    known = ".".join(map(str, _FLA_VERSION))
    triton = installed_version("triton")
    versions = {name: installed_version(name) for name in _FLA_PACKAGES}
    found = {name: number for name, number in versions.items() if number is not None}
    other = [
        f"{name} {number}"
        for name, number in found.items()
        if version_tuple(number)[:2] != _FLA_VERSION
    ]
    if find_spec("fla") is None:
        why = f"flash-linear-attention is not installed ({FLA_INSTALL_HINT})"
    elif not found:
        why = (
            f"fla carries no version; install flash-linear-attention {known} "
            f"({FLA_INSTALL_HINT})"
        )
    elif other:
        why = f"{other[0]} is not supported, {known} is ({FLA_INSTALL_HINT})"
    elif triton is None:
        why = "flash-linear-attention needs triton, which is not installed"
    elif _needs_tilelang(major) and find_spec("tilelang") is None:
        # fla issue 640: with such a Triton dg and db are wrong on Hopper, and fla
        # raises an error.
        why = (
            f"Triton {triton} miscompiles fla's backward on Hopper; install tilelang, "
            "or Triton 3.7.1 or newer"
        )
    else:
        return None
    return Obstacle(why, ImportError)


@cache
def why_not_triton(device: str, dtype: torch.dtype, taps: int) -> str | None:
    """Why our Triton kernels cannot run for this device, dtype and number of taps, or
    None."""
    if device != "cuda":
        return f"the Triton kernels run on a GPU, not on {device}"
    if dtype == torch.float64:
        return "the Triton kernels compute in fp32, not in fp64"
    # A kernel keeps at least one earlier row, so taps >= 2. A kernel's segment of
    # tokens needs at least W - 1; the shortest has 8 (_FEWEST_STEPS of
    # kernels/tiles.py).
    if not 2 <= taps <= 8:
        return f"the Triton kernels take 2 to 8 conv taps, not {taps}"
    if find_spec("triton") is None:
        return "triton is not installed"
    return None


@cache
def log_obstacle_once(message: str, device_type: str) -> None:
    """Log ``message`` once, on rank 0: a warning if ``device_type`` is "cuda", else
    info."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    if device_type == "cuda":
        level = logging.WARNING
    else:
        level = logging.INFO
    logging.getLogger(__package__).log(level, message)


@cache
def warn_once(message: str) -> None:
    """Issue a RuntimeWarning once in each process, on every rank: machines may have
    different packages."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)

"""NVTX ranges and log lines, without importing Megatron."""

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import ModuleType

import torch.distributed as dist

from ..command_line import one_line

logger = logging.getLogger(__name__)

_NO_NVTX_RANGE = nullcontext()


def nvtx_range_of(mixer: object, name: str) -> AbstractContextManager[None]:
    """A context whose body runs in the NVTX range ``<class of mixer>.<name>``, if
    Megatron's profiling is on."""
    utils = sys.modules["megatron.core.utils"]  # a mixer is a module of Megatron
    # A Megatron without the flag ``_nvtx_enabled`` always makes ranges.
    if not getattr(utils, "_nvtx_enabled", True):
        return _NO_NVTX_RANGE
    return _nvtx_range(utils, f"{type(mixer).__name__}.{name}")


@contextmanager
def _nvtx_range(utils: ModuleType, message: str) -> Iterator[None]:
    """An NVTX range, which ends also if the body raises; ``utils`` is the module
    megatron.core.utils."""
    utils.nvtx_range_push(msg=message)
    try:
        yield
    finally:
        utils.nvtx_range_pop(msg=message)


def log_single_rank(logger: logging.Logger, level: int, message: str) -> None:
    """Log ``message`` on rank 0 only. The rank is that of torch.distributed, or of
    torchrun's or Slurm's environment."""
    if dist.is_initialized():
        rank = dist.get_rank()
    else:
        rank = _rank_of_environment()
    if rank == 0:
        logger.log(level, "%s", one_line(message))


def _rank_of_environment() -> int:
    """This process's rank in the environment of torchrun or Slurm; 0 if the environment
    has no rank or the rank is no number."""
    text = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if text.isascii() and text.isdecimal() and len(text) < 10:
        return int(text)
    return 0


@cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log ``message`` on rank 0, once per process even if several layers log it."""
    log_single_rank(logger, level, message)


def hide_import_notes() -> None:
    """Hide the warnings that importing Megatron and fla would print."""
    for module in ("megatron", "fla"):
        warnings.filterwarnings("ignore", category=UserWarning, module=module)
    # torch logs here that it found CUDA's compiler but no GPU
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

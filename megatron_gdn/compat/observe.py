"""What the layer reports: NVTX ranges, and one log line per fact. Megatron is not imported here."""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch.distributed as dist

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()


def span(mixer: object, name: str) -> AbstractContextManager[None]:
    """An NVTX range ``<class of mixer>.<name>``, where Megatron's profiling is switched on."""
    utils = sys.modules.get("megatron.core.utils")
    if utils is None or not getattr(utils, "_nvtx_enabled", True):
        return _NOTHING
    return _range(utils, f"{type(mixer).__name__}.{name}")


@contextmanager
def _range(utils: Any, message: str) -> Iterator[None]:
    """An NVTX range that also ends when the body raises, or Megatron's later ones would fail."""
    utils.nvtx_range_push(msg=message)
    try:
        yield
    finally:
        utils.nvtx_range_pop(msg=message)


def log_single_rank(logger: logging.Logger, level: int, message: str) -> None:
    """Log on rank 0, as torch.distributed, torchrun or Slurm number the processes."""
    if dist.is_initialized():
        rank = dist.get_rank()
    else:
        rank = int(os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or 0)
    if rank == 0:
        logger.log(level, message)


@cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log on rank 0, once per process, also if many layers send the same message."""
    log_single_rank(logger, level, message)

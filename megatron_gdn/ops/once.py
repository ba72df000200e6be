"""Say once that a slower path is taken."""

from __future__ import annotations

import logging
import warnings
from functools import cache

import torch


@cache
def say_once(message: str, device_type: str) -> None:
    """Log ``message`` once, on rank 0: as a warning on a GPU, as info elsewhere."""
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    level = logging.WARNING if device_type == "cuda" else logging.INFO
    logging.getLogger(__package__).log(level, message)


@cache
def warn_once(message: str) -> None:
    """A RuntimeWarning, in every process: their machines may have other packages."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)

"""What the layer reports: NVTX ranges, and one log line per fact."""

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache

from megatron.core import utils
from megatron.core.utils import log_single_rank, nvtx_range_pop, nvtx_range_push

logger = logging.getLogger(__name__)

_NOTHING = nullcontext()


def span(mixer: object, name: str) -> AbstractContextManager[None]:
    """An NVTX range ``<class of mixer>.<name>``, where Megatron's profiling is switched on."""
    if not getattr(utils, "_nvtx_enabled", True):
        return _NOTHING
    return _range(f"{type(mixer).__name__}.{name}")


@contextmanager
def _range(message: str) -> Iterator[None]:
    """Closed also when the body raises: an open range would make Megatron's later ones fail."""
    nvtx_range_push(msg=message)
    try:
        yield
    finally:
        nvtx_range_pop(msg=message)


@cache
def log_once(message: str, level: int = logging.INFO) -> None:
    """Log on rank 0, once per process, also if many layers send the same message."""
    log_single_rank(logger, level, message)

"""Starts to compile FlashQLA's kernels when a layer that takes them is built.

Between a layer's constructor and its first step a run builds the rest of the model, the optimizer
and the data, loads a checkpoint, and imports tilelang and flash_qla. Other processes compile during
that time (:mod:`.builds`). The first step waits for the kernels that are still missing.
"""

from __future__ import annotations

import logging
import os

import torch

from ...build_lock import BuildLock
from .builds import (
    AheadOfRun,
    Heads,
    can_compile_ahead,
    command,
    first_try,
    lock_path,
    shown,
)
from .cache import cache_folder, cache_is_used

logger = logging.getLogger(__name__)

_latest: AheadOfRun | None = None


def compile_early(heads: Heads, part: str) -> None:
    """Start other processes that compile the missing kernels, and do not wait for them.

    Does nothing if the kernels of this part are all there, if another process of the machine
    compiles for these heads, if processes that this one started still compile, without a Hopper
    GPU, without a cache on disk, or under ``MEGATRON_GDN_COMPILE_AHEAD=0``.

    Args:
        heads: of the rule's inputs.
        part: one of :data:`.builds.PARTS`, to be compiled first. The others follow,
            because the first batch may differ from what the layer expects.
    """
    global _latest
    if _latest is not None and not _latest.ended:
        return
    if not (torch.cuda.is_available() and can_compile_ahead() and cache_is_used()):
        return
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    if heads.needed(part, multiprocessors).is_there():
        return
    try:
        lock = BuildLock(lock_path(heads))
    except OSError:  # a folder that cannot be written; the first call says so
        return
    try:
        if lock.take(f"process {os.getpid()} (FlashQLA's kernels)") and first_try(heads):
            logger.warning(
                "FlashQLA's kernels and Triton's for %s are compiled from here on, while the run "
                "starts, on %d cores, into %s; those that are there are kept. `%s` does this "
                "before a run.",
                heads, len(os.sched_getaffinity(0)), cache_folder(), shown(heads),
            )  # fmt: skip
            # The kernels may be there without a list, in a cache that came from elsewhere.
            ahead = [*command(heads, part), "--unless-first-part-is-there"]
            _latest = AheadOfRun(ahead, lock)
    finally:
        lock.release()

"""One process of a machine builds what several need; the others take its result.

The lock is the operating system's (``flock``): it is released when the last process that holds it
ends, however it ends. A killed process leaves a file and no lock.
"""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)


@contextmanager
def build_lock(
    path: Path,
    what: str,
    found: Callable[[], bool] = lambda: False,
    patience: float = 0.0,
    wait: bool = True,
) -> Iterator[int | None]:
    """Hold the lock of this file while building.

    Args:
        path: created with its folder. It is never removed: a process that waits may have it open.
        what: is built, for the log: "kkt_solve for 16:32 heads".
        found: whether the result is where every process looks for it; ends the waiting.
        patience: seconds to wait before the log says so.
        wait: for a process that holds the lock.

    Yields:
        the file's descriptor while this process holds the lock, else None: the result was found, or
        another process holds the lock and ``wait`` is False. A process that inherits the
        descriptor holds the lock too, also after this process has left it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, began = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), time.monotonic()
    taken = said = False
    try:
        while not (there := found()) and not (taken := _take(file)) and wait:
            if not said and time.monotonic() - began >= patience:
                said = True
                holder = os.pread(file, 100, 0).decode(errors="replace") or "another process"
                logger.warning("waits for %s, which is being compiled by %s", what, holder)
            time.sleep(0.1)
        if said:
            logger.warning("waited %.0f s for %s", time.monotonic() - began, what)
        # Another process may have built between the last look and the lock.
        yield file if not there and taken and not found() else None
    finally:
        os.close(file)


def _take(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "The file system of the kernel cache knows no locks (%s): every process compiles "
            "for itself. Put the cache on another one (TILELANG_CACHE_DIR).",
            error,
        )
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()}".encode(), 0)
    return True

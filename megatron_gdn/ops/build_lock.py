"""One process of a machine builds what several need; the others take its result.

The lock is the operating system's (``flock``): it is released when the last process that holds it
ends, however it ends. A killed process leaves a file and no lock.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_PAUSE = 0.1  # seconds between two tries
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class BuildLock:
    """A lock on a file, which also says who holds it.

    Args:
        path: created with its folder if it does not exist. It is never removed: a process that
            waits may have it open.

    A process that inherits :meth:`fileno` holds the lock too, also after :meth:`release` here.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def take(self, holder: str) -> bool:
        """Try to take the lock. True if this process now holds it; others read ``holder``."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            logger.warning(
                "The file system of the kernel cache knows no locks (%s): every process compiles "
                "for itself. Put the cache on another one (TILELANG_CACHE_DIR).",
                error,
            )
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, holder.encode(), 0)
        return True

    def holder(self) -> str:
        return os.pread(self._file, 1000, 0).decode(errors="replace") or "another process"

    def fileno(self) -> int:
        return self._file

    def release(self) -> None:
        """Close the file, which gives up the lock unless another process inherited it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


@contextmanager
def held(path: Path, what: str, patience: float = 0.0) -> Iterator[None]:
    """Hold the lock of this file. Wait first if another process holds it.

    ``patience``: seconds to wait before the log says so.
    """
    lock, began, said = BuildLock(path), time.monotonic(), False
    try:
        while not lock.take(f"process {os.getpid()} ({what})"):
            if not said and time.monotonic() - began >= patience:
                said = True
                logger.warning("waits for %s, which compiles too", lock.holder())
            time.sleep(_PAUSE)
        yield
    finally:
        lock.release()


def build_once(
    found: Callable[[], bool],
    build: Callable[[BuildLock], None],
    path: Path,
    what: str,
) -> None:
    """Return when ``found()``, or after this process has built.

    Args:
        found: whether the result is where every process looks for it.
        build: makes it; called while this process holds the lock, and not if the result is there.
        path: the file to lock.
        what: what is built, for the log and the waiting processes: "kkt_solve for 16:32 heads".
    """
    if found():
        return
    lock, began, said = BuildLock(path), time.monotonic(), False
    try:
        while not lock.take(f"process {os.getpid()} ({what})"):
            if found():
                break
            if not said:
                said = True
                logger.warning("waits for %s, which is being compiled by %s", what, lock.holder())
            time.sleep(_PAUSE)
        else:
            if not found():
                build(lock)
    finally:
        lock.release()
    if said:
        logger.warning("waited %.0f s for %s", time.monotonic() - began, what)

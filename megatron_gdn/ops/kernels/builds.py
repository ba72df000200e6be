"""File locks: one process of a machine compiles a kernel, and all others load it from disk.

Each variant of a kernel (dtypes, sizes, alignments) has its own lock (``flock``). The operating
system releases a lock when all processes that hold it have ended, also after a crash.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_QUICK = 0.5  # seconds; a shorter call only loads a kernel from disk and is not logged


def compile_in_one_process(kernel: Any) -> None:
    """Let only one process of a machine at a time compile a variant of this Triton kernel."""
    # Triton calls _do_compile for each variant that the process has not loaded yet.
    compile = getattr(kernel, "_do_compile", None)
    if compile is None or hasattr(compile, "__wrapped__"):
        return

    @wraps(compile)
    def compile_under_lock(key: Any, *args: Any, **kwargs: Any) -> Any:
        """Compile the variant ``key`` of the kernel while this process holds its lock."""
        import triton

        name, variant = kernel.__name__, hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        path = Path(triton.knobs.cache.dir) / "megatron_gdn" / f"{name}-{variant}.lock"
        with build_lock(path, f"Triton's {name}", patience=_QUICK):
            say = threading.Timer(
                _QUICK, logger.warning,
                ("compiles Triton's %s, which takes some seconds. `python -m megatron_gdn.warm_up "
                 "--help` shows how to do this before a run.", name),
            )  # fmt: skip
            say.daemon = True
            say.start()
            try:
                return compile(key, *args, **kwargs)
            finally:
                say.cancel()

    kernel._do_compile = compile_under_lock


@contextmanager
def build_lock(
    path: Path, what: str, is_built: Callable[[], bool] = lambda: False, patience: float = 0.0
) -> Iterator[int | None]:
    """Hold the lock of the file ``path`` while the caller builds the kernel named ``what``.

    The wait for the lock ends early if ``is_built()`` is true, and is logged after ``patience``
    seconds. Yields the file's descriptor if this process holds the lock, else None. A child process
    that inherits the descriptor holds the lock too. The file is never removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file, began = os.open(path, os.O_RDWR | os.O_CREAT, 0o666), time.monotonic()
    taken = said = False
    try:
        while not (there := is_built()) and not (taken := _try_to_lock(file)):
            if not said and time.monotonic() - began >= patience:
                said = True
                holder = os.pread(file, 100, 0).decode(errors="replace") or "another process"
                logger.warning("waits for %s, which is being compiled by %s", what, holder)
            time.sleep(0.1)
        if said:
            logger.warning("waited %.0f s for %s", time.monotonic() - began, what)
        # Another process may have built ``what`` between the last is_built() and the lock.
        yield file if not there and taken and not is_built() else None
    finally:
        os.close(file)


def _try_to_lock(file: int) -> bool:
    """Try to lock the descriptor ``file``; False only if another process holds the lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "The file system of the kernel cache has no file locks (%s), so every process compiles "
            "every kernel. Put the cache on another file system (TILELANG_CACHE_DIR).",
            error,
        )
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()}".encode(), 0)
    return True

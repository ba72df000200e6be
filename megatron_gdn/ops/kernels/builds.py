"""File locks: one process of a machine compiles a kernel, and all others load it from
disk.

Each variant of a kernel (dtypes, sizes, alignments) has its own lock (``flock``). The
operating system releases a lock when all processes that hold it have ended, also after
a crash.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import re
import socket
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_LONGEST_WAIT = 1800.0  # seconds; all kernels of FlashQLA take minutes on a few cores
# A build that takes less time only loads a kernel from disk; nothing is logged.
_SECONDS_BEFORE_LOG = 0.5


def compile_in_one_process(kernel: Any) -> None:
    """Replace the kernel's method ``_do_compile``, so that only one process of a
    machine at a time compiles a variant of this Triton kernel.

    Without this, all ranks of a machine would compile the same variant at the same
    time. With it, the other processes wait, and then load the variant from Triton's
    cache on disk.
    """
    # Triton calls _do_compile for each variant that the process has not loaded yet.
    compile_here = getattr(kernel, "_do_compile", None)
    if compile_here is None or hasattr(compile_here, "__wrapped__"):
        return  # another version of Triton, or the method was replaced before

    @wraps(compile_here)
    def compile_under_lock(key: object, *args: object, **kwargs: object) -> object:
        """Compile the variant ``key`` of the kernel while this process holds its
        lock; log a compilation that takes long."""
        import triton

        name = kernel.__name__
        variant = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        path = Path(triton.knobs.cache.dir) / "megatron_gdn" / f"{name}-{variant}.lock"
        with build_lock(path, f"Triton's {name}", patience=_SECONDS_BEFORE_LOG):
            delayed_log = threading.Timer(
                _SECONDS_BEFORE_LOG,
                logger.warning,
                (
                    "compiles Triton's %s, which takes some seconds. `python -m "
                    "megatron_gdn.warm_up --help` shows how to do this before a run.",
                    name,
                ),
            )
            delayed_log.daemon = True
            delayed_log.start()
            try:
                return compile_here(key, *args, **kwargs)
            finally:
                delayed_log.cancel()

    kernel._do_compile = compile_under_lock


@contextmanager
def build_lock(
    path: Path,
    what: str,
    is_built: Callable[[], bool] = lambda: False,
    patience: float = 0.0,
    longest_wait: float = _LONGEST_WAIT,
) -> Iterator[int | None]:
    """Hold the lock of a file while the caller builds the kernel named ``what``.

    The file is :func:`lock_file` of ``path``, so that each user has files of their own.
    The wait for the lock ends when ``is_built()`` is true, or after ``longest_wait``
    seconds. A wait of more than ``patience`` seconds is logged. Yields the file's
    descriptor if this process holds the lock. Otherwise yields None: the kernel is
    built already, or the caller must build it without a lock. A child process that
    inherits the descriptor holds the lock too. The file is never removed.
    """
    began = time.monotonic()
    file = _open_lock(path)
    if file is None:
        yield None
        return
    holds_lock = False
    logged = False
    try:
        while not is_built():
            holds_lock = _try_to_lock(file)
            if holds_lock:
                break
            waited = time.monotonic() - began
            if waited >= longest_wait:
                logger.warning(
                    "waited %.0f s for %s, which %s still compiles; this process "
                    "compiles it too",
                    waited,
                    what,
                    _holder_of(file),
                )
                break
            if not logged and waited >= patience:
                logged = True
                logger.warning(
                    "waits for %s, which is being compiled by %s",
                    what,
                    _holder_of(file),
                )
            time.sleep(0.1)
        if logged:
            logger.warning("waited %.0f s for %s", time.monotonic() - began, what)
        # Another process may have built ``what`` between the last is_built() and the
        # lock.
        if holds_lock and not is_built():
            yield file
        else:
            yield None
    finally:
        os.close(file)


def lock_file(path: Path) -> Path:
    """This user's file for the lock ``path``. It is in a folder of this user, which is
    in the folder of ``path``.

    Users may share a cache folder. If they shared its lock files, one user could hold a
    lock for ever, or put a link to a file of another user in the place of a lock.
    """
    return path.parent / f"locks-{os.geteuid()}" / path.name


def _open_lock(path: Path) -> int | None:
    """Open this user's lock file for ``path``, or create it; return its descriptor.

    None, with a warning, if the file cannot be opened or other users could change it.
    """
    own = lock_file(path)
    # no link to another file is followed, and no child process inherits the file
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    folder = None
    try:
        own.parent.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            own.parent.mkdir(mode=0o700)
        # Files are opened relative to the folder, so that nobody can exchange the
        # folder meanwhile.
        folder = os.open(own.parent, os.O_RDONLY | os.O_DIRECTORY | flags)
        _require_ownership(folder)
        file = os.open(own.name, os.O_RDWR | os.O_CREAT | flags, 0o600, dir_fd=folder)
        try:
            _require_ownership(file, regular=True)
        except OSError:
            os.close(file)
            raise
        return file
    except OSError as error:
        logger.warning(
            "no lock for kernels in %r (%s), so every process compiles every kernel. "
            "Put the cache in a folder of your own (TRITON_CACHE_DIR, "
            "TILELANG_CACHE_DIR).",
            str(own.parent),
            error,
        )
        return None
    finally:
        if folder is not None:
            os.close(folder)


def _require_ownership(descriptor: int, regular: bool = False) -> None:
    """Raise an OSError unless this user owns the open file or folder.

    ``regular``: it must also be an ordinary file with one name. A file with a second
    name (a hard link) could be another file of the user, which the lock's holder would
    overwrite.
    """
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"it belongs to user {status.st_uid}")
    if regular and not (stat.S_ISREG(status.st_mode) and status.st_nlink == 1):
        raise PermissionError(errno.EPERM, "it is no ordinary file with one name")


def _holder_of(file: int) -> str:
    """The process whose number is in the lock's file, if it runs; else "another
    process". The file may contain any text."""
    text = os.pread(file, 100, 0).decode(errors="replace")
    found = re.fullmatch(r"process ([0-9]{1,10}) on (.{1,80})", text)
    if found is None or found[2] != _host():
        return "another process"
    # The process may have ended: the next holder takes the lock first, and writes its
    # own number a moment later.
    if Path("/proc", found[1]).exists():
        return f"process {found[1]}"
    return "another process"


def _host() -> str:
    """This machine's name, without characters that a log line should not have."""
    return re.sub(r"[^\w.-]", "?", socket.gethostname())[:64]


def _try_to_lock(file: int) -> bool:
    """Try to lock the descriptor ``file``; False only if another process holds the
    lock.

    The result is True also if the file system has no locks; then every process
    compiles. If the result is True, the file names this process, for
    :func:`_holder_of`.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        logger.warning(
            "The file system of the kernel cache has no file locks (%s), so every "
            "process compiles every kernel. Put the cache on another file system "
            "(TILELANG_CACHE_DIR).",
            error,
        )
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on {_host()}".encode(), 0)
    return True

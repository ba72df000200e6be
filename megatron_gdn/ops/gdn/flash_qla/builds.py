"""FlashQLA's kernels are compiled once per machine, in parallel processes, and the log shows it.

tilelang compiles a kernel at its first call. That takes minutes on one core, in every process. Here
the first process that misses a kernel takes a lock beside tilelang's cache and starts
``python -m megatron_gdn.warm_up``, which compiles all kernels for its heads in parallel processes.
Every process goes on as soon as the cache has the kernel that it wants (:mod:`...build_lock`).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial, wraps
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...build_lock import BuildLock, build_once
from .cache import (
    HOPPER,
    CacheEntry,
    Needed,
    cache_folder,
    cache_is_used,
    in_tilelangs_cache,
)

logger = logging.getLogger(__name__)

_EVERY = 10.0  # seconds between two lines of the log
# Set to 0: this process itself compiles the kernels that it misses, one after the other.
_SWITCH = "MEGATRON_GDN_COMPILE_AHEAD"


# Kernels for a long sequence cut into parts; for a batch of rows; for short documents; and for
# states in and out, which context parallelism by state passing takes.
PARTS = ("cut", "rows", "uncut", "states")


class Heads(NamedTuple):
    """What FlashQLA's kernels are compiled for."""

    key: int
    value: int
    dtype: torch.dtype

    @property
    def operands(self) -> str:
        return "fp16" if self.dtype == torch.float16 else "bf16"

    def needed(self, part: str, multiprocessors: int) -> Needed:
        return Needed(str(self), part, multiprocessors)

    def __str__(self) -> str:
        return f"{self.key}:{self.value} heads in {self.operands}"


_heads: Heads | None = None
_part = PARTS[0]
_tried: set[Heads] = set()  # this process has started others for these heads


def expect(heads: Heads, part: str) -> None:
    """Set the heads and the part of FlashQLA's next calls; a kernel's arguments do not say them.

    Args:
        heads: of the rule's inputs.
        part: one of PARTS.
    """
    global _heads, _part
    _heads, _part = heads, part


def lock_path(heads: Heads | None) -> Path:
    name = "other" if heads is None else f"{heads.key}-{heads.value}-{heads.operands}"
    return cache_folder() / "megatron_gdn" / f"flash_qla-{name}.lock"


def first_try(heads: Heads) -> bool:
    """True on this process's first call for these heads."""
    first = heads not in _tried
    _tried.add(heads)
    return first


def watch_builds(kernels: list[Any]) -> None:
    """Make tilelang compile ``kernels``, its own objects, as the top of this file says."""
    for kernel in kernels:
        kernel.compile = _once_per_machine(kernel)


def _once_per_machine(kernel: Any) -> Callable:
    compile_here = kernel.compile

    @wraps(compile_here)  # the processes that compile ahead call its __wrapped__
    def compile(*args: Any, **kwargs: Any) -> Any:
        entry, there = _look_up(kernel, args, kwargs)
        if entry is None:
            return compile_here(*args, **kwargs)
        made = None
        if not there:

            def here() -> None:
                nonlocal made
                made = compile_here(*args, **kwargs)
                entry.remember(made)

            what = f"FlashQLA's {entry.name} for {_heads or 'these heads'}"
            build_once(entry.is_there, partial(_build, here, entry, what), lock_path(_heads), what)
        if made is None:
            made = compile_here(*args, **kwargs)  # found on disk
            entry.remember(made)
        return made

    return compile


def _look_up(kernel: Any, args: tuple, kwargs: dict[str, Any]) -> tuple[CacheEntry | None, bool]:
    """The kernel's entry (None if tilelang keeps nothing on disk), and whether it is there."""
    try:
        if not cache_is_used():
            return None, False
        entry = CacheEntry.of(kernel, args, kwargs, arch_here())
        return entry, entry.is_there() or in_tilelangs_cache(kernel, args, kwargs)
    except (AttributeError, TypeError, ImportError) as error:
        logger.warning("this tilelang keeps its kernels in a way not known here: %s", error)
        return None, False


def _build(here: Callable[[], None], entry: CacheEntry, what: str, lock: BuildLock) -> None:
    if _heads is not None and can_compile_ahead() and first_try(_heads):
        logger.warning(
            "%s is not compiled yet. All of FlashQLA's kernels and Triton's for %s are compiled "
            "now, on %d cores, into %s. `%s` does this before a run.",
            what, _heads, len(os.sched_getaffinity(0)), cache_folder(), shown(_heads),
        )  # fmt: skip
        AheadOfRun(command(_heads, _part), lock).wait_for(entry.is_there)
    if not entry.is_there():
        began = time.monotonic()
        logger.warning("compiles %s in this process, which takes up to a minute", what)
        here()
        logger.warning("compiled %s in %.0f s", what, time.monotonic() - began)


def arch_here() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"{major}.{minor}"


def shown(heads: Heads) -> str:
    return (
        f"python -m megatron_gdn.warm_up --heads {heads.key}:{heads.value} "
        f"--operands {heads.operands}"
    )


def command(heads: Heads, part: str) -> list[str]:
    """The command line that compiles these heads' kernels, those of this part first."""
    *_, arguments = shown(heads).partition("--heads")
    processors = torch.cuda.get_device_properties().multi_processor_count
    parts = [part, *(other for other in PARTS if other not in (part, "states"))]
    return [
        sys.executable, "-m", "megatron_gdn.warm_up", "--heads", *arguments.split(),
        "--parts", *parts,
        "--multiprocessors", str(processors), "--for-a-run",
    ]  # fmt: skip


def can_compile_ahead() -> bool:
    """Kernels can be compiled for Hopper by processes that use no GPU."""
    if os.environ.get(_SWITCH, "1") == "0":
        return False
    return torch.cuda.get_device_capability() == HOPPER


class AheadOfRun:
    """Processes that compile while this one waits. They hold the lock too, and end with this one.

    Args:
        command: prints a line per compiled kernel, and ends when its standard input ends. That is
            a pipe from this process; the system closes it when this process ends.
    """

    def __init__(self, command: list[str], lock: BuildLock) -> None:
        self._began, self._last = time.monotonic(), "nothing yet"
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
            "CUDA_VISIBLE_DEVICES": "",
        }
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", env=environment, pass_fds=[lock.fileno()],
            start_new_session=True,
        )  # fmt: skip
        self._ended = threading.Event()
        threading.Thread(target=self._follow, name="megatron_gdn compiles", daemon=True).start()

    def _follow(self) -> None:
        """Log the processes' latest line, every few seconds and at the end."""
        said, lines = self._began, []
        assert self._process.stdout is not None
        for line in self._process.stdout:
            lines = [*lines[-20:], line.rstrip()]
            self._last = lines[-1]
            if time.monotonic() - said > _EVERY:
                said = time.monotonic()
                logger.warning("compiling for %.0f s: %s", said - self._began, self._last)
        code, took = self._process.wait(), time.monotonic() - self._began
        if code == 0:
            logger.warning("compiled in %.0f s: %s", took, self._last)
        else:
            logger.warning(
                "compiling ahead failed after %.0f s (exit status %d); what is missing is compiled "
                "where it is needed. It said:\n%s", took, code, "\n".join(lines),
            )  # fmt: skip
        self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def wait_for(self, found: Callable[[], bool]) -> None:
        """Return when ``found()``, or when the processes have ended."""
        while not found() and not self._ended.wait(0.1):
            pass

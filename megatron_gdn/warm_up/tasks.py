"""What is compiled, as tasks: noted from calls that compute nothing, run in parallel forks.

tilelang and Triton key what they keep on disk by the kernel, the target and the versions, so a
cache that was filled without a GPU serves a machine with one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import wait
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TextIO
from unittest.mock import patch

from ..gdn.flash_qla.builds import CacheEntry, expected_heads
from .absent_gpu import ARCH

_FORK = multiprocessing.get_context("fork")
_PRINT_EVERY = 5.0  # seconds between two lines of progress
_TARGET = {"kind": "cuda", "arch": "sm_90a"}
_WAS_THERE = 3  # exit status of a fork that found the kernel


class Task(NamedTuple):
    """One thing to compile."""

    name: str
    run: Callable[[], bool]  # compiles it; returns whether there was anything to compile
    kind: str = "triton"  # or "flash_qla"


def run_tasks(tasks: Iterable[Task], processes: int | None) -> tuple[int, dict[str, str]]:
    """Run every task in a fork of this process, which has its imports, and print how far it is.

    At most ``processes`` run side by side, by default one per core. What a task leaves behind
    (launches that are kept, patches, a crash) does not reach the others. Returns how many compiled
    something, and what each one that failed has printed.
    """
    waiting = deque(tasks)
    began = printed = time.monotonic()
    at_once = processes or len(os.sched_getaffinity(0))
    count, compiled, failures = len(waiting), 0, {}
    running: dict[Any, tuple[str, Any, TextIO]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                task, output = waiting.popleft(), TemporaryFile("w+")  # noqa: SIM115 - closed below
                process = _FORK.Process(target=_run, args=(task, output))
                process.start()
                running[process.sentinel] = task.name, process, output
            for ended in wait(list(running)):
                name, process, output = running.pop(ended)
                process.join()
                compiled += process.exitcode == 0
                if process.exitcode not in (0, _WAS_THERE):
                    output.seek(0)
                    failures[name] = output.read() or "its process was killed"
                output.close()
                now, done = time.monotonic(), count - len(waiting) - len(running)
                if now - printed >= _PRINT_EVERY or done == count:
                    printed = now
                    print(
                        f"{done} of {count} kernels after {now - began:.0f} s ({name})", flush=True
                    )
    finally:
        for _, process, _ in running.values():
            process.terminate()
    return compiled, failures


def _run(task: Task, output: TextIO) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = sys.stderr = output
    for stream in (1, 2):  # of compilers
        os.dup2(output.fileno(), stream)
    if not task.run():
        sys.exit(_WAS_THERE)


@contextmanager
def kernels_noted() -> Iterator[dict[Any, Task]]:
    """Inside, kernels of FlashQLA and Triton are not run; each variant is noted once, as a task."""
    noted: dict[Any, Task] = {}
    with ExitStack() as patches:
        if find_spec("tilelang") is not None:
            from tilelang.jit import JITImpl  # pyright: ignore[reportMissingImports]

            patches.enter_context(patch.object(JITImpl, "__call__", _noting_tilelang(noted)))
        if find_spec("triton") is not None:
            patches.enter_context(_triton_noted(noted))
        yield noted


def _noting_tilelang(noted: dict[Any, Task]) -> Callable:
    def note(kernel: Any, *args: Any, **kwargs: Any) -> Callable:
        kernel.target = _TARGET
        entry = CacheEntry.of(kernel, args, kwargs, ARCH)
        compile = partial(_compile_tilelang, entry, kernel, args, kwargs)
        noted.setdefault(entry, Task(f"{entry.name}, {expected_heads()}", compile, "flash_qla"))
        return lambda *tensors, **named: None

    return note


def _compile_tilelang(entry: CacheEntry, kernel: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    if entry.is_there():
        return False
    entry.remember(kernel.compile.__wrapped__(*args, **kwargs))
    return True


@contextmanager
def _triton_noted(noted: dict[Any, Task]) -> Iterator[None]:
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from ..ops.kernels import launch

    run = JITFunction.run

    def note(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        compile = self._do_compile

        def note_variant(key: Any, *more: Any) -> None:
            task = Task(self.__name__, partial(_compile_triton, compile, key, *more))
            noted.setdefault((self, repr(key)), task)

        with patch.object(self, "_do_compile", note_variant):
            run(self, *args, grid=grid, warmup=True, **kwargs)

    with (
        patch.object(JITFunction, "run", note),
        # Kernels that are timed (fla's) are chosen on a GPU, by the first step of a run.
        patch.object(Autotuner, "run", lambda *_, **__: None),
        # Triton itself launches each time, with the tensors at hand.
        patch.object(launch, "_watched", lambda kernel: True),
    ):
        yield


def _compile_triton(compile: Callable, *variant: Any) -> bool:
    """Whether this variant was not in Triton's cache on disk."""
    import triton

    found: list[bool] = []

    def note(**event: Any) -> None:
        found.append(event["cache_hit"])

    with patch.object(triton.knobs.compilation, "listener", note):
        compile(*variant)
    return not all(found)

"""Compiling for a Hopper GPU where there is none: what stands in for it, and parallel forks.

tilelang and Triton key what they keep on disk by the kernel, the target and the versions, so a
cache that was filled without a GPU serves a machine with one.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch

from ..gdn.flash_qla.builds import CacheEntry

_ARCH, _TARGET = "9.0", {"kind": "cuda", "arch": "sm_90a"}
_FORK = multiprocessing.get_context("fork")
_EVERY = 5.0  # seconds between two lines of progress


class Task(NamedTuple):
    """One thing to compile."""

    name: str
    run: Callable[[], bool]  # compiles it; returns whether there was anything to compile
    found: Callable[[], bool] | None = None  # is it there? None if only ``run`` can find out
    soon: bool = False  # the first step of a run needs it, so it begins before others

    @property
    def missing(self) -> bool:
        return self.found is None or not self.found()


def processors() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_tasks(tasks: Iterable[Task], processes: int) -> tuple[int, dict[str, str]]:
    """Run every task in a fork of this process, which has its imports, and print how far it is.

    What a task leaves behind (launches that are kept, patches, a crash) does not reach the others.
    Returns how many compiled something, and the error of each one that failed.
    """
    waiting = deque(tasks)
    began = said = time.monotonic()
    count, compiled, failures = len(waiting), 0, {}
    running: dict[Connection, tuple[str, Any]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < max(1, processes):
                task = waiting.popleft()
                answer, to_here = _FORK.Pipe(duplex=False)
                process = _FORK.Process(target=_run, args=(task, to_here))
                process.start()
                to_here.close()  # so that the pipe ends with the process
                running[answer] = task.name, process
            for answer in wait(list(running)):
                assert isinstance(answer, Connection)
                name, process = running.pop(answer)
                try:
                    result = answer.recv()
                except EOFError:
                    result = "its process was killed"
                process.join()
                if isinstance(result, str):
                    failures[name] = result
                else:
                    compiled += result
                at, done = time.monotonic(), count - len(waiting) - len(running)
                if at - said >= _EVERY or done == count:
                    said = at
                    print(
                        f"{done} of {count} kernels after {at - began:.0f} s ({name})", flush=True
                    )
    finally:
        for _, process in running.values():
            process.terminate()
    return compiled, failures


def _run(task: Task, answer: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(os.devnull, "w") as nowhere:  # for what compilers print; errors are sent
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    try:
        answer.send(task.run())
    except BaseException:
        answer.send(traceback.format_exc())


def stand_in_for_hopper(multiprocessors: int = 132) -> None:
    """From here on torch has a Hopper GPU that cannot be used, and tilelang compiles for it."""
    properties = SimpleNamespace(
        major=9, minor=0, multi_processor_count=multiprocessors, name="Hopper", gcnArchName=""
    )
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.synchronize = lambda device=None: None

    from tilelang.contrib import nvcc  # pyright: ignore[reportMissingImports]

    nvcc.get_target_compute_version = lambda target=None: _ARCH


@contextmanager
def flash_qla_noted(heads: str) -> Iterator[dict[CacheEntry, Task]]:
    """Inside, kernels of FlashQLA are not run; each is noted once, as a task that compiles it."""
    from tilelang.jit import JITImpl  # pyright: ignore[reportMissingImports]

    noted: dict[CacheEntry, Task] = {}

    def note(kernel: Any, *args: Any, **kwargs: Any) -> Callable:
        kernel.target = _TARGET
        entry = CacheEntry.of(kernel, args, kwargs, _ARCH)
        compile = partial(_compile_tilelang, entry, kernel, args, kwargs)
        noted.setdefault(entry, Task(f"{entry.name}, {heads}", compile, entry.is_there))
        return lambda *tensors, **named: None

    with patch.object(JITImpl, "__call__", note):
        yield noted


def _compile_tilelang(entry: CacheEntry, kernel: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    entry.remember(kernel.compile.__wrapped__(*args, **kwargs))
    return True


class HopperDriver:
    """The methods of a Triton driver that are needed to compile."""

    def get_current_device(self) -> HopperDriver:
        return self  # a device that no launch uses: what is compiled here is never launched

    def get_current_stream(self, device: HopperDriver) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def compile_triton(launch: Callable[[], None]) -> bool:
    """Compile the Triton kernels that ``launch`` launches, and do not run them.

    Returns whether one of them was not in Triton's cache on disk.
    """
    import triton
    from triton.runtime.jit import JITFunction

    run, found = JITFunction.run, []

    def compile(self: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def note(**event: Any) -> None:
        found.append(event["cache_hit"])

    with (
        patch.object(triton.runtime.driver, "_active", HopperDriver()),
        patch.object(triton.knobs.compilation, "listener", note),
        patch.object(JITFunction, "run", compile),
    ):
        launch()
    return not all(found)

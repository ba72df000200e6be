"""What is compiled, as tasks: noted from calls that compute nothing, run in parallel forks.

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
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple
from unittest.mock import patch

from ..gdn.flash_qla.builds import CacheEntry, expected_heads
from .absent_gpu import ARCH

_FORK = multiprocessing.get_context("fork")
_EVERY = 5.0  # seconds between two lines of progress
_TARGET = {"kind": "cuda", "arch": "sm_90a"}


class Task(NamedTuple):
    """One thing to compile."""

    name: str
    run: Callable[[], bool]  # compiles it; returns whether there was anything to compile
    found: Callable[[], bool] | None = None  # is it there? None if only ``run`` can find out
    kind: str = "triton"  # or "flash_qla"

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


@contextmanager
def kernels_noted() -> Iterator[dict[Any, Task]]:
    """Inside, kernels of FlashQLA and Triton are not run; each variant is noted once, as a task."""
    noted: dict[Any, Task] = {}
    with ExitStack() as patches:
        if find_spec("tilelang") is not None:
            patches.enter_context(_tilelang_noted(noted))
        if find_spec("triton") is not None:
            patches.enter_context(_triton_noted(noted))
        yield noted


@contextmanager
def _tilelang_noted(noted: dict[Any, Task]) -> Iterator[None]:
    from tilelang.jit import JITImpl  # pyright: ignore[reportMissingImports]

    def note(kernel: Any, *args: Any, **kwargs: Any) -> Callable:
        kernel.target = _TARGET
        entry = CacheEntry.of(kernel, args, kwargs, ARCH)
        compile = partial(_compile_tilelang, entry, kernel, args, kwargs)
        name = f"{entry.name}, {expected_heads()}"
        noted.setdefault(entry, Task(name, compile, entry.is_there, "flash_qla"))
        return lambda *tensors, **named: None

    with patch.object(JITImpl, "__call__", note):
        yield


def _compile_tilelang(entry: CacheEntry, kernel: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
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
        # Kernels that are timed are chosen on a GPU: `--kernels fla`.
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

"""Records a task for each kernel that a layer would launch, and runs the tasks in
forks.

The keys of tilelang's and Triton's caches on disk are the kernel, the target and the
versions. So a machine with a GPU can use a cache that was filled without a GPU.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, NamedTuple, TextIO
from unittest.mock import patch

from ..gdn.flash_qla.builds import (
    cache_entry,
    expected_heads,
    kernel_name_of,
    mark_as_cached,
)
from .absent_gpu import HOPPER_ARCH

_FORK_CONTEXT = multiprocessing.get_context("fork")
_SECONDS_BETWEEN_LINES = 5.0  # seconds between two lines of progress
_TILELANG_TARGET = {"kind": "cuda", "arch": "sm_90a"}  # tilelang's name for Hopper
_STATUS_ALREADY_COMPILED = (
    3  # exit status of a fork whose kernel was in the cache already
)


class Task(NamedTuple):
    """One variant of a kernel to compile."""

    name: str
    # compiles the kernel and returns True; returns False if the cache had the kernel
    run: Callable[[], bool]
    kind: str = "triton"  # the package with the kernel: "triton" or "flash_qla"


def run_tasks(
    tasks: Iterable[Task], processes: int | None
) -> tuple[int, dict[str, str]]:
    """Run every task in its own fork of this process, and print the progress.

    At most ``processes`` forks run at a time; None: one per core. Returns the number of
    tasks that compiled a kernel, and the output of each failed task by name.

    A fork has the modules that this process imported. The side effects of a task
    (recorded launches, patches, a crash) stay in its fork.
    """
    waiting = deque(tasks)
    began = printed = time.monotonic()
    limit = processes or len(os.sched_getaffinity(0))
    count = len(waiting)
    compiled = 0
    failures = {}
    # A fork's sentinel, which `wait` takes -> the task's name, the fork, its output.
    running: dict[Any, tuple[str, ForkProcess, TextIO]] = {}
    try:
        while waiting or running:
            while waiting and len(running) < limit:
                task = waiting.popleft()
                output = TemporaryFile("w+")  # noqa: SIM115 - closed below
                process = _FORK_CONTEXT.Process(
                    target=_run_in_fork, args=(task, output)
                )
                process.start()
                running[process.sentinel] = task.name, process, output
            for ended in wait(list(running)):
                name, process, output = running.pop(ended)
                process.join()
                compiled += process.exitcode == 0
                if process.exitcode not in (0, _STATUS_ALREADY_COMPILED):
                    output.seek(0)
                    failures[name] = output.read() or "its process was killed"
                output.close()
                now = time.monotonic()
                done = count - len(waiting) - len(running)
                if now - printed >= _SECONDS_BETWEEN_LINES or done == count:
                    printed = now
                    print(
                        f"{done} of {count} kernels after {now - began:.0f} s ({name})",
                        flush=True,
                    )
    finally:
        for _, process, _ in running.values():
            process.terminate()
    return compiled, failures


def _run_in_fork(task: Task, output: TextIO) -> None:
    """Run ``task`` with ``output`` as stdout and stderr; exit with 0 or
    _STATUS_ALREADY_COMPILED.

    Ctrl-C kills this fork at once, so that no traceback of it is printed.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout = sys.stderr = output
    for stream in (1, 2):  # compilers write to these file descriptors
        os.dup2(output.fileno(), stream)
    if not task.run():
        sys.exit(_STATUS_ALREADY_COMPILED)


@contextmanager
def recorded_kernels() -> Iterator[dict[Hashable, Task]]:
    """In this context kernels do not run. Each variant that would run becomes a task in
    the dict that the context gives; its keys name the variants."""
    from triton.runtime.autotuner import Autotuner
    from triton.runtime.jit import JITFunction

    from ..ops.kernels import launch

    recorded: dict[Hashable, Task] = {}
    triton_run = JITFunction.run

    def record_tilelang(kernel: Any, *args: object, **kwargs: object) -> Callable:
        """Record a variant of a FlashQLA kernel; return a kernel that does nothing.

        This function replaces the call of tilelang's ``JITImpl``, here ``kernel``:
        ``args`` and ``kwargs`` name the variant. The task's name also has
        ``expected_heads()``: FlashQLA's rule sets these heads before it calls a kernel.
        """
        kernel.target = _TILELANG_TARGET
        cache_file = cache_entry(kernel, args, kwargs, HOPPER_ARCH)
        compile_variant = partial(_compile_tilelang, cache_file, kernel, args, kwargs)
        name = f"{kernel_name_of(cache_file)}, {expected_heads()}"
        recorded.setdefault(cache_file, Task(name, compile_variant, "flash_qla"))
        return lambda *tensors, **named: None

    def record_triton(
        kernel: JITFunction,
        *args: object,
        grid: object,
        warmup: bool = False,
        **kwargs: object,
    ) -> None:
        """Record a variant of a Triton kernel without a launch.

        This function replaces ``JITFunction.run``, with the same arguments. It calls
        Triton's own ``run`` with ``warmup=True``, which finds the variant and launches
        nothing. :func:`record_variant` replaces the compilation. The caller's
        ``warmup`` is ignored.
        """
        do_compile = kernel._do_compile

        def record_variant(key: object, *more: object) -> None:
            """Record a task that compiles this variant of the kernel, in place of
            compiling it.

            ``key`` is Triton's key of the variant; ``more`` are the other arguments of
            its ``_do_compile``.
            """
            compile_variant = partial(_compile_triton, do_compile, key, *more)
            task = Task(kernel.__name__, compile_variant)
            recorded.setdefault((kernel, repr(key)), task)

        with patch.object(kernel, "_do_compile", record_variant):
            triton_run(kernel, *args, grid=grid, warmup=True, **kwargs)

    with (
        patch.object(JITFunction, "run", record_triton),
        # fla's autotuned kernels are not compiled here: a run chooses them by timing on
        # its GPU.
        patch.object(Autotuner, "run", lambda *_, **__: None),
        # A Launch of this package calls a cached kernel without Triton's run, except for
        # kernels with hooks. With this patch all calls go through the run patched above.
        patch.object(launch, "_has_launch_hooks", lambda kernel: True),
        ExitStack() as patches,
    ):
        if find_spec("tilelang") is not None:
            from tilelang.jit import JITImpl  # pyright: ignore[reportMissingImports]

            patches.enter_context(patch.object(JITImpl, "__call__", record_tilelang))
        yield recorded


def _compile_tilelang(
    cache_file: Path, kernel: Any, args: tuple, kwargs: dict[str, object]
) -> bool:
    """Compile the variant of tilelang's ``kernel`` that ``args`` and ``kwargs`` name;
    return False if tilelang's cache has it (``cache_file`` exists)."""
    if cache_file.exists():
        return False
    # This is tilelang's own method. The method that replaces it in a run first takes the
    # lock of these heads. Here the run or this command holds the lock already.
    mark_as_cached(cache_file, kernel.compile.__wrapped__(*args, **kwargs))
    return True


def _compile_triton(do_compile: Callable, *variant: object) -> bool:
    """Call ``do_compile(*variant)``, the kernel's ``_do_compile``; return False if
    Triton's disk cache had the variant."""
    import triton

    cache_hits: list[bool] = []

    def store_cache_hit(**event: Any) -> None:
        """Triton calls this after a compilation or a hit in its cache."""
        cache_hits.append(event["cache_hit"])

    with patch.object(triton.knobs.compilation, "listener", store_cache_hit):
        do_compile(*variant)
    return not all(cache_hits)

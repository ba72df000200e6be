"""Tasks that compile, in parallel processes, with a progress bar.

The processes are forks of this one, so they have its imports. Importing takes longer than compiling
many of the kernels.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path
from typing import NamedTuple, TextIO

_FOUND = 3  # exit status of a process that had nothing to compile
_TAIL = 4000  # characters of a failed task's output that are shown


@dataclass(frozen=True, eq=False)
class Task:
    """One thing to compile.

    Attributes:
        name: what it is.
        run: compiles it and leaves it where a run finds it; called in a process of its own. It
            returns whether there was anything to compile.
        found: whether it is there already. Must be quick; None if only ``run`` can find out.
        weight: tasks of greater weight begin first.
        soon: a run waits for this one, while others can come later.
        lock: the file that a run locks while it compiles this; None if it does not.
    """

    name: str
    run: Callable[[], bool]
    found: Callable[[], bool] | None = None
    weight: int = 0
    soon: bool = False
    lock: Path | None = None


class Outcome(NamedTuple):
    """Results of tasks: how many compiled something, and which ones failed."""

    compiled: int
    failures: list[Failure]


@dataclass(frozen=True)
class Failure:
    name: str
    output: str

    def __str__(self) -> str:
        return f"{self.name}:\n{self.output}"


def processors() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_tasks(
    tasks: Iterable[Task],
    processes: int,
    done: Callable[[Task], None],
    hurry: bool = False,
) -> Outcome:
    """Run every task; ``done`` is called as each ends. A failure leaves the others running.

    ``hurry``: while a task with ``soon`` runs, the others get at most half of the processes,
    because two threads of a core slow each other down.

    On any exception here, also KeyboardInterrupt, the processes are killed.
    """
    waiting = deque(sorted(tasks, key=lambda task: -task.weight))
    fork, running, compiled, failures = multiprocessing.get_context("fork"), {}, 0, []
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    try:
        while waiting or running:
            while waiting:
                wanted = any(task.soon for _, task, _ in running.values())
                half = hurry and wanted and not waiting[0].soon
                if len(running) >= max(1, processes // 2 if half else processes):
                    break
                task = waiting.popleft()
                output = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
                process = fork.Process(target=_run, args=(task, output), name=task.name)
                process.start()
                running[process.sentinel] = process, task, output
            for sentinel in wait(list(running)):
                process, task, output = running.pop(sentinel)
                process.join()
                compiled += process.exitcode == 0
                if process.exitcode not in (0, _FOUND):
                    failures.append(Failure(task.name, _said(output, process.exitcode)))
                output.close()
                done(task)
    finally:
        for process, *_ in running.values():
            process.kill()
    return Outcome(compiled, failures)


def _run(task: Task, output: TextIO) -> None:
    """In the new process: what the compilers print goes to ``output``."""
    for stream in (1, 2):
        os.dup2(output.fileno(), stream)
    try:
        compiled = task.run()
    except Exception:
        os.write(2, traceback.format_exc().encode())
        sys.exit(1)
    sys.exit(0 if compiled else _FOUND)


def _said(output: TextIO, code: int | None) -> str:
    output.seek(0)
    return (output.read().strip() or f"exit status {code}")[-_TAIL:]


class Progress:
    """A bar on a terminal, if tqdm is installed; else a line every few seconds."""

    def __init__(self, total: int, every: float = 5.0, out: TextIO = sys.stdout) -> None:
        self._total, self._every, self._out = total, every, out
        self._count, self._began = 0, time.monotonic()
        self._said, self._bar = self._began, None
        if out.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                return
            self._bar = tqdm(total=total, unit="kernel", dynamic_ncols=True, file=out)

    def done(self, task: Task) -> None:
        self._count += 1
        if self._bar is not None:
            self._bar.set_postfix_str(task.name)
            self._bar.update()
            return
        at = time.monotonic()
        if at - self._said >= self._every or self._count == self._total:
            self._said = at
            seconds = at - self._began
            line = f"{self._count} of {self._total} kernels after {seconds:.0f} s ({task.name})"
            print(line, file=self._out, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()

"""Tasks that compile, in parallel forks of this process, which have its imports."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from typing import NamedTuple

_FORK = multiprocessing.get_context("fork")
_EVERY = 5.0  # seconds between two lines of progress


@dataclass(frozen=True, eq=False)
class Task:
    """One thing to compile."""

    name: str
    run: Callable[[], bool]  # compiles it; returns whether there was anything to compile
    found: Callable[[], bool] | None = None  # is it there? None if only ``run`` can find out
    soon: bool = False  # the first step of a run needs it, so it begins before others


class Outcome(NamedTuple):
    """How many tasks compiled something, and the error of each one that failed."""

    compiled: int
    failures: dict[str, str]


_tasks: list[Task] = []  # the forks run these by number: kernels cannot be pickled


def processors() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_tasks(tasks: Iterable[Task], processes: int) -> Outcome:
    """Run every task and print how far it is. A failure leaves the others running."""
    global _tasks
    _tasks = list(tasks)
    began = said = time.monotonic()
    compiled, failures = 0, {}
    with ProcessPoolExecutor(max(1, processes), _FORK, _quiet) as pool:
        futures = {pool.submit(_run, number): task for number, task in enumerate(_tasks)}
        try:
            for count, future in enumerate(as_completed(futures), 1):
                name = futures[future].name
                if (error := future.exception()) is None:
                    compiled += future.result()
                else:
                    failures[name] = "".join(traceback.format_exception(error))
                at = time.monotonic()
                if at - said >= _EVERY or count == len(_tasks):
                    said = at
                    print(f"{count} of {len(_tasks)} kernels after {at - began:.0f} s ({name})",
                          flush=True)  # fmt: skip
        except KeyboardInterrupt:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return Outcome(compiled, failures)


def _run(number: int) -> bool:
    # In a fork of its own: what one task leaves behind (launches that are kept, patches, a crash)
    # does not reach the next one.
    with ProcessPoolExecutor(1, _FORK) as own:
        return own.submit(_run_here, number).result()


def _run_here(number: int) -> bool:
    return _tasks[number].run()


def _quiet() -> None:
    """In a new process: hide what compilers print (errors are raised), and end at Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    with open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)

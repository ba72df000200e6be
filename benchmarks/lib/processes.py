"""Does the same work in several processes at once and compares what they found."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from .repeats import Report

CONTEXT: Any = multiprocessing.get_context("spawn")
# Seconds that the other processes have after one has failed: they may wait for it.
GRACE = 10


def _work(pipe: Connection, function: Callable, index: int, args: tuple) -> None:
    # malloc has read it; children must not inherit it
    os.environ.pop("MALLOC_PERTURB_", None)
    try:
        answer = (function(index, *args), "")
    except BaseException:
        answer = (None, traceback.format_exc())
    # not pipe.send, which sends a tensor as memory that ends with this process
    pipe.send_bytes(pickle.dumps(answer))


def in_processes(
    function: Callable, *args: Any, processes: int = 2, timeout: float = 600
) -> list[Any]:
    """Run ``function(index, *args)`` in fresh processes side by side; return their
    results.

    They share the GPU, if ``function`` uses one, and so compete with each other too.
    Memory from malloc is filled with garbage in them (glibc's ``MALLOC_PERTURB_``).

    Args:
        function: a module-level function; ``index`` counts the processes from 0.
        timeout: in seconds, for all of them together.

    Raises:
        RuntimeError: one of them raised (its traceback follows), died or took too long.
    """
    kept = os.environ.get("MALLOC_PERTURB_")
    started = []
    waiting = {}
    for index in range(processes):
        ours, theirs = CONTEXT.Pipe(duplex=False)
        os.environ["MALLOC_PERTURB_"] = str(85 + 80 * index % 170)
        process = CONTEXT.Process(target=_work, args=(theirs, function, index, args))
        process.start()
        theirs.close()
        started.append(process)
        waiting[ours] = index
    os.environ.pop("MALLOC_PERTURB_")
    if kept is not None:
        os.environ["MALLOC_PERTURB_"] = kept
    results: dict[int, Any] = {}
    failures: dict[int, str] = {}
    deadline = time.monotonic() + timeout
    while waiting:
        ready: Any = wait(list(waiting), max(0.0, deadline - time.monotonic()))
        if not ready:
            for index in waiting.values():
                failures[index] = "it was not done in time"
            break
        for pipe in ready:
            index = waiting.pop(pipe)
            try:
                results[index], error = pickle.loads(pipe.recv_bytes())
            except EOFError:
                error = "it died"
            if error:
                failures[index] = error
                deadline = min(deadline, time.monotonic() + GRACE)
    for process in started:
        if failures:
            process.kill()
        process.join()
    if failures:
        texts = [f"process {index}:\n{failures[index]}" for index in sorted(failures)]
        raise RuntimeError("\n".join(texts))
    return [results[index] for index in range(processes)]


def compare_processes(reports: Sequence[Report]) -> str | None:
    """What is not equal in the reports of several processes; None when all of it is.

    A repeat that differed in one of them comes first, then the first tensor whose
    digest differs.
    """
    first, *others = reports
    assert others and all(x.digests.keys() == first.digests.keys() for x in others)
    for index, report in enumerate(reports):
        if report.difference is not None:
            return f"process {index}: {report}"
    for index, report in enumerate(others, 1):
        for name, expected in first.digests.items():
            if report.digests[name] != expected:
                return f"{name} differs between process 0 and process {index}"
    return None

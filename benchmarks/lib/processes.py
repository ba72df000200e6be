"""Does the same work in several processes at once and compares what they found."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .repeats import Report


def _work(folder: str, index: int, function: Callable, args: tuple) -> None:
    # malloc has read it; children must not inherit it
    os.environ.pop("MALLOC_PERTURB_", None)
    try:
        answer = ("returned", function(index, *args))
    except BaseException:
        answer = ("raised", traceback.format_exc())
    (Path(folder) / str(index)).write_bytes(pickle.dumps(answer))


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
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        kept = os.environ.get("MALLOC_PERTURB_")
        started = []
        try:
            for index in range(processes):
                os.environ["MALLOC_PERTURB_"] = str(85 + 80 * index % 170)
                started.append(
                    context.Process(target=_work, args=(folder, index, function, args))
                )
                started[-1].start()
        finally:
            os.environ.pop("MALLOC_PERTURB_", None)
            if kept is not None:
                os.environ["MALLOC_PERTURB_"] = kept
        answers = []
        deadline = time.monotonic() + timeout
        for index, process in enumerate(started):
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                for other in started:
                    other.kill()
                    other.join()
                raise RuntimeError(f"process {index} was not done after {timeout} s.")
            path = Path(folder) / str(index)
            if not path.exists():
                raise RuntimeError(
                    f"process {index} died with exit code {process.exitcode}."
                )
            answers.append(pickle.loads(path.read_bytes()))
    failures = [
        f"process {i}:\n{text}"
        for i, (kind, text) in enumerate(answers)
        if kind == "raised"
    ]
    if failures:
        raise RuntimeError("\n".join(failures))
    return [value for _, value in answers]


def compare_processes(reports: Sequence[Report]) -> str | None:
    """What is not equal in the reports of several processes; None when all of it is.

    A repeat that differed in one of them comes first, then the first tensor whose
    digest differs.

    Raises:
        ValueError: fewer than two reports, reports of different tensors, or no digests.
    """
    names = [list(report.digests) for report in reports]
    if len(reports) < 2 or not names[0] or any(other != names[0] for other in names):
        raise ValueError(
            f"reports of {len(reports)} processes with digests of {names} cannot be "
            "compared; at least two are needed, of the same tensors, made with "
            "digests=True."
        )
    for index, report in enumerate(reports):
        if report.difference is not None:
            return f"process {index}: {report}"
    for index, report in enumerate(reports[1:], 1):
        for name, expected in reports[0].digests.items():
            if report.digests[name] != expected:
                return f"{name} differs between process 0 and process {index}"
    return None

"""From the command line to compiled kernels.

This process and its forks use no GPU: all of them are hidden before torch is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

from .arguments import parse

if TYPE_CHECKING:
    from .tasks import Task


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: all is compiled. 1: some kernels failed. 2: an error, printed on stderr."""
    arguments = parse(argv)
    if arguments.for_a_run:
        _end_with_the_run()
    began, visible = time.monotonic(), os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        from ..ops.build_lock import build_lock
        from .needs import needs_of, tasks_of

        needs = needs_of(arguments)
        tasks = tasks_of(needs, arguments)
        if arguments.dry_run:
            return _show(tasks)
        with ExitStack() as locks:
            if not arguments.for_a_run:  # such a run holds the locks already
                # A run that starts meanwhile waits for what it needs, and does not compile it too.
                for heads in sorted(needs.flash_qla, key=str):
                    locks.enter_context(build_lock(heads.lock, f"FlashQLA for {heads}"))
            status = _compile(tasks, arguments.processes, began)
        for heads, parts in needs.flash_qla.items() if status == 0 else ():
            for part in parts:
                heads.ready(part, arguments.multiprocessors).touch()
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; what was compiled stays", file=sys.stderr)
        return 130
    if "fla" in arguments.kernels:
        from .fla_tuning import tune

        status = max(status, tune(needs.shares, needs.sizes, visible))
    return status


def _end_with_the_run() -> None:
    """End this process and those it started when the run that asked for it ends.

    The run holds the other end of standard input. It also started this process as the leader of a
    process group. The group has all forks of this process and the compilers.
    """

    def watch() -> None:
        # Not sys.stdin: a fork closes it, and would wait for the lock of the thread that reads it.
        while os.read(0, 4096):
            pass
        os.killpg(0, signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _missing(tasks: list[Task]) -> list[Task]:
    return [task for task in tasks if task.found is None or not task.found()]


def _show(tasks: list[Task]) -> int:
    known = [task for task in tasks if task.found]
    missing = _missing(known)
    for task in missing:
        print(f"missing: {task.name}")
    print(f"FlashQLA: {len(known) - len(missing)} kernels are there, {len(missing)} are missing")
    if len(known) < len(tasks):
        print(f"Triton: {len(tasks) - len(known)} launches, which only compiling looks up")
    return 0


def _compile(tasks: list[Task], processes: int | None, began: float) -> int:
    from .tasks import processors, run_tasks

    missing = _missing(tasks)
    at_once = min(processes or processors(), len(missing))
    print(
        f"{len(tasks) - len(missing)} of {len(tasks)} are there; the rest is compiled or "
        f"looked up in {at_once} processes",
        flush=True,
    )
    compiled, failures = run_tasks(missing, at_once)
    took = time.monotonic() - began
    for name, error in failures.items():
        print(f"not compiled: {name}:\n{error}", file=sys.stderr)
    if failures:
        names = ", ".join(failures)
        print(f"{len(failures)} of {len(tasks)} failed after {took:.0f} s: {names}", flush=True)
        return 1
    done = f"{compiled} were compiled" if compiled else "all were there"
    print(f"{len(tasks)} of {len(tasks)} are ready after {took:.0f} s; {done}", flush=True)
    return 0

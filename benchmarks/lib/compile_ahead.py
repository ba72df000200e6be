"""FlashQLA's kernels for some heads, compiled before a script measures."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from .shapes import Cell


class Clock:
    """The seconds that a script has."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        return self._end - time.monotonic()


def compile_all(
    cells: list[Cell], clock: Clock, seconds: float
) -> set[tuple[int, int]]:
    """Compile the kernels of these heads, in their order; returns heads that are
    done."""
    done: set[tuple[int, int]] = set()
    end = clock.left - seconds
    here = Path(__file__).parents[1]
    path = os.pathsep.join(
        filter(None, (str(here.parent), os.environ.get("PYTHONPATH")))
    )
    for key, value in dict.fromkeys(cell.heads for cell in cells):
        commands = [
            [
                sys.executable,
                "-m",
                "megatron_gdn.warm_up",
                "--heads",
                f"{key}:{value}",
                "--uses",
                "cut",
                "rows",
                "uncut",
                "again",
            ],
            [sys.executable, str(here / "compile_upstream.py"), str(value)],
        ]
        began = time.monotonic()
        running = [
            subprocess.Popen(
                command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True
            )
            for command in commands
        ]
        try:
            codes = [
                process.wait(timeout=max(0.1, clock.left - end)) for process in running
            ]
        except subprocess.TimeoutExpired:
            for process in running:  # and the processes that they have started
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            print(f"{key}/{value}: not compiled within {seconds:.0f} s", flush=True)
            break
        took = f"{time.monotonic() - began:.0f} s"
        print(f"{key}/{value}: compiled in {took}, exit codes {codes}", flush=True)
        if codes[0] == 0:
            done.add((key, value))
    return done

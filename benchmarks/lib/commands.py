"""A command with a time limit and a log."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Of coreutils' timeout, and of a process that SIGKILL ended.
TIMED_OUT = (124, 137, -9)


def run_logged(
    command: Sequence[str],
    log: Path,
    seconds: float,
    end_by: str = "ABRT",
    environment: dict[str, str] | None = None,
) -> int:
    """Runs it in the checkout, which is among Python's imports; the status, one of
    `TIMED_OUT` if the time was over.

    Args:
        log: gets all that the command prints.
        end_by: the signal to the command and all that it started; five seconds later
            SIGKILL follows. At ABRT Python prints where it is.
    """
    given = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **(environment or {}),
    }
    limit = ["timeout", f"--signal={end_by}", "--kill-after=5", f"{seconds:.0f}"]
    with log.open("wb") as stream:
        done = subprocess.run(
            [*limit, *command],
            cwd=ROOT,
            env=os.environ | given,
            stdout=stream,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return done.returncode

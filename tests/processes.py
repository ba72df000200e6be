"""Processes of their own: this Python with other arguments, forks, and waiting for what they do."""

import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FORK = multiprocessing.get_context("fork")
PATIENCE = 30  # seconds on a busy machine


def python(*arguments, cwd=ROOT, timeout=300, ends=0, **environment):
    """This Python with the repository among its imports; it must end with the code ``ends``."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], cwd=cwd, timeout=timeout,
        env=os.environ | {"PYTHONPATH": str(ROOT), **environment}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == ends, done.stdout[-4000:] + done.stderr[-8000:]
    return done


def torchrun(ranks, *arguments, **options) -> str:
    """What a script, or ``-m`` a module, prints over so many ranks."""
    start = "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"
    return python(*start, *arguments, **options).stdout


def fork(function, *args) -> multiprocessing.process.BaseProcess:
    process = FORK.Process(target=function, args=args, daemon=True)
    process.start()
    return process


def until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)

"""The processes that compile while a run waits, with stand-ins for the compiler."""

import logging
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from megatron_gdn.ops.build_lock import BuildLock, build_once
from megatron_gdn.ops.gdn.flash_qla.builds import AheadOfRun

FORK = multiprocessing.get_context("fork")
PATIENCE = 30
# As `python -m megatron_gdn.warm_up --for-a-run`: a fork compiles, the process ends with its input.
COMPILES = """
import os, pathlib, sys, time
from megatron_gdn.warm_up.command import _end_with_the_run
_end_with_the_run()
folder, quick, slow = pathlib.Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
if os.fork() == 0:
    (folder / "written").write_text(str(os.getpid()))
    (folder / "written").rename(folder / "fork")  # who finds it reads all of it
    time.sleep(1000)
time.sleep(quick)
(folder / "quick").touch()
print("1 of 2 kernels", flush=True)
time.sleep(slow)
(folder / "slow").touch()
print("2 of 2 kernels", flush=True)
os.kill(int((folder / "fork").read_text()), 9)
"""


def command(folder: Path, quick: float, slow: float) -> list[str]:
    return [sys.executable, "-c", COMPILES, str(folder), str(quick), str(slow)]


def until(condition) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (FileNotFoundError, ProcessLookupError):  # gone before it was opened, or read
        return False


def compile_ahead(folder: Path, quick: float, slow: float, wanted: str) -> None:
    """A rank that wants one of the two kernels, and goes on with its steps."""
    logging.basicConfig(filename=folder / "log", format="%(message)s", force=True)

    def build(lock: BuildLock) -> None:
        AheadOfRun(command(folder, quick, slow), lock).wait_for((folder / wanted).exists)

    build_once((folder / wanted).exists, build, folder / "kernel.lock", wanted)
    (folder / "goes on").touch()
    time.sleep(1000)


@pytest.fixture
def rank():
    started = []

    def start(*args):
        process = FORK.Process(target=compile_ahead, args=args, daemon=True)
        process.start()
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


def test_a_run_goes_on_with_its_kernel_while_the_rest_is_compiled(tmp_path, rank):
    rank(tmp_path, 0.2, 3, "quick")
    until((tmp_path / "goes on").exists)
    lock = BuildLock(tmp_path / "kernel.lock")
    assert not (tmp_path / "slow").exists()
    assert not lock.take("another rank"), "the processes that compile hold the lock"
    until(lambda: "compiled in" in (tmp_path / "log").read_text())
    assert (tmp_path / "slow").exists() and "2 of 2 kernels" in (tmp_path / "log").read_text()
    assert lock.take("another rank")


def test_a_killed_rank_takes_its_compilers_along_and_another_goes_on(tmp_path, rank):
    killed = rank(tmp_path, 1000, 0, "quick")
    until((tmp_path / "fork").exists)
    fork = int((tmp_path / "fork").read_text())
    lock = BuildLock(tmp_path / "kernel.lock")
    assert not lock.take("another rank")
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: not alive(fork))
    lock.release()
    built = []
    build_once(lambda: bool(built), built.append, tmp_path / "kernel.lock", "quick")
    assert len(built) == 1


def test_compilers_that_fail_are_quoted_and_nobody_waits_for_them(tmp_path, caplog):
    lock = BuildLock(tmp_path / "kernel.lock")
    assert lock.take("this")
    fails = [sys.executable, "-c", "raise SystemExit('nvcc is not there')"]
    AheadOfRun(fails, lock).wait_for(lambda: False)
    assert "nvcc is not there" in caplog.text and "exit status 1" in caplog.text

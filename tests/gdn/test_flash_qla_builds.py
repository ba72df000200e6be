"""Processes that compile while a run waits, with stand-ins for compilers."""

import logging
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch

from megatron_gdn.gdn.flash_qla import builds
from megatron_gdn.gdn.flash_qla.builds import Heads
from megatron_gdn.ops.kernels.builds import lock_file
from tests.processes import fork, is_free, until

from .stand_ins import keep_cache_in

# As `python -m megatron_gdn.warm_up --for-a-run`: a fork compiles, the process ends
# with its input.
COMPILES = """
import os, pathlib, sys, time
from megatron_gdn.warm_up.__main__ import _exit_when_run_exits
_exit_when_run_exits()
folder, quick, slow = pathlib.Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
if os.fork() == 0:
    (folder / "written").write_text(str(os.getpid()))
    (folder / "written").rename(folder / "fork")  # who finds it reads all of it
    time.sleep(1000)
time.sleep(quick)
(folder / "quick-digest").touch()
print("1 of 2 kernels", flush=True)
time.sleep(slow)
(folder / "slow-digest").touch()
print("2 of 2 kernels", flush=True)
os.kill(int((folder / "fork").read_text()), 9)
"""


def alive(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().split()[2]
    except (
        FileNotFoundError,
        ProcessLookupError,
    ):  # gone before it was opened, or read
        return False


HEADS = Heads(2, 4, torch.bfloat16)


class Kernel:
    def __init__(self, entry: Path) -> None:
        self.entry = entry
        self.made_here = 0

    def compile(self):
        self.made_here += not self.entry.exists()


def call(folder: Path, wanted: str, heads: Heads = HEADS) -> Kernel:
    kernel = Kernel(folder / f"{wanted}-digest")
    builds._capability = lambda: builds.HOPPER_CAPABILITY
    builds.cache_entry = lambda *call: kernel.entry
    builds.set_next_calls(heads, "cut")
    builds.compile_once_per_machine([kernel])
    kernel.compile()
    return kernel


def want(folder: Path, quick: float, slow: float, wanted: str) -> None:
    logging.basicConfig(filename=folder / "log", format="%(message)s", force=True)
    output = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(output, 2)
    command = [sys.executable, "-c", COMPILES, str(folder), str(quick), str(slow)]
    builds.warm_up_command = lambda heads, part: command
    call(folder, wanted)
    (folder / f"goes on {os.getpid()}").touch()
    time.sleep(1000)


@pytest.fixture
def rank(tmp_path, monkeypatch):
    keep_cache_in(tmp_path, monkeypatch)
    monkeypatch.delenv("MEGATRON_GDN_COMPILE_AHEAD", raising=False)
    monkeypatch.setattr(builds, "_started_commands", {})
    started = []

    def start(*args):
        started.append(fork(want, tmp_path, *args))
        return started[-1]

    yield start
    for process in started:
        process.kill()


@pytest.mark.slow
def test_ranks_go_on_with_their_kernel_while_one_command_compiles_the_rest(
    tmp_path, rank
):
    for _ in range(3):
        rank(0.2, 3, "quick")
    until(lambda: len(list(tmp_path.glob("goes on *"))) == 3)
    assert not (tmp_path / "slow-digest").exists()
    assert not is_free(lock_file(HEADS.lock)), (
        "the processes that compile hold the lock"
    )
    until((tmp_path / "slow-digest").exists)
    until(lambda: is_free(lock_file(HEADS.lock)))
    said = (tmp_path / "log").read_text()
    assert said.count("for 2:4 heads in bf16 are compiled from here on") == 1
    assert f"into {str(tmp_path)!r}" in said
    assert "`python -m megatron_gdn.warm_up --heads 2:4 --operands bf16`" in said
    assert "1 of 2 kernels" in said and "2 of 2 kernels" in said


@pytest.mark.parametrize("waits", [True, False])
def test_a_killed_rank_takes_its_compilers_along(tmp_path, rank, waits):
    """Also a rank that has its kernel while the command compiles the rest."""
    killed = rank(1000 if waits else 0, 1000, "quick")
    until((tmp_path / "fork").exists)
    if not waits:
        until(lambda: list(tmp_path.glob("goes on *")))
        assert "in this process" not in (tmp_path / "log").read_text()
    fork = int((tmp_path / "fork").read_text())
    assert not is_free(lock_file(HEADS.lock))
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: not alive(fork))
    until(lambda: is_free(lock_file(HEADS.lock)))


def test_the_command_holds_the_lock_and_has_the_runs_paths_variables_and_errors(
    tmp_path, monkeypatch, capfd
):
    keep_cache_in(tmp_path, monkeypatch)
    monkeypatch.setattr(builds, "_started_commands", {})
    says = "import os, sys; print(os.getsid(0) == os.getpid(), os.environ['MARK'])"
    waits = [sys.executable, "-S", "-c", f"{says}; print(sys.path); sys.stdin.read()"]
    monkeypatch.setattr(builds, "warm_up_command", lambda heads, part: waits)
    monkeypatch.setenv("MARK", "given")
    monkeypatch.setattr(sys, "path", ["", "/of the run", *sys.path])
    builds.set_next_calls(HEADS, "cut")
    with builds.build_lock(HEADS.lock, "a kernel") as lock:
        process = builds._start_command(lock)
    assert not is_free(lock_file(HEADS.lock))  # though the run has let go
    process.communicate()  # closes the command's input
    assert is_free(lock_file(HEADS.lock))
    said = capfd.readouterr().err
    assert "True given" in said, "a session of its own, and the run's variables"
    assert repr([os.getcwd(), "/of the run"])[1:-1] in said


def test_compilers_that_fail_are_quoted_and_nobody_waits_for_them(
    tmp_path, rank, monkeypatch, caplog, capfd
):
    fails = [sys.executable, "-c", "raise SystemExit('nvcc is not there')"]
    monkeypatch.setattr(builds, "warm_up_command", lambda heads, part: fails)
    for name in ("_capability", "cache_entry"):
        monkeypatch.setattr(builds, name, None)  # and puts back what call() sets
    assert call(tmp_path, "quick").made_here == 1
    assert call(tmp_path, "slow").made_here == 1, (
        "by this process, which starts no others again"
    )
    assert capfd.readouterr().err.count("nvcc is not there") == 1
    assert caplog.text.count("compiled from here on") == 1
    assert (
        "compiles FlashQLA's quick for 2:4 heads in bf16 in this process" in caplog.text
    )


@pytest.mark.parametrize("known", [True, False])
def test_no_command_is_started_without_a_lock_or_for_heads_that_are_not_known(
    tmp_path, rank, monkeypatch, known
):
    for name in ("_capability", "cache_entry", "_start_command"):
        monkeypatch.setattr(builds, name, None)  # also: a start would be an error
    if known:
        (tmp_path / "file").touch()
        keep_cache_in(tmp_path / "file", monkeypatch)
    heads = HEADS if known else Heads(0, 0, torch.bfloat16)
    assert call(tmp_path, "quick", heads).made_here == 1


def test_each_version_of_the_compilers_has_a_cache_of_its_own(tmp_path, monkeypatch):
    keep_cache_in(tmp_path, monkeypatch)
    found = {}
    for version in ("0.1.3", "0.1.4", None):
        monkeypatch.setattr(builds, "installed_version", lambda _, v=version: v)
        found[builds.cache_folder()] = version
    assert len(found) == 3


@pytest.mark.parametrize("use", [*builds.USUAL_USES, "states"])
def test_the_command_compiles_the_use_at_hand_first_and_each_use_once(use, monkeypatch):
    monkeypatch.setattr(builds, "multiprocessors", lambda: 132)
    line = builds.warm_up_command(HEADS, use)
    uses = line[line.index("--uses") + 1 : line.index("--multiprocessors")]
    assert uses[0] == use
    assert sorted(uses) == sorted({use, *builds.USUAL_USES})

"""One of several processes builds; the others take its result, and its place if it is
killed."""

import errno
import fcntl
import logging
import os
import signal
import time
from pathlib import Path

import pytest

from megatron_gdn.ops.kernels import builds
from megatron_gdn.ops.kernels.builds import build_lock, lock_file
from tests.processes import PATIENCE, is_free, until
from tests.processes import fork as start


def want(folder: Path, name: str, seconds: float) -> None:
    logging.basicConfig(
        filename=folder / f"{name}.log", format="%(created)f %(message)s", force=True
    )
    (folder / f"{name} wants").write_text(str(time.time()))
    result = folder / "result"

    path = folder / "locks" / "kernel.lock"
    with build_lock(path, "kernel k for 16:32 heads", result.exists) as lock:
        if lock is not None:
            (folder / f"{name} builds").touch()
            time.sleep(seconds)
            with open(folder / "built", "a") as file:
                file.write(f"{name}\n")
            result.touch()
    assert result.exists()


def ended(*processes) -> None:
    for process in processes:
        process.join(PATIENCE)
        assert process.exitcode == 0


def test_one_builds_and_the_others_take_its_result(tmp_path):
    first = start(want, tmp_path, "a", 0.5)
    until((tmp_path / "a builds").exists)
    others = [start(want, tmp_path, name, 0.5) for name in "bc"]
    ended(first, *others)
    assert (tmp_path / "built").read_text() == "a\n"


def test_a_process_that_waits_says_within_a_second_for_what_and_for_whom(tmp_path):
    first = start(want, tmp_path, "a", 2.0)
    until((tmp_path / "a builds").exists)
    ended(first, start(want, tmp_path, "b", 0))
    began = float((tmp_path / "b wants").read_text())
    said, after = (tmp_path / "b.log").read_text().splitlines()
    assert (
        "waits for kernel k for 16:32 heads, which is being compiled by process "
        f"{first.pid}" in said
    )
    assert float(said.split()[0]) - began < 1
    assert "waited" in after and not (tmp_path / "a.log").read_text()


def test_a_killed_process_is_followed_by_one_that_waits(tmp_path):
    first = start(want, tmp_path, "a", 1000)
    until((tmp_path / "a builds").exists)
    second = start(want, tmp_path, "b", 0.1)
    # it waits
    until(lambda: (tmp_path / "b.log").exists() and (tmp_path / "b.log").read_text())
    os.kill(first.pid, signal.SIGKILL)
    ended(second)
    assert (tmp_path / "built").read_text() == "b\n"


def test_a_lock_names_its_holder_and_nothing_of_the_one_before(tmp_path):
    with build_lock(tmp_path / "k.lock", "k") as file:
        os.pwrite(file, b"process 1 on " + b"x" * 80, 0)
    with build_lock(tmp_path / "k.lock", "k") as file:
        assert builds._holder_of(file) == f"process {os.getpid()}"


@pytest.mark.parametrize(
    "answers", [[True], [False, True]], ids=["before", "meanwhile"]
)
def test_what_is_there_takes_no_lock(tmp_path, answers):
    is_built = iter(answers)
    with build_lock(tmp_path / "k.lock", "k", lambda: next(is_built, True)) as lock:
        assert lock is None


def test_a_failed_build_leaves_the_lock_to_others(tmp_path):
    with (
        pytest.raises(RuntimeError, match="no compiler"),
        build_lock(tmp_path / "k.lock", "k"),
    ):
        raise RuntimeError("no compiler")
    assert is_free(lock_file(tmp_path / "k.lock"))


def test_a_file_system_without_locks_lets_everyone_build(tmp_path, monkeypatch, caplog):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        build_lock(tmp_path / "k.lock", "k") as first,
        build_lock(tmp_path / "k.lock", "k") as two,
    ):
        assert first is not None and two is not None
    assert "TILELANG_CACHE_DIR" in caplog.text


def test_a_process_that_waits_leaves_the_core_to_the_one_that_builds(
    tmp_path, monkeypatch
):
    slept = []
    is_built = iter([False] * 3 + [True])
    monkeypatch.setattr(builds.time, "sleep", slept.append)
    monkeypatch.setattr(builds, "_try_to_lock", lambda file: False)
    path = tmp_path / "locks" / "kernel.lock"
    with build_lock(path, "kernel k", lambda: next(is_built)) as lock:
        assert lock is None
    assert slept == [0.1] * 3

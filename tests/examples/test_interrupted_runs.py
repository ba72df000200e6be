"""A run that is ended, in whatever way, goes on as if it never had been."""

import re
import resource
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random

import psutil
import pytest

from tests.examples import interruptions
from tests.examples.launching import EXAMPLES, ROOT, TINY, Launch, metrics, run

STEPS = 40


@pytest.fixture
def small_disk(tmp_path):
    """A real small file system."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)]
    if (
        not shutil.which("mount")
        or subprocess.run(mount, capture_output=True).returncode
    ):
        pytest.skip("this user may not mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> list[dict]:
    cwd = tmp_path_factory.mktemp("whole")
    run(*TINY, f"--train-iters={STEPS}", "--sample-tokens=0", "--data", text, cwd=cwd)
    return metrics(cwd / "runs/pretrain_hybrid")


@pytest.mark.parametrize(
    "seed",
    [pytest.param(seed, marks=pytest.mark.nightly) for seed in range(16)],
)
def test_a_run_that_is_ended_in_every_way_at_random_steps_has_the_losses_of_one_that_was_not(
    seed, whole, text, small_disk, tmp_path
):
    random = Random(seed)
    ends = [
        partial(interruptions.end_by_signal, signal.SIGINT),
        partial(interruptions.end_by_signal, signal.SIGTERM),
        interruptions.end_by_kill,
        interruptions.end_by_kill_amid_a_save,
        interruptions.end_by_full_disk,
    ]
    random.shuffle(ends)
    # A kill before the first checkpoint leaves nothing to go on from.
    first = next(end for end in ends if isinstance(end, partial))
    ends.remove(first)
    settings = [*TINY, f"--train-iters={STEPS}", "--sample-tokens=0", "--data", text]
    first(settings, tmp_path, random)
    for end in ends:
        end(["--resume"], tmp_path, random)
    run("--resume", cwd=tmp_path)
    assert metrics(tmp_path / "runs/pretrain_hybrid") == whole


@pytest.mark.slow
def test_a_full_disk_under_the_record_ends_the_run_with_a_checkpoint_on_the_other_disk(
    text, small_disk, tmp_path
):
    flags = [
        *TINY,
        "--train-iters=1000",
        "--data",
        text,
        "--save",
        tmp_path / "checkpoints",
    ]
    launch = Launch(*flags, cwd=tmp_path)
    launch.until(lambda: "step 1 " in launch.printed)
    interruptions.fill(small_disk / "filler")
    assert launch.end() == [0, 0], launch.printed
    said = launch.printed.splitlines()[-1]
    step = re.match(
        r"stopped by the disk of runs/\S+ is full; saved is step (\d+), ", said
    )
    assert step and f"--save {tmp_path}/checkpoints" in said, launch.printed
    assert (tmp_path / f"checkpoints/iter_{int(step[1]):07d}/metadata.json").is_file()
    assert "Traceback" not in launch.printed


def _files_of_100_kB() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))


@pytest.mark.slow
def test_files_that_may_not_grow_are_named_in_one_line_and_the_checkpoint_before_is_left(
    text, tmp_path
):
    run(*TINY, "--train-iters=2", "--data", text, cwd=tmp_path)
    launch = Launch("--resume", "--train-iters=6", cwd=tmp_path, limit=_files_of_100_kB)
    assert launch.end()[0] == 1
    said = r"runs/\S+/checkpoints cannot grow: File too large; saved is s"
    interruptions.assert_one_line(launch.printed, said)
    assert [
        p.name for p in (tmp_path / "runs/pretrain_hybrid/checkpoints").glob("iter*")
    ] == ["iter_0000002"]


def make_demo(*flags: object, cwd: Path) -> subprocess.Popen:
    command = [sys.executable, EXAMPLES / "pretrain_hybrid.py", "--nproc-per-node", 2]
    command += [*TINY, *flags]
    return subprocess.Popen(
        [*map(str, command)],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly
def test_ctrl_c_on_the_command_of_make_demo_ends_in_the_line_that_says_how_to_go_on(
    text, tmp_path
):
    """torchrun hands the signal on to the ranks, and would add a traceback of its
    own."""
    process = make_demo("--data", text, "--train-iters=1000", cwd=tmp_path)
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("step 1 "):
            process.send_signal(signal.SIGINT)
    assert process.wait() == 128 + signal.SIGINT, printed
    last = printed.splitlines()[-1]
    assert last.startswith("stopped by SIGINT (Ctrl-C); saved is step"), printed
    assert last.endswith("pretrain_hybrid.py --nproc-per-node 2 --resume"), printed
    assert "Traceback" not in printed
    assert metrics(interruptions.newest_output(tmp_path))


@pytest.mark.nightly
def test_a_rank_that_was_killed_is_named(text, tmp_path):
    killed = make_demo("--data", text, "--train-iters=1000", cwd=tmp_path)
    for line in killed.stdout:
        if line.startswith("step 1 "):
            psutil.Process(killed.pid).children()[1].send_signal(signal.SIGKILL)
        last = line
    assert killed.wait() == 128 + signal.SIGKILL
    assert last == "rank 1 was ended by SIGKILL\n"

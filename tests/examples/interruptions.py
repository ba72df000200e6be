"""Ways in which a run ends before its time, each at a random moment, and what it then
says."""

import contextlib
import re
import signal
import sys
import time
from pathlib import Path
from random import Random

from tests.examples.launching import Launch, metrics


def end_by_signal(
    number: signal.Signals, flags: list, cwd: Path, random: Random
) -> None:
    """SIGINT or SIGTERM: the step is finished and saved, and the last line says how to
    go on."""
    launch = _until_some_step(flags, cwd, random)
    launch.send(number)
    if random.random() < 0.3:
        launch.send(number)  # impatience changes nothing
    assert launch.end() == [0, 0], launch.printed
    said = re.fullmatch(
        rf"stopped by {number.name}.*; saved is step (\d+), (\S+); go on with: .* --resume",
        launch.printed.splitlines()[-1],
    )
    assert said, launch.printed
    assert int(said[1]) == metrics(newest_output(cwd))[-1]["iteration"]
    assert (cwd / said[2] / "metadata.json").is_file()
    assert "Traceback" not in launch.printed


def end_by_kill(flags: list, cwd: Path, random: Random) -> None:
    launch = _until_some_step(flags, cwd, random)
    time.sleep(random.random() * 0.2)
    launch.send(signal.SIGKILL)
    assert launch.end() == [-9, -9], launch.printed


def end_by_kill_amid_a_save(flags: list, cwd: Path, random: Random) -> None:
    """Kill -9 while a checkpoint is being written: it is not complete, and not taken
    for one."""
    left_over = _partial_saves(cwd)  # by an earlier kill
    launch = Launch(*flags, "--save-interval=2", cwd=cwd, limit=_hesitate)
    launch.until(lambda: _partial_saves(cwd) - left_over)
    time.sleep(random.random() * 0.05)
    launch.send(signal.SIGKILL)
    assert launch.end() == [-9, -9], launch.printed


def _partial_saves(cwd: Path) -> set[int]:
    """The inodes of the folders of checkpoints that are not complete: a save may have
    the name of one that was cut off."""
    found = set()
    for path in cwd.glob("runs/*/checkpoints/*.partial"):
        with contextlib.suppress(FileNotFoundError):
            found.add(path.stat().st_ino)
    return found


def _hesitate() -> None:
    """Wait a moment before a file or folder gets its last name, so that a kill can be
    in time."""
    sys.addaudithook(
        lambda event, args: time.sleep(0.3) if event == "os.rename" else None
    )


def end_by_full_disk(flags: list, cwd: Path, random: Random) -> None:
    """The disk under ``cwd/runs``, a small one of its own, fills up; room is made
    afterwards."""
    launch = _until_some_step(flags, cwd, random)
    filler = cwd / "runs" / "filler"
    while launch.is_running:
        fill(filler)
        time.sleep(0.01)
    codes = launch.end()
    filler.unlink()
    assert codes[0] == 1, launch.printed
    assert_one_line(
        launch.printed, r"the disk of \S*runs/\S+ is full; saved is step \d+, .*go on"
    )


def fill(filler: Path) -> None:
    try:
        with filler.open("ab", buffering=0) as stream:
            while True:
                stream.write(bytes(4096))
    except OSError:
        return


def assert_one_line(printed: str, pattern: str) -> None:
    said = [line for line in printed.splitlines() if "pretrain_hybrid.py: " in line]
    assert len(said) == 1, printed
    assert re.search(pattern, said[0]), printed
    assert "Traceback" not in printed


def newest_output(cwd: Path) -> Path:
    return max(
        (cwd / "runs").glob("*/metrics.jsonl"), key=lambda p: p.stat().st_mtime
    ).parent


def _until_some_step(flags: list, cwd: Path, random: Random) -> Launch:
    records = list((cwd / "runs").glob("*/metrics.jsonl"))
    steps = len(metrics(newest_output(cwd))) if records else 0
    target = steps + random.randint(1, 4)
    launch = Launch(*flags, f"--save-interval={random.randint(2, 5)}", cwd=cwd)
    # The record of a run that was killed is cut back to its checkpoint first.
    launch.until(lambda: "step " in launch.printed)
    return launch.until(lambda: len(metrics(newest_output(cwd))) >= target)

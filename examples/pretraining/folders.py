"""The folders of runs and of their checkpoints.

A run's folder holds ``metrics.jsonl``, ``loss.png``, ``tensorboard/`` and, as Megatron
writes them,

    checkpoints/latest_checkpointed_iteration.txt    the step to continue from
    checkpoints/iter_0000160/                        one complete distributed checkpoint

While a checkpoint is written, its folder's name ends in ``.partial``.
"""

from __future__ import annotations

import os
import tempfile
from itertools import count
from pathlib import Path

BASE = Path("runs/pretrain_hybrid")
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
LATEST = "latest_checkpointed_iteration.txt"
PARTIAL = ".partial"


def fresh_run(base: Path = BASE) -> Path:
    """The first of ``base``, ``base-2``, ``base-3``, ... that holds no run."""
    return next(path for path in _numbered(base) if not holds_a_run(path))


def newest_run(base: Path = BASE) -> Path:
    """The last of ``base``, ``base-2``, ``base-3``, ... that holds a run; ``base`` if
    none does."""
    newest = base
    for path in _numbered(base):
        if not holds_a_run(path):
            return newest
        newest = path
    raise AssertionError("_numbered never ends")


def _numbered(base: Path):
    yield base
    yield from (base.with_name(f"{base.name}-{n}") for n in count(2))


def holds_a_run(folder: Path) -> bool:
    """Whether steps were recorded in this output folder, or checkpoints saved."""
    record = folder / METRICS
    recorded = record.is_file() and record.stat().st_size > 0
    return recorded or holds_checkpoints(folder / CHECKPOINTS)


def holds_checkpoints(folder: Path) -> bool:
    return (folder / LATEST).exists() or bool(steps_in(folder))


def require_writable(folder: Path, flag: str) -> None:
    """Write a temporary file in ``folder``, or in the folder where it will be made.

    Raises:
        ValueError: it is a file, lies below one, or does not take files.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not there.is_dir():
        raise ValueError(f"{flag} {folder}: {there} is a file; name a folder.")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ValueError(
            f"{flag} {folder}: nothing can be written in {there} ({error.strerror}); "
            "name another folder."
        ) from error


def checkpoint_of(folder: Path, step: int) -> Path:
    return folder / f"iter_{step:07d}"


def steps_in(folder: Path) -> list[int]:
    """Steps whose checkpoint is complete, ascending; Megatron writes ``metadata.json``
    last."""
    names = (
        path.parent.name.removeprefix("iter_")
        for path in folder.glob("iter_*/metadata.json")
    )
    return sorted(int(name) for name in names if name.isdigit())


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """The folder of one step's checkpoint; the one that ``LATEST`` names when ``step``
    is None.

    Raises:
        FileNotFoundError: there is no such checkpoint.
        ValueError: ``LATEST`` does not hold a number.
    """
    steps = steps_in(folder)
    there = (
        f"complete are the steps {', '.join(map(str, steps))}"
        if steps
        else "none is complete"
    )
    latest = folder / LATEST
    if step is None:
        way_out = (
            f"{there}; name one with --ckpt-step."
            if steps
            else f"{there}; start afresh."
        )
        if not latest.is_file():
            if steps:
                raise FileNotFoundError(
                    f"There is no {latest}. Of its checkpoints {way_out}"
                )
            raise FileNotFoundError(
                f"{folder} holds no finished checkpoint (there is no {LATEST}); check "
                "--load, --save or --output-dir, or start without --resume."
            )
        content = latest.read_text().strip()
        if not content:
            raise ValueError(
                f"{latest} is empty: its writing was cut off, by a full disk or a "
                f"crash. Of the checkpoints beside it {way_out}"
            )
        if not content.isdigit():
            raise ValueError(
                f"{latest} holds {content[:40]!r}, which is not a step's number. Of "
                f"the checkpoints beside it {way_out}"
            )
        step = int(content)
    if step not in steps:
        raise FileNotFoundError(
            f"{folder} has no complete checkpoint of step {step}; {there}."
        )
    return checkpoint_of(folder, step)


def write_whole(path: Path, content: str) -> None:
    """Replace a file in one step: a reader finds the old or the new content, also after
    a crash."""
    new = path.with_name(path.name + ".new")
    with new.open("w") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    new.replace(path)

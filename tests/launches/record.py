"""The latest launch of each branch: docs/launches.jsonl, and the table of
docs/support.md."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path

import pytest
import torch

from benchmarks.lib.pages import filled, markdown
from tests.examples.launching import ROOT
from tests.launches.launching import CLONE

RECORDS = ROOT / "docs" / "launches.jsonl"
PAGE = ROOT / "docs" / "support.md"
KEY = ("script", "processes", "launch", "held to", "branch")
# Columns of the table: a branch on a CPU, or on GPUs (benchmarks/parallel_launches.py).
BRANCHES = ("core_r0.19.0", "main", "dev", "core_r0.19.0 on H200", "main on H200")


class Result:
    """What became of one launch: ``text`` is its cell of the table."""

    text = "fails"

    def is_refused(self, done: subprocess.CompletedProcess[str], message: str) -> None:
        """The launch ends with these words, of Megatron or of our layer."""
        self.text = "refused"
        assert done.returncode != 0 and message in done.stderr

    def trains(self) -> None:
        self.text = "trains"

    def equals(self, found: list[float], wanted: list[float], rel: float) -> None:
        """Hold losses to those of another launch, and keep how far apart they are."""
        assert len(found) == len(wanted) > 0
        off = max(abs(a - b) / b for a, b in zip(found, wanted, strict=True))
        self.text = f"{off:.0e}" if off > 1e-9 else "0"  # the log has seven digits
        assert found == pytest.approx(wanted, rel=rel)


@contextmanager
def recorded(
    script: str, processes: int, launch: str, held_to: str = ""
) -> Iterator[Result]:
    """Within it a launch, told by its flags, runs; its line is written if it fails,
    too."""
    result = Result()
    try:
        yield result
    except BaseException:
        result.text = "fails"
        raise
    finally:
        place = (script, str(processes), " ".join(launch.split()), held_to, branch())
        write(
            {
                **dict(zip(KEY, place, strict=True)),
                "commit": _git("rev-parse", "--short"),
                "torch": torch.__version__,
                "date": date.today().isoformat(),
                "result": result.text,
            }
        )


def branch() -> str:
    return _git("rev-parse", "--abbrev-ref")


def _git(*command: str) -> str:
    """What git says of the clone's HEAD; its folder's name where git knows none."""
    assert CLONE is not None
    asked = ["git", "-C", CLONE, *command, "HEAD"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() or Path(CLONE).name


def write(record: dict[str, str]) -> None:
    found = {tuple(line[key] for key in KEY): line for line in [*read(), record]}
    RECORDS.write_text("".join(json.dumps(found[key]) + "\n" for key in sorted(found)))
    PAGE.write_text(filled(PAGE.read_text(), {"launches": table()}))


def read() -> list[dict[str, str]]:
    return [json.loads(line) for line in RECORDS.read_text().splitlines()]


def table() -> str:
    """A column for each branch that has records."""
    cells: dict[tuple[str, ...], dict[str, str]] = {}
    for line in read():
        cells.setdefault(tuple(line[key] for key in KEY[:-1]), {})[line["branch"]] = (
            line["result"]
        )
    recorded_on = {line["branch"] for line in read()}
    branches = [name for name in BRANCHES if name in recorded_on]
    rows = [["script", "processes", "launch", "held to", *branches]]
    for (script, processes, launch, held_to), results in cells.items():
        flags = f"`{launch}`".replace("|", r"\|")
        of_branches = (results.get(name, "") for name in branches)
        rows.append([f"`{script}`", processes, flags, held_to, *of_branches])
    ran = {
        f"{line['branch']} at {line['commit']}, torch {line['torch']}, {line['date']}"
        for line in read()
    }
    return f"{markdown(rows)}\n\nRun: {'; '.join(sorted(ran))}."

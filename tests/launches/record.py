"""The latest launch of each branch: docs/launches.jsonl, and the table of
docs/support.md."""

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from benchmarks.lib.pages import filled, markdown
from tests.examples.launching import ROOT
from tests.launches.launching import CLONE

RECORDS = ROOT / "docs" / "launches.jsonl"
PAGE = ROOT / "docs" / "support.md"
KEY = ("script", "processes", "launch", "held to", "branch")
ON_GPUS = " on H200"  # the end of such a branch (divided_launches.py)
USUAL_SCRIPT = "pretrain_hybrid.py"  # the tables name any other
# Columns of the tables.
# "kda" is the branch of pull request 6556.
BRANCHES = (
    "core_r0.19.0",
    "main",
    "dev",
    "kda",
    "core_r0.19.0 on H200",
    "main on H200",
)


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


# How a launch divides a model over processes, as the table shortens it.
DIVISIONS = {
    "--tensor-model-parallel-size": "tp",
    "--context-parallel-size": "cp",
    "--pipeline-model-parallel-size": "pp",
    "--expert-model-parallel-size": "ep",
}
# Sizes, and what other flags ask for; the table leaves them out, the record has them.
LEFT_OUT = {
    "--ckpt-format",
    "--calculate-per-token-loss",
    "--linear-attention-freq",
    "--mamba-head-dim",
    "--mamba-num-groups",
    "--mamba-num-heads",
    "--mamba-state-dim",
    "--moe-router-topk",
    "--moe-token-dispatcher-type",
    "--no-load-rng",
    "--num-experts",
    "--num-layers",
    "--sequence-parallel",
    "--use-distributed-optimizer",
}


class Shortened(NamedTuple):
    """A launch in the words of the table."""

    model: str  # its pattern and the flags that say what is trained
    division: str  # "1", "dp 2", "tp 2", ...

    @classmethod
    def of(cls, launch: str, processes: str) -> "Shortened":
        launch, comma, note = launch.partition(" , ")
        pattern, kept, divided = "", [], []
        for flag, value in re.findall(r"(--\S+|as printed)(?: (?!-)(\S+))?", launch):
            if flag == "--hybrid-layer-pattern":
                pattern = value.replace("|", "")
            elif flag in DIVISIONS:
                divided.append(f"{DIVISIONS[flag]} {value}")
            elif flag not in LEFT_OUT:
                kept.append(f"{flag} {value}".strip())
        if kept == ["as printed"]:
            alone = "as printed"
        elif processes == "1":
            alone = "1"
        else:
            alone = f"dp {processes}"
        model = " ".join(filter(None, [pattern, *kept])) + comma + note
        return cls(model, " ".join(divided) or alone)


def table() -> str:
    """A table of the launches on a CPU and one of those on GPUs: a row for each model,
    a column for each branch that has records."""
    lines = read()
    on_gpus = [line for line in lines if line["branch"].endswith(ON_GPUS)]
    on_cpu = [line for line in lines if line not in on_gpus]
    tables = [_table_of(some) for some in (on_cpu, on_gpus) if some]
    ran = {commit for line in lines for commit in _commits(line)}
    return "\n\n".join([*tables, f"Run: {'; '.join(sorted(ran))}."])


def _table_of(records: list[dict[str, str]]) -> str:
    rows: dict[str, dict[str, dict[str, list[str]]]] = {}
    for line in records:
        short = Shortened.of(line["launch"], line["processes"])
        named = short.model and line["script"] == USUAL_SCRIPT
        launch = short.model if named else f"{line['script']} {short.model}".strip()
        cell = rows.setdefault(launch, {}).setdefault(line["branch"], {})
        cell.setdefault(line["result"], []).append(short.division)
    recorded_on = {line["branch"] for line in records}
    branches = [name for name in BRANCHES if name in recorded_on]
    lines = [["launch", "divided", *branches]]
    for launch, cells in rows.items():
        divisions = [d for cell in cells.values() for ds in cell.values() for d in ds]
        divided = ", ".join(dict.fromkeys(divisions))
        results = [_result(cells.get(name, {})) for name in branches]
        lines.append([f"`{launch}`", divided, *results])
    return markdown(lines)


def _commits(line: dict[str, str]) -> list[str]:
    """The commits that a launch ran, as "main at d98e8a64dd"; a launch on GPUs names
    several as "main@d98e8a64dd"."""
    branch_of = line["branch"].removesuffix(ON_GPUS)
    commits = line["commit"].split(",")
    named = [c if "@" in c else f"{branch_of}@{c}" for c in commits]
    return [commit.replace("@", " at ") for commit in named]


def _result(cell: dict[str, list[str]]) -> str:
    """The largest difference among the divisions of a launch; words as they are, with
    the divisions that they are of if others have other results."""
    differences = [text for text in cell if re.match(r"\d", text)]
    words = [text for text in cell if text not in differences]
    found = [max(differences, key=float)] if differences else []
    for text in words:
        among = len(cell) > 1
        found.append(f"{text} ({', '.join(cell[text])})" if among else text)
    return "; ".join(found)

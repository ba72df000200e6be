"""NVIDIA's compute-sanitizer over every Triton kernel of the package and FlashQLA's.

    python3 benchmarks/sanitize.py --out runs/sanitize
    python3 benchmarks/sanitize.py --out runs/dry --dry-run

A case is a choice of the kernels' tests, whose sizes divide nothing. It runs once
alone, so that its kernels are compiled, and then under each of the sanitizer's tools,
each time in a process of its own. Processes run side by side, on all visible GPUs in
turn. A dry run has no sanitizer; without a GPU it runs in Triton's interpreter.

The folder gets ``sanitize.jsonl``, ``sanitize.md`` and a log of each process. The exit
status is 1 unless every case ran under every tool, all kernels were launched and no
tool found an error.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
ALONE = "alone"  # the run that compiles
# Where CUDA's packages put it, if it is not on the PATH.
PLACES = (
    "/usr/local/cuda/bin/compute-sanitizer",
    "/usr/local/cuda/compute-sanitizer/compute-sanitizer",
)
_FOUND_ERRORS = 97
_OPTIONS = {
    # A probe of torch that fails is no error. Memory behind each tensor is no tensor's.
    "memcheck": ("--report-api-errors", "no", "--padding", "512"),
    "racecheck": ("--racecheck-report", "all"),
    "initcheck": (),
    "synccheck": (),
}


class Case(NamedTuple):
    """Tests of one file, chosen by pytest's ``-k``."""

    file: str
    chosen: str = ""


# The longest first.
CASES = {
    name: Case(**row)
    for name, row in tomllib.loads(
        (ROOT / "benchmarks" / "sanitize.toml").read_text()
    ).items()
}


class Settings(NamedTuple):
    """What all processes of a call share."""

    out: Path
    sanitizer: str | None  # None in a dry run
    gpus: tuple[str, ...]  # for CUDA_VISIBLE_DEVICES; () without a GPU
    limit_s: float  # of one process
    end: float  # of the call, by time.monotonic()


def kernels_of_the_package() -> set[str]:
    """The names of all Triton kernels that are launched; helpers have other endings."""
    found: set[str] = set()
    for path in (ROOT / "megatron_gdn").rglob("*.py"):
        found.update(
            re.findall(r"@triton\.jit(?:\(.*\))?\ndef (\w+_kernel)\(", path.read_text())
        )
    return found


def find_sanitizer() -> str:
    for place in (shutil.which("compute-sanitizer"), *PLACES):
        if place is not None and os.access(place, os.X_OK):
            return place
    sys.exit(f"compute-sanitizer is not on the PATH, nor is it one of {PLACES}.")


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this process, by the numbers or names that CUDA takes."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(filter(None, given.split(",")))
    if shutil.which("nvidia-smi") is None:
        return ()
    listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True)
    return tuple(str(n) for n in range(listed.stdout.count(b"\n")))


def command(case: Case, tool: str, settings: Settings) -> list[str]:
    tests = [sys.executable, "-m", "pytest", "-p", "tests.launched_kernels"]
    tests += ["-p", "no:cacheprovider", "-m", "not nightly", case.file]
    if case.chosen:
        tests += ["-k", case.chosen]
    if tool == ALONE or settings.sanitizer is None:
        return tests
    checked = [settings.sanitizer, "--tool", tool, *_OPTIONS[tool]]
    checked += ["--error-exitcode", str(_FOUND_ERRORS), "--print-limit", "100"]
    return [*checked, "--target-processes", "application-only", *tests]


def environment(settings: Settings, place: int, found: Path) -> dict[str, str]:
    """``place``: the number of this process, by which GPUs take turns."""
    added = {
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))
        ),
        "OMP_NUM_THREADS": "1",
        # Every tensor is an allocation of its own, so its bounds are known.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "SANITIZE_FOUND": str(found),
    }
    if settings.gpus:
        added["CUDA_VISIBLE_DEVICES"] = settings.gpus[place % len(settings.gpus)]
    else:
        added["TRITON_INTERPRET"] = "1"
    return os.environ | added


def run(name: str, tool: str, settings: Settings, place: int) -> dict[str, Any]:
    """Run a case in a process of its own; returns its row of the table."""
    row: dict[str, Any] = {"case": name, "tool": tool, "state": "not run"}
    began = time.monotonic()
    limit = min(settings.limit_s, settings.end - began)
    if limit < 5:
        return row
    stem = f"{name}-{tool}".replace(", ", "-").replace(" ", "_")
    found = settings.out / f"{stem}.json"
    found.unlink(missing_ok=True)
    log = settings.out / f"{stem}.log"
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command(CASES[name], tool, settings),
            cwd=ROOT,
            env=environment(settings, place, found),
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
    row["seconds"] = round(time.monotonic() - began, 1)
    if found.exists():
        row |= json.loads(found.read_text())
    row |= read_log(log.read_text(errors="replace"))
    row["state"] = state_of(row, status, tool)
    print(f"{row['seconds']:6} s  {name}, {tool}: {cell(row)}", flush=True)
    return row


def read_log(text: str) -> dict[str, Any]:
    """The numbers of a sanitizer's last line, and the kernels that its errors name."""
    found: dict[str, Any] = {}
    errors = re.search(r"ERROR SUMMARY: (\d+) error", text)
    if errors:
        found["errors"] = int(errors[1])
    hazards = re.search(
        r"RACECHECK SUMMARY: (\d+) hazards? displayed "
        r"\((\d+) errors?, (\d+) warnings?\)",
        text,
    )
    if hazards:
        found["errors"] = int(hazards[2])
        found["warnings"] = int(hazards[3])
    named = re.findall(
        r"^=+ .*?\bat (?:0x[0-9a-f]+ in )?(?:void )?([\w:]+)", text, flags=re.M
    )
    if named:
        found["named"] = sorted(set(named))
    return found


def state_of(row: dict[str, Any], status: int | None, tool: str) -> str:
    """ok, errors, failed, timed out, or why nothing was checked."""
    if status is None:
        return "timed out"
    if row.get("errors"):
        return "errors"
    if row.get("failed") or status not in (0, 5):
        return "failed"
    if row.get("skipped") and not row.get("passed"):
        return "skipped"
    if not row.get("passed"):
        return "no test"
    if tool != ALONE and "errors" not in row:
        return "no summary"
    return "ok"


def run_all(names: Sequence[str], settings: Settings, jobs: int) -> list[dict]:
    """The rows of all cases and tools; a case's tools follow the run that compiles."""
    places = count()
    rows: list[dict[str, Any]] = []
    tools = TOOLS if settings.sanitizer is not None else ()

    with ThreadPoolExecutor(jobs) as pool:

        def begin(name: str, tool: str) -> Future:
            return pool.submit(run, name, tool, settings, next(places))

        waiting = {begin(name, ALONE) for name in names}
        while waiting:
            ended, waiting = wait(waiting, return_when="FIRST_COMPLETED")
            for future in ended:
                row = future.result()
                rows.append(row)
                if row["tool"] == ALONE and row["state"] in ("ok", "failed"):
                    waiting |= {begin(row["case"], tool) for tool in tools}
    return rows


def cell(row: dict[str, Any]) -> str:
    """One row in the table's words."""
    if row["state"] == "ok":
        text = str(row.get("errors", "ok"))
    elif row["state"] == "errors":
        text = f"{row['errors']} in {', '.join(row.get('named', ['?']))}"
    else:
        text = row["state"]
    if row.get("warnings"):
        text += f", {row['warnings']} warnings in {', '.join(row['named'])}"
    return text


def table(rows: list[dict[str, Any]], tools: Sequence[str]) -> str:
    """Markdown: a line per case, with the number of tests and each tool's errors."""
    lines = [
        f"| case | tests | {' | '.join(tools)} |",
        f"| --- | --- |{' --- |' * len(tools)}",
    ]
    for name in CASES:
        of_case = {row["tool"]: row for row in rows if row["case"] == name}
        if not of_case:
            continue
        cells = [
            cell(of_case[tool]) if tool in of_case else "not run" for tool in tools
        ]
        tests = of_case[ALONE].get("passed", 0)
        lines.append(f"| {name} | {tests} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--dry-run", action="store_true", help="without a sanitizer")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument(
        "--seconds", type=float, default=570, help="for all cases together"
    )
    parser.add_argument("--limit", type=float, default=240, help="for one process")
    parser.add_argument(
        "--jobs", type=int, default=max(1, cores - 1), help="processes at a time"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = Settings(
        out=args.out.resolve(),
        sanitizer=None if args.dry_run else find_sanitizer(),
        gpus=visible_gpus(),
        limit_s=args.limit,
        end=time.monotonic() + args.seconds,
    )
    if settings.sanitizer is not None and not settings.gpus:
        sys.exit("compute-sanitizer needs a GPU; --dry-run needs none.")
    rows = run_all(args.cases, settings, args.jobs)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (args.out / "sanitize.jsonl").write_text(lines)
    tools = (ALONE,) if settings.sanitizer is None else (ALONE, *TOOLS)
    text = table(rows, tools)
    launched = {name for row in rows for name in row.get("launched", ())}
    missing = kernels_of_the_package() - launched
    if missing:
        text += f"\nNot launched: {', '.join(sorted(missing))}.\n"
    (args.out / "sanitize.md").write_text(text)
    print(text)
    complete = len(rows) == len(args.cases) * len(tools)
    good = complete and all(row["state"] == "ok" for row in rows)
    return 0 if good and not missing else 1


if __name__ == "__main__":
    sys.exit(main())

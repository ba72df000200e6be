"""NVIDIA's compute-sanitizer over every Triton kernel of the package and FlashQLA's.

    python3 benchmarks/run.py sanitize --out runs/sanitize/records.jsonl --seconds 550

A case is a choice of the kernels' tests, whose sizes divide nothing (sanitize.toml). It
runs once alone, so that its kernels are compiled, and then under each of the
sanitizer's tools, each time in a process of its own. Processes run side by side, on all
visible GPUs in turn; their logs stand beside ``--out``. ``--tiny`` has no sanitizer;
without a GPU it runs in Triton's interpreter.

The status is 1 unless every case ran under every tool, all kernels were launched and no
tool found an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import threading
import time
import tomllib
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lib.commands import ROOT, TIMED_OUT, run_logged

if TYPE_CHECKING:
    from lib.session import Session

ALONE = "alone"  # the run that compiles
TOOLS = {
    # A probe of torch that fails is no error. Memory behind each tensor is no tensor's.
    "memcheck": ["--report-api-errors", "no", "--padding", "512"],
    "racecheck": ["--racecheck-report", "all"],
    "initcheck": [],
    "synccheck": [],
}
# Where CUDA's packages put it, if it is not on the PATH.
PLACES = "/usr/local/cuda/bin:/usr/local/cuda/compute-sanitizer"
FOUND_ERRORS = 97
CASES: dict[str, list[str]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)


def kernels_of_the_package() -> set[str]:
    """The names of all Triton kernels that are launched; helpers have other endings."""
    kernel = r"@triton\.jit(?:\(.*\))?\ndef (\w+_kernel)\("
    found: set[str] = set()
    for path in (ROOT / "megatron_gdn").rglob("*.py"):
        found.update(re.findall(kernel, path.read_text()))
    return found


def find_sanitizer() -> str:
    places = f"{os.environ.get('PATH', '')}:{PLACES}"
    found = shutil.which("compute-sanitizer", path=places)
    return found or sys.exit(f"compute-sanitizer is in none of {places}.")


def visible_gpus() -> list[str]:
    """The GPUs of this process, by the numbers or names that CUDA takes."""
    import torch

    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given:
        return given.split(",")
    return [str(i) for i in range(torch.cuda.device_count())]


def command(name: str, tool: str, sanitizer: str) -> list[str]:
    file, chosen = CASES[name]
    tests = [sys.executable, "-m", "pytest", "-p", "tests.launched_kernels"]
    tests += ["-p", "no:cacheprovider", "-m", "not nightly", file]
    if chosen:
        tests += ["-k", chosen]
    if tool == ALONE:
        return tests
    checked = [sanitizer, "--tool", tool, *TOOLS[tool], "--print-limit", "100"]
    checked += ["--error-exitcode", str(FOUND_ERRORS)]
    return [*checked, "--target-processes", "application-only", *tests]


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


def state_of(row: dict[str, Any], status: int, tool: str) -> str:
    """ok, errors, failed, timed out, or why nothing was checked."""
    if status in TIMED_OUT:
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


def run(session: Session, name: str, tool: str, sanitizer: str, gpu: str) -> dict:
    """Run a case in a process of its own; the record."""
    row: dict[str, Any] = {"case": name, "layer": tool, "state": "not run"}
    limit = min(session.row["limit"], session.left())
    if limit < 5:
        return row
    began = time.monotonic()
    folder = Path(session.args.out or ROOT / "runs/sanitize/records.jsonl").parent
    folder.mkdir(parents=True, exist_ok=True)
    log = folder.resolve() / f"{name}-{tool}.log".replace(", ", "-").replace(" ", "_")
    found = log.with_suffix(".json")
    found.unlink(missing_ok=True)
    given = {
        "SANITIZE_FOUND": str(found),
        # Every tensor is an allocation of its own, so its bounds are known.
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
    }
    given |= {"CUDA_VISIBLE_DEVICES": gpu} if gpu else {"TRITON_INTERPRET": "1"}
    status = run_logged(command(name, tool, sanitizer), log, limit, environment=given)
    row["seconds"] = round(time.monotonic() - began, 1)
    if found.exists():
        row |= json.loads(found.read_text())
    row |= read_log(log.read_text(errors="replace"))
    row["state"] = state_of(row, status, tool)
    return row


def sanitize(session: Session) -> None:
    sanitizer = "" if session.args.tiny else find_sanitizer()
    gpus = visible_gpus()
    if sanitizer and not gpus:
        sys.exit("compute-sanitizer needs a GPU; --tiny needs none.")
    turns = cycle(gpus or [""])
    tools = TOOLS if sanitizer else ()
    names = session.args.cases or list(CASES)
    writing = threading.Lock()

    def recorded(name: str, tool: str) -> str:
        row = run(session, name, tool, sanitizer, next(turns))
        with writing:
            session.emit(row)
        return row["state"]

    def begun(name: str) -> list[Future]:
        """The run that compiles; the tools follow it."""
        if recorded(name, ALONE) in ("ok", "failed"):
            return [pool.submit(recorded, name, tool) for tool in tools]
        return []

    jobs = max(1, len(os.sched_getaffinity(0)) - 1)
    with ThreadPoolExecutor(jobs) as pool:
        for future in [pool.submit(begun, name) for name in names]:
            for following in future.result():
                following.result()
    rows = session.records
    launched = {name for row in rows for name in row.get("launched", ())}
    missing = sorted(kernels_of_the_package() - launched)
    complete = len(rows) == len(names) * (len(tools) + 1)
    if missing or not complete or any(row["state"] != "ok" for row in rows):
        session.say(session.summary())
        sys.exit(f"not everything is ok; not launched: {', '.join(missing)}")

"""Rows of the registry on a machine with GPUs, in a call of less than ten minutes.

    python3 benchmarks/on_gpus.py fp8
    python3 benchmarks/on_gpus.py parallel    # four GPUs

First the kernels of all these rows are compiled side by side (on_gpus.toml says which),
then their tests run side by side, then each row measures alone. Records and a log of
each step go to runs/on_gpus. A step that fails or outlasts its time (its log says where
it was) does not keep the next from running; the status is 1 if one did.
"""

from __future__ import annotations

import argparse
import sys
import time
import tomllib
from concurrent.futures import ThreadPoolExecutor
from itertools import product, repeat
from pathlib import Path
from typing import Any

from lib.commands import ROOT, run_logged

ROWS: dict[str, dict[str, Any]] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text()
)
USES = ["cut", "rows", "uncut", "states"]
# Seconds that compiling, tests and the measurements of one row may take.
COMPILING = 240
TESTING = 300
MEASURING = 350


def compiling(names: list[str]) -> dict[str, list[str]]:
    """The commands by the names of their logs."""
    steps = {}
    warm_up = [sys.executable, "-m", "megatron_gdn.warm_up", "--kernels", "flash_qla"]
    for name in names:
        row = ROWS[name]
        uses = row.get("uses", USES)
        for heads, operands in product(row.get("heads", []), ("fp16", "bf16")):
            asked = ["--heads", heads, "--operands", operands, "--uses", *uses]
            steps["-".join([heads, operands, *uses])] = [*warm_up, *asked]
        upstream = [str(heads) for heads in row.get("upstream", [])]
        if upstream:
            command = [sys.executable, "benchmarks/compile_upstream.py", *upstream]
            steps["-".join(["upstream", *upstream])] = command
    return steps


def testing(names: list[str]) -> dict[str, list[str]]:
    pytest = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider"]
    return {
        f"tests-{name}": [*pytest, "--maxfail=5", *ROWS[name]["tests"].split()]
        for name in names
        if "tests" in ROWS[name]
    }


def measuring(name: str, out: Path) -> list[str]:
    row = ROWS[name]
    start = [sys.executable]
    if "ranks" in row:
        ranks = f"--nproc-per-node={row['ranks']}"
        start += ["-m", "torch.distributed.run", "--standalone", ranks]
    asked = [name, "--out", str(out / f"{name}.jsonl")]
    asked += ["--seconds", str(MEASURING - 30), *row.get("arguments", "").split()]
    return [*start, "benchmarks/run.py", *asked]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="+", choices=ROWS, metavar="ROW")
    parser.add_argument("--seconds", type=float, default=570, help="of all together")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "on_gpus")
    args = parser.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    failed = []

    def run(
        name: str, command: list[str], seconds: float, end_by: str = "ABRT"
    ) -> None:
        left = began + args.seconds - time.monotonic()
        if left < 10:
            failed.append(name)
            print(f"\n== {name}: not begun, out of time", flush=True)
            return
        log = out / f"{name.replace(':', '-')}.log"
        status = run_logged(command, log, min(seconds, left), end_by=end_by)
        if status:
            failed.append(name)
        last = "\n".join(log.read_text(errors="replace").splitlines()[-12:])
        spent = time.monotonic() - began
        print(f"\n== {name}: status {status}, at {spent:.0f} s\n{last}", flush=True)

    steps = {COMPILING: compiling(args.rows), TESTING: testing(args.rows)}
    for seconds, commands in steps.items():
        with ThreadPoolExecutor(max(1, len(commands))) as pool:
            list(pool.map(run, commands, commands.values(), repeat(seconds)))
    for name in args.rows:
        # torchrun gives its ranks a session of their own, and ends them at SIGTERM
        # alone.
        end_by = "TERM" if "ranks" in ROWS[name] else "ABRT"
        run(name, measuring(name, out), MEASURING, end_by)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())

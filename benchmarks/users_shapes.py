"""Users' shapes in one call of at most ten minutes on one GPU: time, memory, bits, the
floor.

    python3 benchmarks/users_shapes.py --out results.jsonl
    python3 benchmarks/users_shapes.py --toy --cells 1 2    # a CPU: small sizes, local
                                                            # linears

Of every cell (:mod:`lib.shapes`) megatron-core's layer and ours, with each setting of
``recompute`` and, of a batch of rows, with the rows uncut as before: forward and
backward eager and as a CUDA graph, what is saved, and how far output and gradients lie
from megatron-core's. First, kernels are compiled, at most for ``--compile-seconds``;
cells whose kernels are still missing are left out. A cell begins only if it can end
within ``--seconds``. Each measurement is one JSON line as soon as it is made. A layer
that fails is a line too, and the next one is measured.

What it takes longest for is to compile. Where TILELANG_CACHE_DIR has the kernels of an
earlier run, all the time is left for measuring.
"""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lib.compile_ahead import Clock, compile_all
from lib.floor import floor_ms
from lib.layers import DEVICE, start_megatron, thd
from lib.measure import copy_bandwidth, environment, table, write_lines
from lib.measured import (
    FURTHEST,
    LEVELS,
    Measured,
    errors,
    milliseconds,
    rows_side_by_side,
)
from lib.shapes import CELLS, GOALS, Cell

from megatron_gdn.ops.documents import Documents


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=560, help="of the whole call")
    parser.add_argument("--compile-seconds", type=float, default=240)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument(
        "--cells",
        type=int,
        nargs="+",
        metavar="N",
        choices=range(1, len(CELLS) + 1),
        default=list(range(1, len(CELLS) + 1)),
        help="of lib/shapes.py, from 1 (all)",
    )
    parser.add_argument("--toy", action="store_true", help="small sizes, on a CPU")
    parser.add_argument("--out", help="append JSON lines to this file")
    return parser.parse_args()


def measure(cell: Cell, clock: Clock, bandwidth: float, args, write: Callable) -> None:
    case = cell.case
    torch.manual_seed(2)
    x = torch.randn(case.tokens, case.batch, cell.hidden, device=DEVICE).bfloat16()
    x.requires_grad_()
    offsets = case.offsets()
    packed = thd(offsets)
    names = ["upstream", *LEVELS]
    if case.batch == 1:
        names.remove("ours-uncut")
    expected: dict[str, dict] = {}
    weights: dict = {}
    for name in names:
        if clock.left < 5:
            print(f"{cell.name} {name}: not begun, out of time", flush=True)
            return
        measured = None
        try:
            measured = Measured(name, cell, x, packed, weights)
            weights = weights or measured.module.state_dict()
            with rows_side_by_side() if name == "ours-uncut" else nullcontext():
                results = measured.results()
                made = measured.record(args.repeats, graph=offsets is None)
        except Exception as error:
            write(
                {
                    "cell": cell.name,
                    "layer": name,
                    "failed": f"{type(error).__name__}: {error}",
                }
            )
            continue
        for to, exact in expected.items():
            made[f"from {to}"] = far = errors(results, exact)
            made["correct"] = (
                made.get("correct", True) and max(far.values()) <= FURTHEST
            )
        if name in ("upstream", "ours"):
            expected[name] = results
        write({"cell": cell.name, "layer": name, **made})
        if name == "ours" and clock.left > 5:
            write(
                {
                    "cell": cell.name,
                    "layer": "floor",
                    **floor_of(measured, bandwidth, args),
                }
            )
        del measured, results
        release()


def floor_of(measured: Measured, bandwidth: float, args) -> dict[str, Any]:
    cell = measured.cell
    documents = None
    offsets = cell.case.offsets()
    try:
        if offsets is not None:
            documents = Documents.from_cu_seqlens(
                offsets, cell.case.tokens, device=DEVICE
            )
        return floor_ms(
            cell.case,
            measured.module,
            cell.sizes,
            measured.x,
            documents,
            bandwidth,
            lambda run: milliseconds(run, args.repeats)["median"],
            -1 / 4096 if cell.gates == "slow" else None,
        )
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def release() -> None:
    gc.collect()
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def value(record: dict, key: str) -> float:
    found = record.get(key, math.nan)
    return found["median"] if isinstance(found, dict) else found


def summary(records: list[dict]) -> str:
    """Medians and their ratios to megatron-core's, a line for each layer."""
    rows = [
        ["cell", "layer", "eager ms", "", "graph ms", "", "saved MiB", "", "correct"]
    ]
    of = {(r["cell"], r["layer"]): r for r in records if "failed" not in r}
    for (cell, layer), record in of.items():
        base = of.get((cell, "upstream"), {})
        if layer == "floor":
            total = record["total"][1]
            rows.append(
                [cell, layer, f"{total:.3f}", f"{total / value(base, 'eager'):.2f}"]
            )
            rows[-1] += [""] * 5
            continue
        row = [cell, layer]
        for key in ("eager", "graph", "saved"):
            mine = value(record, key)
            row += [f"{mine:.3f}", f"{mine / value(base, key):.2f}"]
        rows.append([*row, str(record.get("correct", ""))])
    return table(rows)


def verdicts(records: list[dict], toy: bool) -> Iterator[str]:
    of = {(r["cell"], r["layer"]): r for r in records}
    for goal in GOALS:
        cell = goal.cell.toy() if toy else goal.cell
        one, other = (of.get((cell.name, layer), {}) for layer in (goal.layer, goal.to))
        ratio = value(one, goal.key) / (value(other, goal.key) or math.nan)
        held = (
            "not measured"
            if ratio != ratio
            else "held"
            if ratio <= goal.most
            else "MISSED"
        )
        yield f"{cell.name}: {goal.what}: {ratio:.3f} (at most {goal.most}) {held}"


def main() -> None:
    args = arguments()
    clock = Clock(args.seconds)
    cells = [CELLS[number - 1] for number in args.cells]
    if args.toy:
        cells, compiled = [cell.toy() for cell in cells], {cell.heads for cell in cells}
    else:
        compiled = compile_all(cells, clock, min(args.compile_seconds, clock.left))
    start_megatron()
    bandwidth = copy_bandwidth() if DEVICE == "cuda" else 1e10
    setting = {"environment": environment(), "copy_TB_s": bandwidth / 1e12}
    records: list[dict] = []

    def write(record: dict) -> None:
        records.append(record)
        write_lines(args.out, [{**record, **setting}])
        times = {
            key: value(record, key)
            for key in ("eager", "graph", "saved")
            if key in record
        }
        said = record.get("failed") or "  ".join(
            f"{k} {v:.3f}" for k, v in times.items()
        )
        print(f"{record['cell']}  {record['layer']}  {said}", flush=True)

    for cell in cells:
        if cell.heads not in compiled:
            print(f"{cell.name}: not begun, its kernels are not compiled", flush=True)
            continue
        if clock.left < cell.seconds:
            print(f"{cell.name}: not begun, {clock.left:.0f} s left", flush=True)
            continue
        measure(cell, clock, bandwidth, args, write)
    print(f"\n{summary(records)}\n")
    for verdict in verdicts(records, args.toy):
        print(verdict)


if __name__ == "__main__":
    main()

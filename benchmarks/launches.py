"""Launches of Megatron's own pretrain_hybrid.py, with our layer and with Megatron's;
launches.toml has their flags.

    benchmarks/launches.sh MEGATRON_LM      times of steps, on one GPU; resumed runs
    benchmarks/launches.sh laws CLONES      losses of a model divided in every way
    benchmarks/launches.sh times CLONES     times of steps, over four GPUs
    benchmarks/launches.sh table RECORDS    the records of laws in docs/support.md

CLONES is a folder with clones of Megatron-LM: mlm-core (branch core_r0.19.0), mlm-main
and mlm-dev. ``--toy``: tiny launches on a CPU.

On one GPU each launch has the GPU for itself; while it trains, the next one only
imports. Before all that, short launches of every row fill the compile caches side by
side. Over four GPUs launches wait, built, before their first step; one after the other
then has the GPUs. Steps are timed by Megatron, which waits for the GPU in each.
launch_laws.py says what is held to what.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import launch_laws
from lib.launching import (
    DATA,
    Launch,
    environment,
    large_model,
    on_cpu,
    times_and_losses,
)
from lib.pages import markdown

ROWS = DATA["rows"]
TIMED = DATA["timed"]
SAVED_AT = 10
KILLED_AFTER = r"iteration +15/"
BOTH = ["ours", "upstream"]


def flags_of(row: dict[str, Any], layer: str, steps: int) -> list[str]:
    batch, length, count = row.get("tokens", (2, 4096, 2))
    tokens = (batch, length, batch * count)
    flags = large_model(row.get("hidden", "2048"), tokens, steps, layer)
    return flags + row.get("flags", "").split()


def begin(args: argparse.Namespace, flags: list[str], name: str, **more: str) -> Launch:
    """A launch on one GPU, held; its log is ``NAME.log``."""
    if args.toy:
        flags = on_cpu(flags)
    script = args.folder.resolve() / "pretrain_hybrid.py"
    return Launch(script, flags, args.out / f"{name}.log", toy=args.toy, **more)


def fill_caches(args: argparse.Namespace) -> None:
    """Two steps with a quarter of the layers, side by side: kernels, not what tuning
    finds."""
    kinds = [
        (name, layer) for name in args.rows for layer in ROWS[name].get("compile", BOTH)
    ]

    def one(kind: tuple[str, str]) -> None:
        name, layer = kind
        row = ROWS[name]
        flags = [*flags_of(row, layer, 2), "--hybrid-layer-pattern", "G-*-"]
        flags += ["--global-batch-size", str(row.get("tokens", [2])[0])]
        began = time.monotonic()
        # fla would keep what it tuned while others used the GPU; inductor starts many
        # processes.
        alone = {"FLA_CACHE_RESULTS": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        launch = begin(args, flags, f"compile-{name}-{layer}", **alone)
        launch.release()
        failed = launch.finish(args.compile_seconds)
        took = time.monotonic() - began
        print(f"compiled {name} {layer}: {took:.0f} s {failed}", flush=True)

    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(one, kinds))


def plan(args: argparse.Namespace, folder: Path) -> list[tuple[str, str, str, list]]:
    """The launches that are measured: row, layer, the log's name, flags."""
    found = []
    for round_ in range(args.rounds):
        for name in args.rows:
            row = ROWS[name]
            for layer in row.get("layers", BOTH):
                steps = row.get("steps", (30, 30))[layer == "upstream"]
                flags = flags_of(row, layer, steps)
                log = f"{name}-{layer}-{round_}"
                if name == "resumed":
                    saved = str(folder / f"{round_}")
                    save = ["--save", saved, "--save-interval", str(SAVED_AT)]
                    found.append(("killed", layer, f"{log}-killed", flags + save))
                    flags += ["--load", saved]
                found.append((name, layer, log, flags))
    return found


def resumed(killed: dict[str, Any], here: dict[str, Any]) -> dict[str, Any]:
    """How far losses after the checkpoint are from those that the killed launch had
    printed."""
    both = sorted(killed["losses"].keys() & here["losses"].keys())
    pairs = [(killed["losses"][step], here["losses"][step]) for step in both]
    return {
        "first_step": min(here["losses"]),
        "steps_in_both": len(both),
        "furthest": max((abs(a - b) / abs(a) for a, b in pairs), default=None),
    }


def measure(
    args: argparse.Namespace, setting: dict[str, Any], folder: Path
) -> list[dict[str, Any]]:
    """A record of each launch, in ``launches.jsonl`` too."""
    todo = plan(args, folder)
    records = []
    ready: list[Launch] = []
    while todo:
        case, layer, log, flags = todo.pop(0)
        if args.left() < 40:
            print(f"{log}: not begun, out of time", flush=True)
            continue
        launch = ready.pop() if ready else begin(args, flags, log)
        began = time.monotonic()
        launch.release()
        if todo and not args.toy:
            ready.append(begin(args, todo[0][3], todo[0][2]))
        limit = min(args.launch_seconds, args.left())
        failed = launch.finish(limit, KILLED_AFTER if case == "killed" else "")
        record = {"case": case, "layer": layer, **times_and_losses(launch), **setting}
        record["seconds"] = round(time.monotonic() - began, 1)
        if failed:
            record["failed"] = failed
        if case == "resumed" and "losses" in record and "losses" in records[-1]:
            record |= resumed(records[-1], record)
        keep(args, "launches.jsonl", log, record, records)
    for launch in ready:
        launch.kill()
    return records


def keep(
    args: argparse.Namespace, file: str, log: str, record: dict, records: list
) -> None:
    records.append(record)
    with (args.out / file).open("a") as stream:
        stream.write(json.dumps(record) + "\n")
    names = ("step_ms", "first_ms", "peak", "furthest", "failed")
    shown = {name: record[name] for name in names if name in record}
    spent = f"{record['seconds']} s, at {args.spent():.0f} s"
    print(f"{log}: {spent}, {shown}", flush=True)


def one_gpu(args: argparse.Namespace) -> int:
    with ThreadPoolExecutor(1) as beside:
        setting = beside.submit(environment, args.folder, args.called)
        if args.compile_seconds and not args.toy:
            fill_caches(args)
    # of a checkpoint of some 9 GB
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        records = measure(args, setting.result(), Path(folder))
    return report(records)


def begin_timed(args: argparse.Namespace, name: str, layer: str, round_: int) -> Launch:
    timed = TIMED[name]
    kind = DATA["layers"][layer]
    flags = large_model("2048", timed["tokens"], args.steps, kind.get("spec", "ours"))
    flags += f"{timed['flags']} {kind.get('flags', '')}".split()
    if args.toy:
        pattern = "G-*-|G-*-" if "|" in timed["flags"] else "G-*-"
        flags = [*on_cpu(flags), "--seq-length", "64"]
        flags += ["--hybrid-layer-pattern", pattern]
    given = {}
    if "options" in kind:
        given["MEGATRON_GDN_OPTIONS"] = kind["options"]
    log = f"{name}-{layer}-{round_}".replace(" ", "").replace(",", "-")
    clone = args.folder / f"mlm-{kind.get('clone', 'core')}"
    return Launch(
        clone / "pretrain_hybrid.py",
        flags,
        args.out / f"{log}.log",
        ranks=4,
        gpus=list(range(4)),
        until="" if args.toy else "train",
        toy=args.toy,
        **given,
    )


def times(args: argparse.Namespace) -> int:
    """Rounds over all layouts; in a round, the layers of a layout one after the
    other."""
    setting = environment(args.folder / "mlm-core", args.called)
    todo = [
        (name, layer, round_)
        for round_ in range(args.rounds)
        for name in args.timed
        for layer in TIMED[name]["layers"]
    ]
    imported = [begin_timed(args, *one) for one in todo]
    records: list[dict[str, Any]] = []

    def built(launch: Launch) -> None:
        if not args.toy:
            launch.wait_for("waits before the first step", min(90, args.left()))

    imported[0].release()
    for i, (name, layer, round_) in enumerate(todo):
        launch = imported[i]
        log = f"{name}, {layer}, round {round_}"
        if args.left() < 25:
            print(f"{log}: not begun, out of time", flush=True)
            break
        began = time.monotonic()
        built(launch)
        if i + 1 < len(todo):
            # The next one is built before this one is timed, not while.
            imported[i + 1].release()
            built(imported[i + 1])
        waited = time.monotonic() - began
        launch.release()
        failed = launch.finish(min(args.launch_seconds, args.left()))
        took = time.monotonic() - began - waited
        record = {"case": name, "layer": layer, "round": round_}
        record |= times_and_losses(launch) | setting
        record["seconds"] = [round(waited, 1), round(took, 1)]
        if failed:
            record["failed"] = failed
        keep(args, "launches_times.jsonl", log, record, records)
    for launch in imported:
        launch.kill()
    return report(records)


def report(records: list[dict[str, Any]]) -> int:
    """Prints the table, and what failed."""
    print(markdown(time_rows(records)))
    for r in records:
        if "failed" in r:
            print(f"{r['case']} {r['layer']}: {r['failed']}")
    return int(any("failed" in r for r in records))


def time_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each case and layer: of all its rounds the one with the least
    median."""
    head = ["launch", "layer", "ms per step", "", "p10 to p90", "least", "peak GiB"]
    rows = [[*head, "first losses, last", "first step s", "medians"]]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in records:
        if "step_ms" in r and r["case"] not in ("killed", "resumed"):
            groups.setdefault((r["case"], r["layer"]), []).append(r)
    best = {
        key: min(group, key=lambda r: r["step_ms"]["median"])
        for key, group in groups.items()
    }
    for (case, layer), r in best.items():
        ms = r["step_ms"]
        losses = list(r["losses"].values())
        ratio = ""
        if (case, "upstream") in best:
            base = best[case, "upstream"]["step_ms"]["median"]
            ratio = f"{ms['median'] / base:.2f}"
        medians = [f"{one['step_ms']['median']:.0f}" for one in groups[case, layer]]
        rows.append(
            [
                ROWS.get(case, {}).get("name", case),
                layer.replace("upstream", "megatron-core"),
                f"{ms['median']:.1f}",
                ratio,
                f"{ms['p10']:.1f} to {ms['p90']:.1f}",
                f"{ms['least']:.1f}",
                f"{r['peak'] / 1024:.1f}",
                f"{losses[0]:.3f}, {losses[-1]:.4f} ({len(losses)})",
                f"{r['first_ms'][0] / 1e3:.1f}",
                " ".join(medians),
            ]
        )
    return rows


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("part", choices=["one", "laws", "times", "table"])
    add("folder", type=Path, help="a clone, the folder of clones, or table: records")
    add("--rows", nargs="+", choices=ROWS, default=list(ROWS), help="of one")
    add("--cases", nargs="+", help="of laws; all of them by default")
    add("--timed", nargs="+", choices=TIMED, default=list(TIMED), help="of times")
    add("--rounds", type=int, help="of one (1) or times (2)")
    add("--steps", type=int, default=16, help="of a launch of times")
    add("--gpus", type=int, default=4, help="of this machine")
    add("--divide", type=int, choices=[2, 4], help="laws: among so many; default all")
    add("--at-once", type=int, help="launches that compile (8); of laws on a GPU (4)")
    add("--compile", action="store_true", help="laws: FlashQLA's kernels, first")
    add("--compile-seconds", type=float, default=120, help="of one; 0: none compile")
    add("--seconds", type=float, default=560, help="of all launches together")
    add("--launch-seconds", type=float, default=150, help="of one launch")
    add("--scratch", type=Path, help="a folder for checkpoints")
    add("--out", type=Path, default=Path("runs/launches"))
    add("--called", default="", help="the clones' branch or tag, for the records")
    add("--toy", action="store_true", help="tiny, on a CPU, without FP8 and graphs")
    args = parser.parse_args()
    args.divide = args.divide or max(args.gpus, 2)
    args.rounds = args.rounds or (2 if args.part == "times" else 1)
    args.at_once = args.at_once or (4 if args.part == "laws" else 8)
    args.folder = args.folder.resolve()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    args.spent = lambda: time.monotonic() - began
    args.left = lambda: args.seconds - args.spent()
    return args


def main() -> int:
    args = arguments()
    parts = {"one": one_gpu, "times": times, "laws": launch_laws.laws}
    if args.part == "table":
        return launch_laws.table(args.folder)
    return parts[args.part](args)


if __name__ == "__main__":
    sys.exit(main())

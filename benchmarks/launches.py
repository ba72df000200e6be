"""Launches of Megatron's own pretrain_hybrid.py, with our layer and with Megatron's.

    benchmarks/launches.sh MEGATRON_LM                  all rows, on one GPU
    benchmarks/launches.sh MEGATRON_LM --toy --rows resumed     tiny, on a CPU

The model is ``G-G-G-*-G-G-G-*-``. Each launch has the GPU for itself; while it trains,
the next one only imports. Before all that, short launches of every row fill the compile
caches side by side. Steps are timed by Megatron, which waits for the GPU in each
(``--log-interval 1``).
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.launching import SPECS, Launch, times_and_losses
from lib.pages import markdown

# A mask of sequence x sequence, made and copied for every sample, is what no layer here
# reads.
FLAGS = """
    --hybrid-layer-pattern G-G-G-*-G-G-G-*- --linear-num-key-heads 16 --linear-key-head-dim 128
    --linear-value-head-dim 128 --linear-conv-kernel-dim 4 --kv-channels 128
    --group-query-attention --num-query-groups 2 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0 --bf16 --use-distributed-optimizer
    --no-gradient-accumulation-fusion --lr 3e-4 --lr-decay-style constant --weight-decay 0.1
    --clip-grad 1 --mock-data --tokenizer-type NullTokenizer --vocab-size 32768
    --no-create-attention-mask-in-dataloader --log-interval 1 --eval-interval 1000 --eval-iters 0
"""
HIDDEN = {
    2048: "--hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 16"
    " --linear-num-value-heads 32",
    4096: "--hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32"
    " --linear-num-value-heads 64",
}
FP8 = "--fp8-format hybrid --fp8-recipe tensorwise"
TOY = """
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16
    --linear-num-key-heads 2 --linear-key-head-dim 16 --linear-num-value-heads 8
    --linear-value-head-dim 16 --seq-length 64 --max-position-embeddings 64 --vocab-size 256
    --hybrid-layer-pattern G-*- --num-workers 0
"""


@dataclass(frozen=True)
class Row:
    """Launches that differ in their GDN layer alone.

    Args:
        tokens: sequences in a micro-batch, tokens in each, micro-batches.
        steps: of a launch with our layer, and with Megatron's.
        compile: the layers with kernels that no row before compiles.
    """

    flags: str = ""
    hidden: int = 2048
    tokens: tuple[int, int, int] = (2, 4096, 2)
    steps: tuple[int, int] = (30, 30)
    layers: tuple[str, ...] = ("ours", "upstream")
    compile: tuple[str, ...] = ("ours", "upstream")

    def of(self, layer: str) -> int:
        return self.steps[layer == "upstream"]

    def all_flags(self, layer: str, steps: int) -> list[str]:
        batch, length, count = self.tokens
        size = f"--micro-batch-size {batch} --global-batch-size {batch * count}"
        size += f" --seq-length {length} --max-position-embeddings {length}"
        run = (
            f"--train-iters {steps} --log-memory-interval {steps} --spec {SPECS[layer]}"
        )
        return f"{FLAGS} {HIDDEN[self.hidden]} {size} {run} {self.flags}".split()


# In the order of what they say.
ROWS = {
    "2x4096": Row(),
    "fp8": Row(FP8, compile=("ours",)),
    "4096": Row(hidden=4096),
    "4096-fp8": Row(FP8, hidden=4096, compile=()),
    "packed": Row("--dataloader-inter-document-masking"),
    # Megatron's layer takes its rule in plain torch, seconds a step.
    "deterministic": Row("--deterministic-mode", steps=(30, 8), compile=("ours",)),
    "graphs": Row("--cuda-graph-impl local", layers=("ours",), compile=()),
    "1x32768": Row(tokens=(1, 32768, 1), compile=()),
    "resumed": Row("--deterministic-mode", steps=(24, 0), layers=("ours",), compile=()),
}
SAVED_AT = 10
KILLED_AFTER = r"iteration +15/"


def begin(args: argparse.Namespace, flags: list[str], name: str, **more: str) -> Launch:
    """A launch on one GPU, held; its log is ``NAME.log``."""
    if args.toy:
        flags = on_cpu(flags)
    script = args.megatron_lm.resolve() / "pretrain_hybrid.py"
    return Launch(script, flags, args.out / f"{name}.log", toy=args.toy, **more)


def on_cpu(flags: list[str]) -> list[str]:
    """The flags of a tiny launch without a GPU."""
    from tests.launches.on_cpu import WITHOUT_GPU

    upstream = "tests.launches.upstream_layers hybrid_stack"
    flags = " ".join(flags).replace(SPECS["upstream"], upstream).split()
    return [*flags, *TOY.split(), *WITHOUT_GPU.split()]


def fill_caches(args: argparse.Namespace) -> None:
    """Two steps with a quarter of the layers, side by side: kernels, not what tuning
    finds."""
    kinds = [(name, layer) for name in args.rows for layer in ROWS[name].compile]

    def one(kind: tuple[str, str]) -> None:
        name, layer = kind
        flags = [*ROWS[name].all_flags(layer, 2), "--hybrid-layer-pattern", "G-*-"]
        flags += ["--global-batch-size", str(ROWS[name].tokens[0])]
        began = time.monotonic()
        # fla would keep what it tuned while others used the GPU; inductor starts many
        # processes.
        alone = {"FLA_CACHE_RESULTS": "0", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        launch = begin(args, flags, f"compile-{name}-{layer}", **alone)
        launch.release()
        failed = launch.finish(args.compile_seconds)
        print(
            f"compiled {name} {layer}: {time.monotonic() - began:.0f} s {failed}",
            flush=True,
        )

    with ThreadPoolExecutor(args.at_once) as pool:
        list(pool.map(one, kinds))


def plan(args: argparse.Namespace) -> list[tuple[str, str, str, list[str]]]:
    """The launches that are measured: row, layer, the log's name, flags."""
    found = []
    for round_ in range(args.rounds):
        for name in args.rows:
            row = ROWS[name]
            for layer in row.layers:
                flags = row.all_flags(layer, row.of(layer))
                log = f"{name}-{layer}-{round_}"
                if name == "resumed":
                    folder = str(Path(args.folder) / f"{round_}")
                    save = ["--save", folder, "--save-interval", str(SAVED_AT)]
                    found.append(("killed", layer, f"{log}-killed", flags + save))
                    flags += ["--load", folder]
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


def measure(args: argparse.Namespace, setting: dict[str, Any]) -> list[dict[str, Any]]:
    """A record of each launch, in ``launches.jsonl`` too."""
    todo = plan(args)
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
        records.append(record)
        with (args.out / "launches.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        shown = {
            k: record.get(k)
            for k in ("step_ms", "first_ms", "peak", "furthest", "failed")
        }
        print(
            f"{log}: {record['seconds']} s, at {args.spent():.0f} s, {shown}",
            flush=True,
        )
    for launch in ready:
        launch.kill()
    return records


NAMES = {
    "2x4096": "2x4096, 2 micro-batches",
    "fp8": f"`{FP8}`",
    "4096": "hidden 4096, 16/64 heads",
    "4096-fp8": f"hidden 4096, `{FP8}`",
    "packed": "`--dataloader-inter-document-masking`",
    "deterministic": "`--deterministic-mode`",
    "graphs": "`--cuda-graph-impl local`",
}


def launch_table(records: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of both layers' launches; of several of one kind the one with the lesser
    median."""
    head = [
        "launch",
        "layer",
        "ms per step",
        "",
        "p10 to p90",
        "least",
        "peak GiB",
        "first losses, last",
        "first step s",
    ]
    rows = [head]
    best = {}
    for r in records:
        if "step_ms" in r and r["case"] not in ("killed", "resumed"):
            here = (r["case"], r["layer"])
            if (
                here not in best
                or r["step_ms"]["median"] < best[here]["step_ms"]["median"]
            ):
                best[here] = r
    for (case, layer), r in best.items():
        ms = r["step_ms"]
        losses = list(r["losses"].values())
        base = best.get((case, "upstream"))
        ratio = f"{ms['median'] / base['step_ms']['median']:.2f}" if base else ""
        rows.append(
            [
                NAMES.get(case, case),
                layer.replace("upstream", "megatron-core"),
                f"{ms['median']:.1f}",
                ratio,
                f"{ms['p10']:.1f} to {ms['p90']:.1f}",
                f"{ms['least']:.1f}",
                f"{r['peak'] / 1024:.1f}",
                f"{losses[0]:.3f}, {losses[-1]:.4f} ({len(losses)})",
                f"{r['first_ms'][0] / 1e3:.1f}",
            ]
        )
    return rows


def environment(args: argparse.Namespace) -> dict[str, Any]:
    """GPU and versions, asked for in a process of its own, which alone opens the
    GPU."""
    asked = (
        "import json; from lib.measure import environment; "
        "print(json.dumps(environment()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=True,
    )
    commit = subprocess.run(
        ["git", "-C", str(args.megatron_lm), "log", "-1", "--format=%h"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    found = json.loads(done.stdout.splitlines()[-1]) | {
        "megatron-lm": args.called or commit
    }
    return {
        "environment": found,
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "megatron_lm", type=Path, help="the folder of a clone of Megatron-LM"
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument(
        "--rounds", type=int, default=1, help="how often to go through the rows"
    )
    parser.add_argument(
        "--seconds", type=float, default=560, help="of all launches together"
    )
    parser.add_argument(
        "--launch-seconds", type=float, default=150, help="of one launch"
    )
    parser.add_argument(
        "--compile-seconds", type=float, default=120, help="0: no such launches"
    )
    parser.add_argument("--at-once", type=int, default=8, help="launches that compile")
    parser.add_argument(
        "--called", default="", help="the clone's branch or tag, for the records"
    )
    parser.add_argument("--out", type=Path, default=Path("runs/launches"))
    parser.add_argument(
        "--toy", action="store_true", help="tiny, on a CPU, without FP8 and graphs"
    )
    args = parser.parse_args()
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    args.spent = lambda: time.monotonic() - began
    args.left = lambda: args.seconds - args.spent()
    return args


def main() -> None:
    args = arguments()
    with ThreadPoolExecutor(1) as beside:
        setting = beside.submit(environment, args)
        if args.compile_seconds and not args.toy:
            fill_caches(args)
    with tempfile.TemporaryDirectory() as args.folder:  # of a checkpoint of some 9 GB
        records = measure(args, setting.result())
    print(markdown(launch_table(records)))
    failed = [
        f"{r['case']} {r['layer']}: {r['failed']}" for r in records if "failed" in r
    ]
    raise SystemExit("\n".join(failed) or None)


if __name__ == "__main__":
    main()

"""Launches of Megatron's own pretrain_hybrid.py over four GPUs.

    benchmarks/launches.sh laws CLONES    losses of a model divided in every way
    benchmarks/launches.sh times CLONES   a step's time, with our layer and with
                                          Megatron's
    benchmarks/launches.sh table RECORDS  the records of laws in the table of
                                          docs/support.md

CLONES is a folder with clones of Megatron-LM: mlm-core (branch core_r0.19.0), mlm-main
and mlm-dev.

laws: one GPU trains each small model and saves it with its optimizer at step 3; every
other launch goes on from that file. How far losses are apart when nothing but the order
of bf16's roundings differs is measured: launches with Megatron's own layer, divided in
several ways, beside one GPU's. The losses of our launches may differ from one GPU's by
twice that, and those of a launch that goes on with the other layer by twice what the
two layers differ by on one GPU.

times: launches wait, built, before their first step; one after the other then has the
GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from launches import FLAGS, FP8, HIDDEN, environment, on_cpu
from lib.launching import ROOT, SPECS, Launch, times_and_losses
from lib.pages import markdown

BRANCHES = {"core": "core_r0.19.0", "main": "main", "dev": "dev"}

# The small model of the laws. Heads as in `HIDDEN`, so that no other kernels are
# compiled.
SMALL = """
    --hidden-size 1024 --ffn-hidden-size 2048 --num-attention-heads 8 --num-query-groups 4
    --linear-num-value-heads 32 --seq-length 2048 --max-position-embeddings 2048
    --micro-batch-size 1 --global-batch-size 4 --vocab-size 8192 --train-iters 9 --save-interval 3
    --dist-ckpt-optim-fully-reshardable --no-load-rng --num-workers 1
"""
# Of two equal flags Megatron takes the last.
TOY_SMALL = "--hybrid-layer-pattern {} --num-query-groups 4 --linear-num-key-heads 8"
TP = "--tensor-model-parallel-size"
SP = "--sequence-parallel"
CP = "--context-parallel-size"
PP = "--pipeline-model-parallel-size"
TEXT = """
    --data-path {data}/text_text_document --data-cache-path {data}/cache --split 100,0,0
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model {data}
"""
CHATS = """
    --sft --data-path {data}/chats.jsonl --split 100,0,0 --tokenizer-type SFTTokenizer
    --tokenizer-model {data} --sft-tokenizer-prompt-format default --calculate-per-token-loss
    --seq-length 128 --max-position-embeddings 128
"""
MOCK = "--mock-data --tokenizer-type NullTokenizer"


@dataclass(frozen=True)
class Model:
    """What a small model is trained from; ``flags`` tell it from the others in the
    table."""

    pattern: str
    flags: str = ""
    data: str = MOCK
    clone: str = "core"
    launcher: bool = False


DENSE = "G-*-G-*-"
MODELS = {
    "dense": Model(DENSE),
    "mamba": Model(
        "M-*-G-*-",
        "--mamba-num-heads 16 --mamba-head-dim 64 --mamba-num-groups 8 "
        "--mamba-state-dim 128",
    ),
    "kda": Model("K-K-K-*-K-K-K-*-", "--kda-lower-bound -5", launcher=True),
    "gdn2": Model(DENSE, "--experimental-attention-variant gdn2", clone="main"),
    "heads": Model(f"{DENSE}/*-"),
    "experts": Model(
        "GE*EGE*E",
        "--num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall",
    ),
    # Transformer Engine's attention cannot read the layout of documents cut with their
    # buffer.
    "documents": Model("G-G-G-G-", "--dataloader-inter-document-masking", data=TEXT),
    "chats": Model(DENSE, data=CHATS),
}


@dataclass(frozen=True)
class Case:
    """One launch of a small model.

    Args:
        start: the case whose checkpoint it loads, and the step, or None for the last
            step that was saved. Without ``start`` the launch begins at step 1.
        held_to: the case whose losses it takes, by default the launch that first
            trained the model; "" for none.
        options: of our layer, as ``MEGATRON_GDN_OPTIONS``.
        killed_at: a pattern of the log at which all processes are killed.
        exact: the losses are equal in every printed digit.
    """

    model: str = "dense"
    gpus: int = 4
    flags: str = ""
    layer: str = "ours"
    start: tuple[str, int | None] | None = None
    held_to: str | None = None
    options: str = ""
    saves: bool = False
    killed_at: str = ""
    exact: bool = False
    environment: dict[str, str | None] = field(default_factory=dict)


PATTERN_OF_STAGES = "--hybrid-layer-pattern G-*-|G-*-"
TP2_CP2 = f"{TP} 2 {CP} 2 {SP}"
PP2_TP2 = f"{PP} 2 {TP} 2 {SP} {PATTERN_OF_STAGES}"
FSDP2 = "--use-torch-fsdp2 --ckpt-format torch_dcp"
MEGATRON_FSDP = (
    "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params"
    " --ckpt-format fsdp_dtensor"
)
MANY = {"CUDA_DEVICE_MAX_CONNECTIONS": None}
FROM = ("dense", 3)
# By number of GPUs, the ways to divide a model.
DIVIDED = {
    2: {
        "tp2": f"{TP} 2 {SP}",
        "cp2-headwise": f"{CP} 2",
        "cp2-chunkwise": f"{CP} 2",
        "pp2": f"{PP} 2 {PATTERN_OF_STAGES}",
        "dp2": "",
    },
    4: {
        "tp2-cp2": TP2_CP2,
        "tp4": f"{TP} 4 {SP}",
        "cp4-headwise": f"{CP} 4",
        "cp4-chunkwise": f"{CP} 4",
        "pp2-tp2": PP2_TP2,
        "pp2-cp2": f"{PP} 2 {CP} 2 {PATTERN_OF_STAGES}",
        "dp4": "",
    },
}
# The first way that DIVIDED names saves checkpoints, from which these ways go on.
RESUMED = {2: ("pp2", "cp2-chunkwise"), 4: ("pp2-tp2", "tp4")}
# Ways to divide the model with Megatron's own layer.
UPSTREAM = {
    2: ("tp2", "cp2-headwise", "pp2", "dp2"),
    4: ("tp2-cp2", "tp4", "pp2-tp2", "dp4"),
}


def waves_of(gpus: int) -> list[dict[str, Case]]:
    """Launches of a wave begin when those of the waves before have ended."""
    ways = DIVIDED[gpus]
    first = next(iter(ways))
    flags = ways[first]

    def divided(name: str) -> Case:
        mode = name.partition("wise")[0].partition("-")[2]
        options = f"linear_cp_mode={mode}wise" if name.endswith("wise") else ""
        return Case(
            flags=ways[name],
            gpus=gpus,
            start=FROM,
            options=options,
            saves=name == first,
        )

    def upstream(name: str) -> Case:
        return Case(
            layer="upstream",
            flags=ways[name],
            gpus=gpus,
            start=FROM,
            held_to="upstream",
        )

    deterministic = f"{flags} --deterministic-mode"
    one_gpu = ("mamba", "kda", "heads", "gdn2", "documents", "chats")
    return [
        {
            "dense": Case(gpus=1, saves=True),
            **{name: Case(name, gpus=1, saves=True) for name in one_gpu},
            "experts": Case(
                "experts",
                gpus=gpus,
                flags=f"--expert-model-parallel-size {gpus}",
                saves=True,
            ),
            # They fill the caches of Megatron's layer; nothing is held to them.
            "upstream, first": Case(layer="upstream", gpus=1),
            "upstream divided, first": Case(layer="upstream", gpus=gpus, flags=flags),
        },
        {
            "upstream": Case(layer="upstream", gpus=1, start=FROM),
            **{f"upstream-{name}": upstream(name) for name in UPSTREAM[gpus]},
            **{name: divided(name) for name in ways},
            "deterministic": Case(gpus=gpus, flags=deterministic, start=FROM),
            "deterministic again": Case(
                gpus=gpus,
                flags=deterministic,
                start=FROM,
                held_to="deterministic",
                exact=True,
            ),
            "graphs": Case(
                gpus=gpus, flags=f"{flags} --cuda-graph-impl local", start=FROM
            ),
            "fp8 on one": Case(gpus=1, flags=FP8, start=FROM, held_to=""),
            "fp8": Case(
                gpus=2, flags=f"{TP} 2 {SP} {FP8}", start=FROM, held_to="fp8 on one"
            ),
            "fsdp2": Case(gpus=gpus, flags=FSDP2, environment=MANY),
            "megatron-fsdp": Case(gpus=gpus, flags=MEGATRON_FSDP, environment=MANY),
            "upstream megatron-fsdp": Case(
                layer="upstream",
                gpus=gpus,
                flags=MEGATRON_FSDP,
                environment=MANY,
                held_to="upstream, first",
            ),
            **{
                f"{name}-divided": Case(name, gpus=gpus, flags=flags, start=(name, 3))
                for name in ("mamba", "kda", "gdn2", "heads")
            },
            "experts-upstream": Case(
                "experts",
                gpus=gpus,
                flags=f"--expert-model-parallel-size {gpus}",
                layer="upstream",
                start=("experts", 3),
                # a token that goes to another expert moves the loss by more
                held_to="",
            ),
            **{
                f"{name}-divided": Case(name, gpus=2, flags=f"{CP} 2", start=(name, 3))
                for name in ("documents", "chats")
            },
            "async": Case(
                gpus=gpus, flags=f"{flags} --async-save", start=FROM, saves=True
            ),
            "killed": Case(
                gpus=gpus,
                flags=f"{flags} --save-interval 1",
                start=FROM,
                saves=True,
                killed_at=r"saving checkpoint at iteration +6",
            ),
        },
        {
            **{
                f"{first} to {name}": Case(
                    gpus=gpus, flags=ways[name], start=(first, 6), held_to=first
                )
                for name in RESUMED[gpus]
            },
            f"{first} to upstream": Case(
                gpus=gpus,
                layer="upstream",
                flags=flags,
                start=(first, 6),
                held_to=first,
            ),
            "async, resumed": Case(gpus=gpus, start=("async", 6), held_to="async"),
            "killed, resumed": Case(
                gpus=gpus, flags=flags, start=("killed", None), held_to=first
            ),
        },
    ]


WAVES = {gpus: waves_of(gpus) for gpus in DIVIDED}
HELD_STEPS = 3


class Launches:
    """Starts launches, and keeps which folders they saved to and what they printed."""

    def __init__(
        self, args: argparse.Namespace, cases: dict[str, Case], folder: Path
    ) -> None:
        self.args = args
        self.cases = cases
        self.folder = folder
        self.records: dict[str, dict[str, Any]] = {}
        self.next_gpu = 0
        self.lock = threading.Lock()

    def gpus(self, count: int) -> list[int]:
        """The next ``count`` GPUs in turn."""
        found = [(self.next_gpu + i) % self.args.gpus for i in range(count)]
        self.next_gpu += count
        return found

    def flags(self, name: str, case: Case) -> list[str]:
        model = MODELS[case.model]
        words = f"{FLAGS} {SMALL} --hybrid-layer-pattern {model.pattern}"
        flags = words.replace("--mock-data --tokenizer-type NullTokenizer", "").split()
        flags += model.data.format(data=self.folder / "data").split()
        flags += f"{model.flags} {case.flags} --spec {SPECS[case.layer]}".split()
        if "--use-torch-fsdp2" in flags:
            flags.remove("--use-distributed-optimizer")
        if "fsdp" in case.flags:
            flags.remove("--dist-ckpt-optim-fully-reshardable")
        if case.start:
            saved, step = case.start
            flags += ["--load", str(self.place(saved))]
            if step is not None:
                flags += ["--ckpt-step", str(step)]
        if case.saves:
            flags += f"--save {self.place(name)}".split()
        return flags

    def place(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-")

    def begin(self, name: str) -> Launch:
        case = self.cases[name]
        model = MODELS[case.model]
        flags = self.flags(name, case)
        if self.args.toy:
            pattern = last_value(flags, "--hybrid-layer-pattern")
            flags = [*on_cpu(flags), *TOY_SMALL.format(pattern).split()]
        # Many launches at once would each start some thirty compilers.
        given = {"TORCHINDUCTOR_COMPILE_THREADS": "1", **case.environment}
        if case.options:
            given["MEGATRON_GDN_OPTIONS"] = case.options
        return Launch(
            self.args.clones / f"mlm-{model.clone}" / "pretrain_hybrid.py",
            flags,
            self.args.out / f"{name.replace(' ', '-')}.log",
            ranks=case.gpus,
            gpus=self.gpus(case.gpus),
            launcher=model.launcher,
            toy=self.args.toy,
            **given,
        )

    def run(self, name: str, launch: Launch) -> None:
        case = self.cases[name]
        began = time.monotonic()
        if self.args.left() < 20:
            launch.kill()
            print(f"{name}: not begun, out of time", flush=True)
            return
        launch.release()
        limit = min(self.args.launch_seconds, self.args.left())
        failed = launch.finish(limit, case.killed_at)
        record = {
            "case": name,
            "layer": case.layer,
            "gpus": case.gpus,
            **times_and_losses(launch),
        }
        record["flags"] = " ".join(
            f"--hybrid-layer-pattern {MODELS[case.model].pattern} "
            f"{MODELS[case.model].flags}"
            f" {case.flags}".split()
        )
        record["seconds"] = round(time.monotonic() - began, 1)
        if failed:
            record["failed"] = failed
        with self.lock:
            self.records[name] = record
        spent = f"{record['seconds']} s, at {self.args.spent():.0f} s"
        losses = list(record.get("losses", {}).items())[:4]
        print(f"{name}: {spent} {failed or losses}", flush=True)

    def run_wave(self, names: Iterable[str], held: dict[str, Launch]) -> None:
        """All launches of a wave, at most ``at_once`` on each GPU."""
        places = threading.Condition()
        free = self.args.at_once * self.args.gpus

        def run(name: str) -> None:
            nonlocal free
            gpus = self.cases[name].gpus
            with places:
                places.wait_for(lambda: free >= gpus)
                free -= gpus
            self.run(name, held.pop(name, None) or self.begin(name))
            with places:
                free += gpus
                places.notify_all()

        names = list(names)
        with ThreadPoolExecutor(max(1, len(names))) as pool:
            for future in [pool.submit(run, name) for name in names]:
                future.result()


def last_value(flags: list[str], flag: str) -> str:
    """Of two equal flags Megatron takes the last."""
    values = [value for name, value in pairwise(flags) if name == flag]
    return values[-1]


def distance(record: dict[str, Any], other: dict[str, Any]) -> float | None:
    """The largest relative difference of the first three losses that both launches
    printed."""
    here = record.get("losses", {})
    there = other.get("losses", {})
    steps = sorted(here.keys() & there.keys())[:HELD_STEPS]
    if len(steps) < HELD_STEPS:
        return None
    return max(abs(here[step] - there[step]) / abs(there[step]) for step in steps)


def hold(records: dict[str, dict[str, Any]], cases: dict[str, Case]) -> list[str]:
    """Adds to each record how far it is from what it is held to; returns what is too
    far."""
    far = []
    for name, record in records.items():
        held_to = held_to_of(name, cases[name])
        if held_to in records:
            record["held_to"] = held_to
            record["distance"] = distance(record, records[held_to])
    # Megatron's own layer, divided, beside its launch on one GPU.
    spreads = [
        r.get("distance") for r in records.values() if r.get("held_to") == "upstream"
    ]
    measured = [one for one in spreads if one is not None]
    if not measured:
        return ["no launch with Megatron's own layer to measure bf16's spread by"]
    spread = max(measured)
    # How far the two layers are apart on one GPU.
    between = records.get("upstream", {}).get("distance") or spread
    for name, record in records.items():
        record["spread"] = spread
        if "failed" in record:
            far.append(f"{name}: {record['failed']}")
        elif "held_to" in record:
            off = record["distance"]
            changes_layers = cases[name].layer != cases[record["held_to"]].layer
            bound = 2 * max(spread, between) if changes_layers else 2 * spread
            if cases[name].exact:
                bound = 0.0
            if off is None or off > bound:
                far.append(
                    f"{name}: {off} from {record['held_to']}, {bound:.1e} allowed"
                )
    return far


def held_to_of(name: str, case: Case) -> str:
    """The case whose losses a launch is held to; "" if none."""
    if name == case.model or name.endswith(", first"):
        return ""
    return case.model if case.held_to is None else case.held_to


def prepare_data(args: argparse.Namespace, folder: Path) -> None:
    """Text and chats of the tests' launches, made by the clone's own tool."""
    (folder / "data").mkdir()
    code = (
        "import sys; from pathlib import Path; from tests.launches import real_data "
        "as made\n"
        "for save in (made.save_tokenizer, made.save_text, made.save_chats):\n"
        "    save(Path(sys.argv[1]))"
    )
    clone = str((args.clones / "mlm-core").resolve())
    given = os.environ | {"MEGATRON_LM": clone, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(
        [sys.executable, "-c", code, str(folder / "data")],
        cwd=ROOT,
        env=given,
        check=True,
    )


def compile_kernels(gpus: int) -> None:
    """FlashQLA's kernels for the heads of every rank, ours and Megatron's, all side by
    side."""
    here = Path(__file__).parent
    shares = [1 << power for power in range(gpus.bit_length())]
    ours = [sys.executable, "-m", "megatron_gdn.warm_up", "--kernels", "flash_qla"]
    uses = ["--uses", "cut", "uncut", "rows", "states"]
    commands = [
        [*ours, "--heads", f"{16 // n}:{32 // n}", "--operands", operands, *uses]
        for n in shares
        for operands in ("fp16", "bf16")
    ]
    theirs = [str(32 // n) for n in shares]
    commands.append([sys.executable, str(here / "compile_upstream.py"), *theirs])
    began = time.monotonic()

    def one(command: list[str]) -> str:
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=ROOT, check=False
        )
        last = (done.stdout + done.stderr).strip().splitlines()[-1:]
        return f"{' '.join(command[2:6])}: {done.returncode} {last}"

    with ThreadPoolExecutor(len(commands)) as pool:
        for line in pool.map(one, commands):
            print(f"compiled at {time.monotonic() - began:.0f} s, {line}", flush=True)


def laws(args: argparse.Namespace) -> int:
    setting = environment(args)
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        cases = {
            name: case for wave in WAVES[args.divide] for name, case in wave.items()
        }
        all_launches = Launches(args, cases, Path(folder))
        prepare_data(args, Path(folder))
        waves = [
            [name for name in wave if not args.cases or name in args.cases]
            for wave in WAVES[args.divide]
        ]
        # They import while others compile and train.
        held = (
            {}
            if args.toy
            else {n: all_launches.begin(n) for n in [*waves[0], *waves[1]]}
        )
        if args.compile and not args.toy:
            compile_kernels(args.divide)
        for wave in waves:
            all_launches.run_wave(wave, held)
    records = all_launches.records
    far = hold(records, cases)
    with (args.out / "launches_gpus.jsonl").open("a") as file:
        for name, record in records.items():
            if not name.endswith(", first"):
                words = {"divide": args.divide, "model": cases[name].model}
                file.write(json.dumps(record | words | setting) + "\n")
    print(markdown(law_rows(list(records.values()))))
    print(
        "\n".join(["held", *far])
        if not far
        else "\n".join(["too far or failed:", *far])
    )
    return bool(far)


def law_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    rows = [
        [
            "launch",
            "layer",
            "GPUs",
            "held to",
            "distance",
            "spread",
            "first losses",
            "failed",
        ]
    ]
    for r in records:
        losses = ", ".join(
            f"{step}: {loss:.4f}" for step, loss in r.get("losses", {}).items()
        )
        off = r.get("distance")
        rows.append(
            [
                r["case"],
                r["layer"],
                str(r["gpus"]),
                r.get("held_to", ""),
                "" if off is None else f"{off:.1e}",
                f"{r.get('spread', 0):.1e}",
                losses,
                r.get("failed", "")[:120],
            ]
        )
    return rows


@dataclass(frozen=True)
class Timed:
    """Launches of the large model that differ in their layer alone.

    Args:
        tokens: sequences in a micro-batch, tokens in each, sequences in a step.
    """

    flags: str
    tokens: tuple[int, int, int]
    layers: tuple[str, ...] = ("ours", "upstream")
    gpus: int = 4


LAYERS = {  # name: the clone, the spec, options of our layer, flags
    "ours": ("core", "ours", "", ""),
    "chunkwise": ("core", "ours", "linear_cp_mode=chunkwise", ""),
    "headwise": ("core", "ours", "linear_cp_mode=headwise", ""),
    "upstream": ("core", "upstream", "", ""),
    "dev headwise": ("dev", "upstream", "", "--linear-cp-mode headwise"),
    "dev chunkwise": ("dev", "upstream", "", "--linear-cp-mode chunkwise"),
}
LONG = ("headwise", "upstream", "chunkwise", "dev headwise", "dev chunkwise")
BIG_PP = f"{PP} 2 {TP} 2 {SP} --hybrid-layer-pattern G-G-G-*-|G-G-G-*-"
TIMED = {
    "tp 2, cp 2, sp": Timed(TP2_CP2, (1, 8192, 4), ("ours", "upstream", "headwise")),
    "pp 2, tp 2, sp": Timed(BIG_PP, (1, 8192, 4)),
    "dp 4, 2x4096": Timed("", (2, 4096, 16)),
    "cp 4, 1x32768": Timed(f"{CP} 4", (1, 32768, 1), LONG),
    "cp 4, 1x131072": Timed(f"{CP} 4", (1, 131072, 1), LONG),
}


def begin_timed(args: argparse.Namespace, name: str, layer: str, round_: int) -> Launch:
    timed = TIMED[name]
    clone, spec, options, more = LAYERS[layer]
    batch, length, in_a_step = timed.tokens
    size = (
        f"--micro-batch-size {batch} --global-batch-size {in_a_step} --seq-length "
        f"{length}"
    )
    size += f" --max-position-embeddings {length} --train-iters {args.steps}"
    memory = f"--log-memory-interval {args.steps}"
    words = (
        f"{FLAGS} {HIDDEN[2048]} {size} {memory} --spec {SPECS[spec]} {timed.flags} "
        f"{more}"
    )
    flags = words.split()
    log = f"{name}-{layer}-{round_}".replace(" ", "").replace(",", "-")
    if args.toy:
        flags = [*on_cpu(flags), "--seq-length", "64", "--hybrid-layer-pattern"]
        flags += ["G-*-|G-*-" if "|" in timed.flags else "G-*-"]
    return Launch(
        args.clones / f"mlm-{clone}" / "pretrain_hybrid.py",
        flags,
        args.out / f"{log}.log",
        ranks=timed.gpus,
        gpus=list(range(timed.gpus)),
        until="" if args.toy else "train",
        toy=args.toy,
        **({"MEGATRON_GDN_OPTIONS": options} if options else {}),
    )


def times(args: argparse.Namespace) -> int:
    """Rounds over all layouts; in a round, the layers of a layout one after the
    other."""
    setting = environment(args)
    todo = [
        (name, layer, round_)
        for round_ in range(args.rounds)
        for name in args.timed
        for layer in TIMED[name].layers
    ]
    imported = [begin_timed(args, *one) for one in todo]
    built: list[Launch] = []
    failures = []
    records = []

    def build(launch: Launch) -> None:
        launch.release()
        built.append(launch)

    build(imported[0])
    for i, (name, layer, round_) in enumerate(todo):
        launch = built[i]
        log = f"{name}, {layer}, round {round_}"
        if args.left() < 25:
            print(f"{log}: not begun, out of time", flush=True)
            break
        began = time.monotonic()
        if not args.toy:
            launch.wait_for("waits before the first step", min(90, args.left()))
        if i + 1 < len(todo):
            build(imported[i + 1])
            if not args.toy:
                # The next one is built before this one is timed, not while.
                imported[i + 1].wait_for(
                    "waits before the first step", min(90, args.left())
                )
        waited = time.monotonic() - began
        launch.release()
        failed = launch.finish(min(args.launch_seconds, args.left()))
        record = {
            "case": name,
            "layer": layer,
            "round": round_,
            **times_and_losses(launch),
        }
        record["seconds"] = [
            round(waited, 1),
            round(time.monotonic() - began - waited, 1),
        ]
        if failed:
            record["failed"] = failed
            failures.append(f"{log}: {failed}")
        records.append(record)
        with (args.out / "launches_times.jsonl").open("a") as file:
            file.write(json.dumps(record | setting) + "\n")
        shown = {k: record.get(k) for k in ("step_ms", "first_ms", "peak", "failed")}
        print(
            f"{log}: {record['seconds']} s, at {args.spent():.0f} s, {shown}",
            flush=True,
        )
    for launch in imported:
        launch.kill()
    print(markdown(time_rows(records)))
    print("\n".join(failures))
    return bool(failures)


def time_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    """A line for each layout and layer: of all its rounds the least median."""
    rows = [
        [
            "launch",
            "layer",
            "ms per step",
            "",
            "least",
            "peak GiB",
            "last loss",
            "rounds",
        ]
    ]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for r in records:
        if "step_ms" in r and "failed" not in r:
            groups.setdefault((r["case"], r["layer"]), []).append(r)

    def median(group: list[dict[str, Any]]) -> float:
        return min(r["step_ms"]["median"] for r in group)

    for (name, layer), group in groups.items():
        base = groups.get((name, "upstream"))
        last = list(group[0]["losses"].values())[-1]
        rows.append(
            [
                name,
                layer.replace("upstream", "megatron-core"),
                f"{median(group):.1f}",
                f"{median(group) / median(base):.2f}" if base else "",
                f"{min(r['step_ms']['least'] for r in group):.1f}",
                f"{max(r['peak'] for r in group) / 1024:.1f}",
                f"{last:.4f}",
                " ".join(f"{r['step_ms']['median']:.0f}" for r in group),
            ]
        )
    return rows


def start_in_words(case: Case, cases: dict[str, Case]) -> str:
    if case.start is None or case.start[0] in MODELS:
        return ""
    saved = cases[case.start[0]]
    how = "killed while it saved" if saved.killed_at else f"saved by {saved.flags}"
    return f"--load, {how}"


def held_to_in_words(case: Case, held_to: str, cases: dict[str, Case]) -> str:
    if not held_to:
        return ""
    if case.exact:
        return "the same launch"
    other = cases[held_to]
    if other.saves and held_to not in MODELS:
        return "the run that saved"
    if other.gpus == 1:
        return "one GPU"
    return "our layer" if case.layer == "upstream" else held_to


def result_in_words(record: dict[str, Any]) -> str:
    if "failed" in record:
        return "fails"
    off = record.get("distance")
    if off is None:
        return "trains"
    return f"{off:.0e}" if off else "0"


def table(records: Path) -> int:
    """Writes records of `laws` to docs/launches.jsonl, and the table of
    docs/support.md."""
    from tests.launches.record import KEY, write

    for line in records.read_text().splitlines():
        record = json.loads(line)
        cases = {
            name: case
            for wave in WAVES[record["divide"]]
            for name, case in wave.items()
        }
        case = cases[record["case"]]
        model = MODELS[case.model]
        result = result_in_words(record)
        script = "pretrain_hybrid.py"
        options = f"MEGATRON_GDN_OPTIONS={case.options}" if case.options else ""
        words = f"{options} {record['flags']} {start_in_words(case, cases)}"
        if case.layer == "upstream":
            words += ", Megatron's own layer"
        place = (
            f"megatron_gdn.launch {script}" if model.launcher else script,
            str(case.gpus),
            " ".join(words.split()),
            held_to_in_words(case, record.get("held_to", ""), cases),
            f"{BRANCHES[model.clone]} on H200",
        )
        write(
            {
                **dict(zip(KEY, place, strict=True)),
                "commit": record["environment"]["megatron-lm"],
                "torch": record["environment"]["torch"],
                "date": record["date"],
                "result": result,
            }
        )
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["laws", "times", "table"])
    parser.add_argument(
        "clones", type=Path, help="the folder of the clones, or of table: records"
    )
    parser.add_argument("--cases", nargs="+", help="of laws; all of them by default")
    parser.add_argument("--timed", nargs="+", choices=TIMED, default=list(TIMED))
    parser.add_argument("--rounds", type=int, default=2, help="of times")
    parser.add_argument("--steps", type=int, default=16, help="of a timed launch")
    parser.add_argument("--gpus", type=int, default=4, help="of this machine")
    parser.add_argument(
        "--divide", type=int, choices=DIVIDED, help="among so many; default: all"
    )
    parser.add_argument(
        "--at-once", type=int, default=4, help="launches of laws on a GPU"
    )
    parser.add_argument(
        "--compile", action="store_true", help="FlashQLA's kernels, first"
    )
    parser.add_argument(
        "--seconds", type=float, default=560, help="of all launches together"
    )
    parser.add_argument(
        "--launch-seconds", type=float, default=150, help="of one launch"
    )
    parser.add_argument("--scratch", type=Path, help="a folder for checkpoints")
    parser.add_argument("--out", type=Path, default=Path("runs/launches"))
    parser.add_argument("--called", default="", help="of the clones, for the records")
    parser.add_argument("--toy", action="store_true", help="tiny, on a CPU")
    args = parser.parse_args()
    args.divide = args.divide or max(args.gpus, 2)
    args.clones = args.clones.resolve()
    args.megatron_lm = args.clones / "mlm-core"
    args.out = args.out.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    args.spent = lambda: time.monotonic() - began
    args.left = lambda: args.seconds - args.spent()
    return args


def main() -> int:
    args = arguments()
    if args.part == "table":
        return table(args.clones)
    return laws(args) if args.part == "laws" else times(args)


if __name__ == "__main__":
    sys.exit(main())

"""Laws of launches: the losses of a model that is divided in every way, from one
checkpoint, and what is continued from what another launch saved.

One GPU trains each small model and saves it with its optimizer at step 3; every other
launch goes on from that file. How far losses are apart when nothing but the order of
bf16's roundings differs is measured: launches with Megatron's own layer, divided in
several ways, beside one GPU's. The losses of our launches may differ from one GPU's by
twice that, and those of a launch that goes on with the other layer by twice what the
two layers differ by on one GPU.
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
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lib.launching import (
    DATA,
    FLAGS,
    ROOT,
    SPECS,
    Launch,
    environment,
    on_cpu,
    times_and_losses,
)
from lib.pages import markdown

BRANCHES = {"core": "core_r0.19.0", "main": "main", "dev": "dev"}
MODELS = DATA["models"]
HELD_STEPS = 3


@dataclass(frozen=True)
class Case:
    """One launch of a small model; launches.toml says what the fields mean."""

    gpus: int
    model: str = "dense"
    flags: str = ""
    layer: str = "ours"
    start: tuple[str, int] | None = None
    held_to: str | None = None
    options: str = ""
    saves: bool = False
    killed_at: str = ""
    exact: bool = False
    many_connections: bool = False


def waves_of(gpus: int) -> list[dict[str, Case]]:
    """The launches over so many GPUs, in waves."""
    ways = DATA["ways"][str(gpus)]
    first = next(iter(ways))
    found = []
    for wave in DATA["waves"]:
        cases: dict[str, Case] = {}
        for template, row in wave.items():
            for each in each_of(row, ways):
                way = ways.get(each, {})
                words = {
                    "each": each,
                    "gpus": gpus,
                    "first": first,
                    "flags": ways[first]["flags"],
                }
                made = dict(row)
                name = made.pop("name", template).format(**words)
                made.pop("each", None)
                if way:
                    made["flags"] = way["flags"]
                if way and row.get("layer") != "upstream" and row["each"] == "ways":
                    made["options"] = way.get("options", "")
                    made["saves"] = each == first
                for key in ("model", "flags", "held_to"):
                    if key in made:
                        made[key] = made[key].format(**words)
                if "start" in made:
                    saved, step = made["start"]
                    made["start"] = (saved.format(**words), step)
                cases[name] = Case(**{"gpus": gpus, **made})
        found.append(cases)
    return found


def each_of(row: dict[str, Any], ways: dict[str, Any]) -> list[str]:
    """What ``{each}`` stands for in a row, one after the other."""
    each = row.get("each", [""])
    if each == "ways":
        return list(ways)
    if isinstance(each, str):
        return [name for name, way in ways.items() if way.get(each)]
    return each


WAVES = {int(gpus): waves_of(int(gpus)) for gpus in DATA["ways"]}


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
        data = DATA["data"][MODELS[case.model].get("data", "mock")]
        flags = f"{FLAGS['base']} {FLAGS['small']}".split()
        flags += data.format(data=self.folder / "data").split()
        flags += f"{model_flags(case)} {case.flags} --spec {SPECS[case.layer]}".split()
        if "--use-torch-fsdp2" in flags:
            flags.remove("--use-distributed-optimizer")
        if "fsdp" in case.flags:
            flags.remove("--dist-ckpt-optim-fully-reshardable")
        if case.start:
            saved, step = case.start
            flags += ["--load", str(self.place(saved))]
            if step:
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
            flags = [*on_cpu(flags), *FLAGS["toy_small"].format(pattern).split()]
        # Many launches at once would each start some thirty compilers.
        given: dict[str, str | None] = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        if case.many_connections:
            given["CUDA_DEVICE_MAX_CONNECTIONS"] = None
        if case.options:
            given["MEGATRON_GDN_OPTIONS"] = case.options
        return Launch(
            self.args.folder
            / f"mlm-{model.get('clone', 'core')}"
            / "pretrain_hybrid.py",
            flags,
            self.args.out / f"{name.replace(' ', '-')}.log",
            ranks=case.gpus,
            gpus=self.gpus(case.gpus),
            launcher=model.get("launcher", False),
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
        record["flags"] = " ".join(f"{model_flags(case)} {case.flags}".split())
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


def model_flags(case: Case) -> str:
    model = MODELS[case.model]
    return f"--hybrid-layer-pattern {model['pattern']} {model.get('flags', '')}"


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
    clone = str((args.folder / "mlm-core").resolve())
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
    setting = environment(args.folder / "mlm-core", args.called)
    waves = WAVES[args.divide]
    cases = {name: case for wave in waves for name, case in wave.items()}
    with tempfile.TemporaryDirectory(dir=args.scratch) as folder:
        all_launches = Launches(args, cases, Path(folder))
        prepare_data(args, Path(folder))
        chosen = [
            [name for name in wave if not args.cases or name in args.cases]
            for wave in waves
        ]
        held = {}
        if not args.toy:
            # They import while others compile and train.
            names = [*chosen[0], *chosen[1]]
            held = {name: all_launches.begin(name) for name in names}
        if args.compile and not args.toy:
            compile_kernels(args.divide)
        for wave in chosen:
            all_launches.run_wave(wave, held)
    records = all_launches.records
    far = hold(records, cases)
    with (args.out / "launches_gpus.jsonl").open("a") as file:
        for name, record in records.items():
            if not name.endswith(", first"):
                words = {"divide": args.divide, "model": cases[name].model}
                file.write(json.dumps(record | words | setting) + "\n")
    print(markdown(law_rows(list(records.values()))))
    print("\n".join(["too far or failed:", *far]) if far else "held")
    return bool(far)


def law_rows(records: list[dict[str, Any]]) -> list[list[str]]:
    head = ["launch", "layer", "GPUs", "held to", "distance", "spread"]
    rows = [[*head, "first losses", "failed"]]
    for r in records:
        losses = [f"{step}: {loss:.4f}" for step, loss in r.get("losses", {}).items()]
        off = r.get("distance")
        distance = "" if off is None else f"{off:.1e}"
        cells = [r["case"], r["layer"], str(r["gpus"]), r.get("held_to", ""), distance]
        cells += [f"{r.get('spread', 0):.1e}", ", ".join(losses)]
        rows.append([*cells, r.get("failed", "")[:120]])
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
            f"megatron_gdn.launch {script}" if model.get("launcher") else script,
            str(case.gpus),
            " ".join(words.split()),
            held_to_in_words(case, record.get("held_to", ""), cases),
            f"{BRANCHES[model.get('clone', 'core')]} on H200",
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

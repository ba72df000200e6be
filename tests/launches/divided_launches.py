"""Laws of launches: the losses of a model that is divided in every way, from one
checkpoint, and what is continued from what another launch saved.

    MEGATRON_LM=CLONES python benchmarks/run.py launch-laws --set gpus=2
    python -m tests.launches.divided_launches RECORDS     the records in docs/support.md

One GPU trains each small model and saves it with its optimizer at step 3; every other
launch goes on from that file. How far losses are apart when nothing but the order of
bf16's roundings differs is measured: launches with Megatron's own layer, divided in
several ways, beside one GPU's. The losses of our launches may differ from one GPU's by
twice that, and those of a launch that goes on with the other layer by twice what the
two layers differ by on one GPU.
"""

from __future__ import annotations

import json
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.lib.launching import (
    FLAGS,
    SPECS,
    chosen,
    clone_of,
    last_value,
    launch,
    note_megatron,
    on_cpu,
)
from tests.launches import real_data
from tests.launches.record import KEY, write

if TYPE_CHECKING:
    from benchmarks.lib.session import Session

BRANCHES = {"core": "core_r0.19.0", "main": "main"}
DATA: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
MODELS = DATA["models"]
HELD_STEPS = 3


@dataclass(frozen=True)
class Case:
    """One launch of a small model; the TOML file says what the fields mean."""

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
    connections: str = "1"

    @property
    def model_flags(self) -> str:
        model = MODELS[self.model]
        return f"--hybrid-layer-pattern {model['pattern']} {model.get('flags', '')}"


def waves_of(gpus: int) -> list[dict[str, Case]]:
    """The launches over so many GPUs, in waves."""
    ways = DATA["ways"][str(gpus)]
    first = next(iter(ways))
    words = {"gpus": gpus, "first": first, "flags": ways[first]["flags"]}
    words |= DATA["words"]
    found = []
    for wave in DATA["waves"]:
        cases: dict[str, Case] = {}
        for name, row in wave.items():
            for each in each_of(row, ways):
                made = {"gpus": gpus, "name": name, **row}
                if each in ways:
                    made["flags"] = ways[each]["flags"]
                if row.get("each") == "ways":
                    made["options"] = ways[each].get("options", "")
                    made["saves"] = each == first
                made = in_words(made, words | {"each": each})
                made.pop("each", None)
                case = made.pop("name")
                cases[case] = Case(**made)
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


def in_words(value: Any, words: dict[str, Any]) -> Any:
    """A row of the TOML file with what ``{word}`` stands for in every text of it."""
    if isinstance(value, str):
        return value.format(**words)
    if isinstance(value, list):
        return [in_words(each, words) for each in value]
    if isinstance(value, dict):
        return {key: in_words(each, words) for key, each in value.items()}
    return value


WAVES = {int(gpus): waves_of(int(gpus)) for gpus in DATA["ways"]}
CASES = {
    gpus: {name: case for wave in waves for name, case in wave.items()}
    for gpus, waves in WAVES.items()
}


class Launches:
    """Runs launches, and keeps which folders they saved to and what they printed."""

    def __init__(self, session: Session, cases: dict[str, Case], folder: Path) -> None:
        self.session = session
        self.cases = cases
        self.folder = folder
        self.records: dict[str, dict[str, Any]] = {}
        self.gpus_here = torch.cuda.device_count() or session.row["gpus"]
        self.next_gpu = 0

    def gpus(self, count: int) -> list[int]:
        """The next ``count`` GPUs in turn."""
        first = self.next_gpu
        self.next_gpu += count
        return [i % self.gpus_here for i in range(first, first + count)]

    def flags(self, name: str, case: Case) -> list[str]:
        data = FLAGS["mock"]
        if "data" in MODELS[case.model]:
            data = DATA["data"][MODELS[case.model]["data"]]
        flags = f"{FLAGS['base']} {DATA['small']}".split()
        flags += data.format(data=self.folder / "data").split()
        flags += f"{case.model_flags} {case.flags} --spec {SPECS[case.layer]}".split()
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
            flags += ["--save", str(self.place(name))]
        if self.session.args.tiny:
            flags = on_cpu(flags, last_value(flags, "--hybrid-layer-pattern"))
        return flags

    def place(self, name: str) -> Path:
        return self.folder / name.replace(" ", "-")

    def run(self, name: str) -> None:
        if self.session.late(name):
            return
        case = self.cases[name]
        model = MODELS[case.model]
        # Many launches at once would each start some thirty compilers.
        given = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}
        given["CUDA_DEVICE_MAX_CONNECTIONS"] = case.connections
        if case.options:
            given["MEGATRON_GDN_OPTIONS"] = case.options
        found = launch(
            self.session,
            name,
            self.flags(name, case),
            self.gpus(case.gpus),
            branch=model.get("clone", "core"),
            launcher=model.get("launcher", False),
            killed_at=case.killed_at,
            **given,
        )
        flags = " ".join(f"{case.model_flags} {case.flags}".split())
        names = {"case": name, "layer": case.layer, "gpus": case.gpus, "flags": flags}
        self.records[name] = names | found
        said = found.get("failed") or list(found.get("losses", {}).items())[:4]
        self.session.say(f"{name}: {found['seconds']} s {said}")


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


def prepare_data(folder: Path) -> None:
    """Text and chats of the tests' launches, made by the clone's own tool."""
    folder.mkdir()
    real_data.CLONE = str(clone_of())
    real_data.save_tokenizer(folder)
    real_data.save_text(folder)
    real_data.save_chats(folder)


def laws(session: Session) -> None:
    """A record of each launch; the status is 1 if one failed or was too far."""
    note_megatron(session)
    gpus = session.row["gpus"]
    cases = CASES[gpus]
    names = chosen(session, cases)
    with tempfile.TemporaryDirectory(dir=session.row.get("scratch")) as folder:
        launches = Launches(session, cases, Path(folder))
        prepare_data(Path(folder) / "data")
        for wave in WAVES[gpus]:
            with ThreadPoolExecutor(session.row["at_once"]) as pool:
                list(pool.map(launches.run, [name for name in wave if name in names]))
    far = hold(launches.records, cases)
    for name, record in launches.records.items():
        if not name.endswith(", first"):
            session.emit(record | {"divide": gpus, "model": cases[name].model})
    if far:
        sys.exit("\n".join(["too far or failed:", *far]))
    session.say("held")


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
    for line in records.read_text().splitlines():
        record = json.loads(line)
        cases = CASES[record["divide"]]
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


if __name__ == "__main__":
    sys.exit(table(Path(sys.argv[1])))

"""A card for each launch on GPUs: what was trained, how it was divided, with which
versions, how far its losses are from a reference, its time and its memory.

    python benchmarks/cards.py    # docs/cards, from the records of the launches
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).parent
CARDS = HERE.parent / "docs" / "cards"
PARALLEL = ("tensor-model", "context", "pipeline-model", "expert-model")
# The model of launches.jsonl, which has no flags of its own.
ALONE = "--hybrid-layer-pattern G-G-G-*-G-G-G-*-"


def read(name: str) -> list[dict[str, Any]]:
    lines = (HERE / "results" / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


def card(record: dict[str, Any], reference: str, difference: float | None) -> str:
    """The text of a card; ``difference``: the largest relative one of a loss."""
    flags = record.get("flags", ALONE)
    sizes = dict(re.findall(r"--(\S+)-parallel-size (\d+)", flags))
    layout = {name.removesuffix("-model"): int(sizes.get(name, 1)) for name in PARALLEL}
    gpus = record.get("gpus", 1)
    divided = layout["tensor"] * layout["context"] * layout["pipeline"]
    losses = record["losses"]
    first, last = min(losses, key=int), max(losses, key=int)
    loss: dict[str, Any] = {
        "iterations": f"{first} to {last}",
        "first": losses[first],
        "last": losses[last],
        "reference": reference,
    }
    if difference is not None:
        loss["largest difference"] = float(f"{difference:.1e}")
        loss["verified"] = difference <= record.get("spread", 1e-3)
    times = record["step_ms"]
    environment = dict(record["environment"])
    text = {
        "script": "pretrain_hybrid.py",
        "flags": flags,
        "layout": layout | {"data": gpus // divided},
        "gpus": f"{gpus} {environment.pop('gpu')}",
        "date": record["date"],
        "versions": environment,
        "loss": loss,
        "step ms": {name: round(times[name], 1) for name in ("median", "p10", "p90")},
        "peak MiB": round(record["peak"]),
    }
    return yaml.safe_dump(text, sort_keys=False, width=88)


def cards() -> dict[str, str]:
    """The card of every launch with our layer, by the name of its file."""
    made = {}
    alone = read("launches.jsonl")
    for record in alone:
        if record["layer"] != "ours":
            continue
        same = (r for r in alone if r["case"] == record["case"])
        theirs = next((r for r in same if r["layer"] == "upstream"), None)
        reference, difference = "none", None
        if theirs is not None:
            reference = "the first loss of megatron-core's layer"
            first, wanted = record["losses"]["1"], theirs["losses"]["1"]
            difference = abs(first - wanted) / wanted
        made[f"one-{record['case']}"] = card(record, reference, difference)
    for record in read("launches_gpus.jsonl"):
        if record["layer"] == "ours":
            reference = "none"
            if "held_to" in record:
                reference = f"the launch {record['held_to']}, on one GPU"
            made[record["case"]] = card(record, reference, record.get("distance"))
    return {f"{name.replace(' ', '-')}.yaml": text for name, text in made.items()}


def write() -> None:
    """Writes every card, and removes those of records that are gone."""
    CARDS.mkdir(exist_ok=True)
    made = cards()
    for file in CARDS.glob("*.yaml"):
        if file.name not in made:
            file.unlink()
    for name, text in made.items():
        (CARDS / name).write_text(text)


if __name__ == "__main__":
    write()

"""Times of the steps of Megatron's own pretrain_hybrid.py, with our layer and with
Megatron's; launches.toml has their flags.

    MEGATRON_LM=CLONE python benchmarks/run.py launches --cases 2x4096

Each launch has the GPUs for itself. Steps are timed by Megatron, which waits for the GPU
in each. Logs stand beside ``--out``.
"""

from __future__ import annotations

from typing import Any

from lib.launching import (
    DATA,
    FLAGS,
    SPECS,
    chosen,
    last_value,
    launch,
    note_megatron,
    on_cpu,
)
from lib.session import Session


def flags_of(row: dict[str, Any], kind: dict[str, str]) -> list[str]:
    """Of a row of launches.toml, with a layer of the registry."""
    batch, length, in_a_step = row.get("tokens", (2, 4096, 4))
    steps = row.get("steps", 30)
    flags = f"""
        {FLAGS["base"]} {FLAGS["mock"]} {DATA["hidden"][row.get("hidden", "2048")]}
        --micro-batch-size {batch} --global-batch-size {in_a_step}
        --seq-length {length} --max-position-embeddings {length}
        --train-iters {steps} --log-memory-interval {steps}
        --spec {SPECS[kind.get("spec", "ours")]}
        {row.get("flags", "")} {kind.get("flags", "")}
    """
    return flags.split()


def launches(session: Session) -> None:
    """A record of each launch."""
    note_megatron(session)
    for round_ in range(session.row["rounds"]):
        for case in chosen(session, DATA["rows"]):
            row = DATA["rows"][case]
            for layer in row.get("layers", ["upstream", "ours"]):
                name = f"{case} {layer} {round_}"
                asked = layer in (session.args.layers or session.row["layers"])
                if asked and not session.late(name):
                    record = launch_of(session, name, row, session.row["layers"][layer])
                    session.emit({"case": case, "layer": layer, **record})


def launch_of(
    session: Session, name: str, row: dict[str, Any], kind: dict[str, str]
) -> dict[str, Any]:
    flags = flags_of(row, kind)
    if session.args.tiny:
        piped = "|" in last_value(flags, "--hybrid-layer-pattern")
        flags = on_cpu(flags, "G-*-|G-*-" if piped else "G-*-")
    given = {}
    if "options" in kind:
        given["MEGATRON_GDN_OPTIONS"] = kind["options"]
    gpus = list(range(row.get("gpus", 1)))
    return launch(session, name, flags, gpus, branch=kind.get("clone", "core"), **given)

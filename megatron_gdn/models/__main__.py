"""``python -m megatron_gdn.models``: the models, one model's figures, its flags, legal sizes."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..command_line import Parser, refuse

_DESCRIPTION = """\
Without NAME: the models. With NAME: what it costs at these sizes, and which sizes it can take.
Language models alone: vision encoders and heads of multi-token prediction are not counted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    from ..compat.quiet import hide_import_notes

    hide_import_notes()
    from .figures import check, figures, launch_flags
    from .model import Model

    try:
        if options.name is None:
            return _print_list(options.json)
        model = Model.named(options.name)
        check(model, options)
        if options.flags:
            print(" \\\n".join(_one_a_line(launch_flags(model, options))))
            return 0
    except (ValueError, NotImplementedError) as error:
        return refuse(error)
    found = figures(model, options)
    print(json.dumps(found, indent=2) if options.json else "\n".join(_lines(found)))
    return 0


def _one_a_line(flags: list[str]) -> Iterator[str]:
    """Each flag with its values."""
    line: list[str] = []
    for word in flags:
        if word.startswith("--") and line:
            yield shlex.join(line)
            line = []
        line.append(word)
    yield shlex.join(line)


def _lines(found: dict[str, Any]) -> Iterator[str]:
    from .figures import LAYERS

    sizes, flops, price = found["sizes"], found["FLOPs per token"], found["price in ms"]
    state = found["state bytes per sequence"]
    legal = {name: " ".join(map(str, numbers)) for name, numbers in found["legal"].items()}
    yield f"{found['name']} ({found['architecture']}; from {found['source']})"
    yield "  layers        " + ", ".join(f"{n} {LAYERS[s]}" for s, n in found["layers"].items())
    parameters, active = _count(found["parameters"]), _count(found["active parameters"])
    yield f"  parameters    {parameters}, {active} of them for a token"
    forward, step = (flops.pop(name) / 1e9 for name in ("forward", "step"))
    yield (
        f"  FLOPs         {forward:.2f} G for a token forward, {step:.2f} G with backward, in one "
        f"document of {sizes['length']} tokens"
    )
    yield "                " + ", ".join(f"{name} {x / 1e9:.3f}" for name, x in flops.items())
    yield (
        f"  state         {state['recurrent'] / 2**20:.1f} MiB for a sequence (fp32), and "
        f"{state['conv'] / 2**10:.0f} KiB of convolutions (bf16)"
    )
    if kept := found["activation bytes per GPU"]:
        gib = {name: f"{number / 2**30:.2f}" for name, number in kept.items()}
        yield (
            f"  activations   {gib['none']} GiB for a GPU's Gated DeltaNet layers, "
            f"{gib['light']} with recompute=light, {gib['full']} with recompute=full, "
            f"{gib['layer recomputed']} with --recompute-modules gdn"
        )
    why = ": headwise adds {headwise:.2f} ms to a layer's forward, chunkwise {chunkwise:.2f}"
    why = "" if price is None else why.format(**price)
    yield f"  auto          {found['auto']} for cp {sizes['cp']}{why}"
    yield f"  legal tp      {legal['tp']}"
    yield f"  legal cp      any; headwise with tp {sizes['tp']}: {legal['cp headwise']}"
    yield f"  legal ep      {legal['ep']}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _print_list(as_json: bool) -> int:
    from .figures import LAYERS, tensor_parallel_sizes
    from .model import ENTRIES, Model

    rows = []
    for model in map(Model.named, ENTRIES):
        counts = model.stack.parameters, model.stack.active_parameters
        about = model.name, *counts, model.pattern, model.entry.source
        names = "name", "parameters", "active parameters", "pattern", "source"
        rows.append(dict(zip(names, about, strict=True)))
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'model':25} {'parameters':>12} {'for a token':>12}  tp up to  layers")
    for row in rows:
        counts = ((row["pattern"].count(symbol), symbol) for symbol in LAYERS)
        layers = ", ".join(f"{n} {symbol}" for n, symbol in counts if n)
        parameters, active = _count(row["parameters"]), _count(row["active parameters"])
        tp = tensor_parallel_sizes(Model.named(row["name"]))[-1]
        print(f"{row['name']:25} {parameters:>12} {active:>12} {tp:9}  {layers}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser("python -m megatron_gdn.models", description=_DESCRIPTION)
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help="of a model, such as Qwen3.5-35B-A3B")
    add("--tp", type=int, default=1, help="tensor-parallel size (1)")
    add("--cp", type=int, default=1, help="context-parallel size (1)")
    add("--ep", type=int, default=1, help="expert-parallel size (1)")
    add("--length", type=int, default=4096, help="tokens of a sequence (4096)")
    add("--gpus", type=int, help="all of them, to check the sizes against")
    add("--gpus-per-machine", type=int, default=8, help="that NVLink joins (8)")
    add("--model", choices=("hybrid", "gpt"), default="hybrid", help="of the flags")
    show = parser.add_mutually_exclusive_group()
    show.add_argument("--flags", action="store_true", help="flags for a launch, to paste")
    show.add_argument("--json", action="store_true", help="in units without prefix, for programs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

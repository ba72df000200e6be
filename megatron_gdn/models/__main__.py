"""``python -m megatron_gdn.models``: the models, one model's figures, its flags."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from ..gdn.sizes import GDNDims
from ..mixers.recompute import LEVELS
from . import sizes
from .catalogue import ENTRIES, Model

_DESCRIPTION = """\
Without NAME: the models. With NAME: what it costs at these sizes, and which sizes it can take.
Language models alone: vision encoders and heads of multi-token prediction are not counted.
"""


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    try:
        if options.name is None:
            return _print_list(options.json)
        model = Model.named(options.name)
        sizes.check(model, options.tp, options.cp, options.ep, options.length, options.gpus)
        if options.flags:
            print(shlex.join(launch_flags(model, options)))
            return 0
    except (ValueError, NotImplementedError) as error:
        print(error, file=sys.stderr)
        return 2
    found = figures(model, options)
    print(json.dumps(found, indent=2) if options.json else "\n".join(_lines(found)))
    return 0


def launch_flags(model: Model, options: argparse.Namespace) -> list[str]:
    """Model, precision, length and parallel sizes; data, tokenizer and optimizer are the launch's.

    Experts are not cut by tensor parallelism: Megatron would do so without being told.
    """
    length = str(options.length)
    flags = [*model.flags(options.model), "--bf16", "--use-distributed-optimizer"]
    flags += ["--no-gradient-accumulation-fusion"]  # for machines without APEX
    flags += ["--seq-length", length, "--max-position-embeddings", length]
    flags += ["--micro-batch-size", "1", "--tensor-model-parallel-size", str(options.tp)]
    if options.tp > 1:
        flags += ["--sequence-parallel"]
    flags += ["--context-parallel-size", str(options.cp)]
    if "E" in model.pattern:
        flags += ["--expert-model-parallel-size", str(options.ep)]
        flags += ["--expert-tensor-parallel-size", "1"]
        flags += ["--moe-token-dispatcher-type", "alltoall"]
    return flags


def figures(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """All that is printed, in units without prefix."""
    tp, cp, ep, length = options.tp, options.cp, options.ep, options.length
    stack, pattern, dims = model.stack, model.pattern, model.dims
    flops = stack.flops([length])
    chosen = sizes.scheme(model, tp, cp, length, gpus_per_machine=options.gpus_per_machine)
    activations = {}
    if isinstance(dims, GDNDims):
        tokens = pattern.count("G") * (length // cp)
        activations = {x: tokens * sizes.saved_bytes(dims, tp=tp, recompute=x) for x in LEVELS}
        activations["layer recomputed"] = tokens * sizes.saved_bytes(
            dims, tp=tp, recompute_layer=True
        )
    return {
        "name": model.name,
        "architecture": model.entry.architecture,
        "source": model.entry.source,
        "layers": _layers(pattern),
        "parameters": stack.parameters,
        "active parameters": stack.active_parameters,
        "sizes": {"tp": tp, "cp": cp, "ep": ep, "length": length, "gpus": options.gpus}
        | {"gpus per machine": options.gpus_per_machine},
        "FLOPs per token": {name: x / length for name, x in flops._asdict().items()}
        | {"forward": flops.forward / length, "step": flops.step / length},
        "state bytes per sequence": {"recurrent": stack.state_bytes, "conv": stack.conv_bytes},
        "activation bytes per GPU": activations,
        "auto": chosen.name,
        "price in ms": None if chosen.price is None else chosen.price._asdict(),
        "legal": {
            "tp": sizes.tensor_parallel_sizes(model),
            "cp headwise": sizes.headwise_sizes(model, tp),
            "ep": sizes.expert_parallel_sizes(model),
        },
    }


def _layers(pattern: str) -> dict[str, int]:
    return {symbol: pattern.count(symbol) for symbol in "GM*-E" if symbol in pattern}


def _lines(found: dict[str, Any]) -> Iterator[str]:
    given, flops, price = found["sizes"], found["FLOPs per token"], found["price in ms"]
    state = found["state bytes per sequence"]
    legal = {name: " ".join(map(str, numbers)) for name, numbers in found["legal"].items()}
    names = {"G": "Gated DeltaNet", "M": "Mamba2", "*": "attention", "-": "MLP", "E": "experts"}
    yield f"{found['name']} ({found['architecture']}; from {found['source']})"
    yield "  layers        " + ", ".join(f"{n} {names[s]}" for s, n in found["layers"].items())
    parameters, active = _count(found["parameters"]), _count(found["active parameters"])
    yield f"  parameters    {parameters}, {active} of them for a token"
    forward, step = (flops.pop(name) / 1e9 for name in ("forward", "step"))
    yield (
        f"  FLOPs         {forward:.2f} G for a token forward, {step:.2f} G with backward, in one "
        f"document of {given['length']} tokens"
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
    yield f"  auto          {found['auto']} for cp {given['cp']}{why}"
    yield f"  legal tp      {legal['tp']}"
    yield f"  legal cp      any; headwise with tp {given['tp']}: {legal['cp headwise']}"
    yield f"  legal ep      {legal['ep']}"


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e8 else f"{number / 1e6:.2f} M"


def _print_list(as_json: bool) -> int:
    rows = [
        {
            "name": model.name,
            "parameters": model.stack.parameters,
            "active parameters": model.stack.active_parameters,
            "pattern": model.pattern,
            "source": model.entry.source,
        }
        for model in map(Model.named, ENTRIES)
    ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return 0
    print(f"{'model':25} {'parameters':>12} {'for a token':>12}  tp up to  layers")
    for row in rows:
        layers = ", ".join(f"{n} {symbol}" for symbol, n in _layers(row["pattern"]).items())
        parameters, active = _count(row["parameters"]), _count(row["active parameters"])
        tp = sizes.tensor_parallel_sizes(Model.named(row["name"]))[-1]
        print(f"{row['name']:25} {parameters:>12} {active:>12} {tp:9}  {layers}")
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m megatron_gdn.models", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
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

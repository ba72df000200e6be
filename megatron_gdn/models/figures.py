"""What a model costs at given parallel sizes, which sizes it can take, and its launch's flags."""

from __future__ import annotations

import argparse
from math import lcm
from typing import Any, NamedTuple

from ..context_parallel import SequenceLayout
from ..context_parallel.machines import stretch
from ..context_parallel.price import Price, price
from ..gdn.sizes import GDNDims
from ..mixers.arguments import LEVELS
from .model import Model
from .stack import CHUNK

LAYERS = {"G": "Gated DeltaNet", "M": "Mamba2", "*": "attention", "-": "MLP", "E": "experts"}


def launch_flags(model: Model, options: argparse.Namespace) -> list[str]:
    """Model, precision, length and parallel sizes; not data, tokenizer and optimizer."""
    flags = "--bf16 --use-distributed-optimizer"
    flags += " --no-gradient-accumulation-fusion"  # for machines without APEX
    flags += f" --seq-length {options.length} --max-position-embeddings {options.length}"
    flags += f" --micro-batch-size 1 --tensor-model-parallel-size {options.tp}"
    flags += " --sequence-parallel" if options.tp > 1 else ""
    flags += f" --context-parallel-size {options.cp}"
    if "E" in model.pattern:
        # Without its flag, the expert-tensor-parallel size would be the tensor-parallel size.
        flags += f" --expert-model-parallel-size {options.ep} --expert-tensor-parallel-size 1"
        flags += " --moe-token-dispatcher-type alltoall"
    return [*model.flags(options.model), *flags.split()]


def figures(model: Model, options: argparse.Namespace) -> dict[str, Any]:
    """All printed figures, in units without prefix."""
    tp, cp, ep, length = options.tp, options.cp, options.ep, options.length
    stack, pattern, dims = model.stack, model.pattern, model.dims
    flops = stack.flops([length])
    chosen = scheme(model, tp, cp, length, gpus_per_machine=options.gpus_per_machine)
    activations = {}
    if isinstance(dims, GDNDims):
        tokens = pattern.count("G") * (length // cp)
        activations = {x: tokens * saved_bytes(dims, tp=tp, recompute=x) for x in LEVELS}
        activations["layer recomputed"] = tokens * saved_bytes(dims, tp=tp, recompute_layer=True)
    return {
        "name": model.name,
        "architecture": model.entry.architecture,
        "source": model.entry.source,
        "layers": {symbol: pattern.count(symbol) for symbol in LAYERS if symbol in pattern},
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
            "tp": tensor_parallel_sizes(model),
            "cp headwise": headwise_sizes(model, tp),
            "ep": expert_parallel_sizes(model),
        },
    }


class Scheme(NamedTuple):
    """What ``linear_cp_mode="auto"`` takes, and the prices."""

    name: str
    price: Price | None  # None where there is no choice


def tensor_parallel_sizes(model: Model) -> list[int]:
    """The sizes that divide all heads and the MLP; experts are not cut."""
    heads, groups = (model.settings[f"num_{name}"] for name in ("attention_heads", "query_groups"))
    cut = [heads, model.dims.layout.counts[-1][1]]  # the second: key heads, groups of Mamba2
    if "-" in model.pattern:
        cut.append(model.settings["ffn_hidden_size"])
    if "E" in model.pattern:
        cut.append(model.settings["moe_shared_expert_intermediate_size"])
    return [
        n
        for n in range(1, heads + 1)
        if all(whole % n == 0 for whole in cut) and (groups % n == 0 or n % groups == 0)
    ]


def headwise_sizes(model: Model, tp: int) -> list[int]:
    """The context-parallel sizes that divide the heads; chunkwise takes any size."""
    layout = model.dims.shard(tp).layout
    return [n for n in range(1, layout.state_heads + 1) if layout.shares_among(n)]


def expert_parallel_sizes(model: Model) -> list[int]:
    experts = model.settings.get("num_moe_experts") or 1
    return [n for n in range(1, experts + 1) if experts % n == 0]


def check(model: Model, options: argparse.Namespace) -> None:
    """Refuse sizes that a launch would refuse, and list the legal ones."""
    tp, cp, ep, length, gpus = (getattr(options, x) for x in ("tp", "cp", "ep", "length", "gpus"))
    for name, value, legal in (
        ("tensor-parallel size tp", tp, tensor_parallel_sizes(model)),
        ("expert-parallel size ep", ep, expert_parallel_sizes(model)),
    ):
        if value not in legal:
            sizes = ", ".join(map(str, legal))
            raise ValueError(f"{name}={value} is not legal; use one of {sizes}.")
    if cp < 1:
        raise ValueError(f"context-parallel size cp={cp} must be at least 1.")
    multiple = cp * lcm(2 if cp > 1 else 1, tp)
    if length < 1 or length % multiple:
        near = max(round(length / multiple), 1) * multiple
        raise ValueError(
            f"length={length} does not divide: zigzag cuts a sequence into 2 cp pieces, and "
            f"sequence parallelism each rank's share by tp, so it must be a multiple of {multiple} "
            f"for tp={tp} and cp={cp}, such as {near}."
        )
    for ranks, name in ((tp * cp, "tp * cp"), (ep, "ep")):
        if gpus is not None and (gpus < 1 or gpus % ranks):
            raise ValueError(
                f"{gpus} GPUs are not a multiple of {name} = {ranks}; use a multiple of {ranks}, "
                f"or smaller sizes."
            )


def scheme(
    model: Model,
    tp: int,
    cp: int,
    length: int,
    documents: tuple[int, ...] | None = None,
    gpus_per_machine: int = 8,
) -> Scheme:
    """What ``auto`` takes for one bf16 sequence in zigzag; ``documents`` are lengths, if packed."""
    if cp == 1:
        return Scheme("whole", None)
    if cp not in headwise_sizes(model, tp):
        return Scheme("chunkwise", None)
    share = model.dims.shard(tp)
    beside = max(gpus_per_machine // tp, 1)
    per_machine = stretch([rank // beside for rank in range(cp)])
    layout, zigzag = share.layout.share(cp), SequenceLayout.ZIGZAG
    cost = price(share.state, layout, cp, zigzag, length, 1, documents, 2, per_machine)
    return Scheme(cost.cheaper.value, cost)


def saved_bytes(
    dims: GDNDims, *, tp: int = 1, recompute: str = "none", recompute_layer: bool = False
) -> int:
    """Bytes per token that a layer keeps for its backward, in bf16 with flash_qla or fla.

    One tensor-parallel rank with sequence parallelism. States of parts, which `flash_qla` keeps for
    long sequences, are not counted (16 MiB for 32768 tokens of 32 heads). ``recompute_layer`` is
    ``--recompute-modules gdn`` of Megatron's dev.
    """
    share = dims.shard(tp)
    kept = 2 * dims.hidden_size // tp  # bf16: of the input of in_proj
    if recompute_layer:
        return kept
    again = LEVELS[recompute]
    kept += 2 * share.layout.width  # in_proj's output
    if "rule" not in again:
        kept += 2 * share.v_dim  # o
        kept += share.num_value_heads * (2 * CHUNK + 2 * 4)  # inverses; sum of g and beta in fp32
    if "qkv" not in again:
        kept += 2 * (share.qk_dim + share.v_dim)  # k and v: q is always computed again
    if "norm_out" not in again:
        kept += 2 * share.v_dim  # the input of out_proj
    return kept

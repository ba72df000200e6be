"""Which parallel sizes a model can take, how context parallelism then runs, what a layer keeps."""

from __future__ import annotations

from math import lcm
from typing import NamedTuple

from ..context_parallel import SequenceLayout
from ..context_parallel.machines import stretch
from ..context_parallel.price import Price, price
from ..gdn.sizes import GDNDims
from ..mixers.recompute import LEVELS
from .catalogue import Model
from .stack import CHUNK


class Scheme(NamedTuple):
    """What ``linear_cp_mode="auto"`` takes."""

    name: str
    price: Price | None  # None where there is no choice


def tensor_parallel_sizes(model: Model) -> list[int]:
    """The sizes that divide all heads and the MLP; routed experts are not cut."""
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
    """The context-parallel sizes that can exchange heads; chunkwise takes any size."""
    layout = model.dims.shard(tp).layout
    return [n for n in range(1, layout.state_heads + 1) if layout.shares_among(n)]


def expert_parallel_sizes(model: Model) -> list[int]:
    """The sizes that divide the experts."""
    experts = model.settings.get("num_moe_experts") or 1
    return [n for n in range(1, experts + 1) if experts % n == 0]


def check(model: Model, tp: int, cp: int, ep: int, length: int, gpus: int | None = None) -> None:
    """Refuse sizes that a launch would refuse, and name those that are legal.

    Args:
        length: tokens of a sequence.
        gpus: all of them; None if that is not known.
    """
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
    """What ``auto`` takes for one bf16 sequence of ``length`` tokens in the zigzag layout.

    Args:
        documents: lengths of what is packed into the sequence; None when not packed.
        gpus_per_machine: what NVLink joins; ranks of a tensor-parallel group lie side by side.
    """
    if cp == 1:
        return Scheme("whole", None)
    share = model.dims.shard(tp)
    if cp not in headwise_sizes(model, tp):
        return Scheme("chunkwise", None)
    beside = max(gpus_per_machine // tp, 1)
    per_machine = stretch([rank // beside for rank in range(cp)])
    layout, zigzag = share.layout.share(cp), SequenceLayout.ZIGZAG
    cost = price(share.state, layout, cp, zigzag, length, 1, documents, 2, per_machine)
    return Scheme(cost.cheaper.value, cost)


def saved_bytes(
    dims: GDNDims, *, tp: int = 1, recompute: str = "none", recompute_layer: bool = False
) -> int:
    """What a layer keeps for its backward: bytes per token in bf16 with flash_qla or fla.

    That is of one tensor-parallel rank with sequence parallelism. Where `flash_qla` cuts long
    sequences into parts it keeps their states too: 16 MiB for 32768 tokens of 32 heads.
    ``recompute_layer`` is ``--recompute-modules gdn`` of Megatron's dev: the input alone is kept.
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

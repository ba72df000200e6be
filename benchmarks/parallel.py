"""The layer under context parallelism: megatron-core's, ours in both schemes, and the
bare wire.

    torchrun --nproc-per-node 4 benchmarks/run.py parallel --out results.jsonl

Every rank is a context-parallel rank. All layers hold the same weights and read the
same tokens; ``off`` is how far a layer's output lies from megatron-core's, as a share
of its size (both are bf16). ``wire`` is the head exchange's bytes through bare
``all_to_all_single`` calls. Of several layers in a row (``in_a_row``) the host's times
are of one, all other times of the row.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lib.calls import with_backward
from lib.cases import Case
from lib.layers import (
    Layer,
    Sizes,
    build,
    config_of,
    row_of,
    thd,
    through,
)
from lib.measure import (
    captured,
    host_ms,
    memory_mib,
    slowest,
    time_ms,
    time_of,
)
from lib.model import DEVICE
from lib.session import Session

from megatron_gdn import GDNDims, SequenceLayout
from megatron_gdn.context_parallel import local_indices

ROUNDS = 7


def start_ranks() -> tuple[int, int]:
    """Megatron over the ranks of torchrun, all context parallel: this rank, and how
    many there are."""
    # how torchrun ends a rank: says where it is
    faulthandler.register(signal.SIGTERM, chain=True)
    from megatron.core import parallel_state, tensor_parallel

    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        device = torch.device("cuda", torch.cuda.current_device())
        dist.init_process_group("nccl", device_id=device)
    else:
        from megatron_gdn.compat.one_process import run_megatron_on_cpu

        run_megatron_on_cpu()
        dist.init_process_group("gloo")
    cp = dist.get_world_size()
    parallel_state.initialize_model_parallel(context_parallel_size=cp)
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    return dist.get_rank(), cp


def schemes(session: Session) -> None:
    rank, cp = start_ranks()
    session.writes = rank == 0
    session.row["cp"] = cp
    for case in session.cases(multiple=2 * cp):
        sizes = session.sizes(case)
        steps = schemes_of_case(session, case, sizes, rank, cp)
        if DEVICE == "cuda":
            host_of(session, case, steps)
            in_rounds(session, case, steps)
            wire = bare_exchange(dims_of(sizes), cp, case.tokens)
            times = times_of(session, partial(wire, False), partial(wire, True))
            session.emit({"case": case.name, "layer": "wire", **times})
    dist.destroy_process_group()


def schemes_of_case(
    session: Session, case: Case, sizes: Sizes, rank: int, cp: int
) -> dict[str, Callable[[], None]]:
    """Measures every layer; returns the forward and backward of each."""
    layout = SequenceLayout(session.row["layout"])
    torch.manual_seed(1)
    whole = torch.randn(case.tokens, 1, sizes.hidden, dtype=torch.bfloat16)
    mine = local_indices(case.lengths or (case.tokens,), cp, rank, layout)
    x = whole[mine].to(DEVICE).requires_grad_()
    truth = None
    weights: dict[str, Any] = {}
    steps = {}
    for layer in session.layers():
        row = row_of(
            partial(build_scheme, session, layer, sizes, cp), session.row["in_a_row"]
        )
        weights = weights or row.state_dict()
        row.load_state_dict(weights)
        run = partial(through, row, x, thd(case.offsets))
        both = with_backward(run, row, x)
        out = run().detach().float()
        truth = out if truth is None else truth
        record: dict[str, Any] = {"case": case.name, "layer": layer.name}
        record["off"] = ((out - truth).norm() / truth.norm()).item()
        both()
        if DEVICE == "cuda":
            record |= times_of(session, run, both)
            x.grad = None
            record |= memory_mib(run)
        session.emit(record)
        # documents cannot be captured
        if DEVICE == "cuda" and "graph" in session.measured and case.offsets is None:
            replays = [captured(call)[0].replay for call in (run, both)]
            graphs = times_of(session, *replays)
            session.emit({"case": case.name, "layer": f"{layer.name}, graph", **graphs})
        steps[layer.name] = both
        torch.cuda.empty_cache()
    return steps


def build_scheme(session: Session, layer: Layer, sizes: Sizes, cp: int) -> Any:
    if layer.whose == "ours":
        layer.options["cp_layout"] = session.row["layout"]
    return build(layer, sizes, session.row["core"], cp=cp, seed=2)


def times_of(session: Session, run: Callable, both: Callable) -> dict[str, Any]:
    """Of the slowest rank."""
    calls = {"forward": run, "forward_backward": both}
    return {
        name: slowest(time_ms(call, repeats=session.repeats))
        for name, call in calls.items()
    }


def host_of(session: Session, case: Case, steps: dict[str, Any]) -> None:
    """The host's time of every layer, in turns."""
    found = host_ms(list(steps.values()), in_a_row=session.row["in_a_row"])
    for name, times in zip(steps, found, strict=True):
        record = {"case": case.name, "layer": name}
        session.emit(record | {"host_forward_backward": slowest(times)})


def in_rounds(session: Session, case: Case, steps: dict[str, Any]) -> None:
    """Forward and backward of every layer in turns: the median, over the rounds, of
    its time beside the fastest of the round.

    A number over 1.1 for ``auto`` says that another mode is more than 10 % faster.
    """
    beside: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS):
        found = {
            name: slowest(time_of(both, repeats=3, warmup=1))["median"]
            for name, both in steps.items()
        }
        for name, ms in found.items():
            beside[name].append(ms / min(found.values()))
    for name, ratios in beside.items():
        record = {"beside_fastest": statistics.median(ratios)}
        session.emit({"case": case.name, "layer": name, **record})


def dims_of(sizes: Sizes) -> GDNDims:
    return GDNDims.from_config(config_of(Layer("wire"), sizes))


def bare_exchange(dims: GDNDims, cp: int, tokens: int) -> Callable[[bool], None]:
    """The bytes of both exchanges of a forward, or of a forward and backward, with
    nothing around them."""
    blocks = [
        torch.randn(cp, tokens // cp, width // cp, device=DEVICE).bfloat16()
        for width in (dims.layout.width, dims.v_dim)
    ]
    received = [torch.empty_like(x) for x in blocks]

    def exchange(backward: bool) -> None:
        for _ in range(2 if backward else 1):
            for source, target in zip(blocks, received, strict=True):
                dist.all_to_all_single(target, source)

    return exchange

"""One layer over a case: time, memory, errors, the floor, kernels, the host."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from lib.calls import (
    FURTHEST,
    Call,
    distances,
    exact_results,
    furthest,
    strictly,
    with_backward,
)
from lib.cases import Case
from lib.floor import floor_ms
from lib.layers import Layer, build, row_of, start_megatron, thd, through, tune_over
from lib.measure import host_ms, kernel_times, print_kernels, time_of
from lib.model import DEVICE
from lib.session import Session, release
from torch import Tensor


def call_of(session: Session, layer: Layer, case: Case, x: Tensor) -> Call:
    sizes = session.sizes(case)
    call = Call(layer, sizes, case, x, session.row.get("core", "auto"))
    if "configurations" in session.row:
        tune_over(session.row["configurations"])
    return call


def input_of(session: Session, case: Case) -> Tensor:
    torch.manual_seed(2)
    hidden = session.sizes(case).hidden
    x = torch.randn(case.tokens, case.batch, hidden, device=DEVICE)
    return x.bfloat16().requires_grad_()


def times(session: Session) -> None:
    """Every layer of every case; then the kernels of the first case."""
    start_megatron()
    cases = session.cases()
    layers = session.layers()
    for case in cases:
        times_of_case(session, case, layers)
    if DEVICE == "cuda" and session.args.kernels:
        for layer in layers:
            kernels_of(session, cases[0], layer)


def times_of_case(session: Session, case: Case, layers: list[Layer]) -> None:
    x = input_of(session, case)
    expected: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, Any] = {}

    def run(layer: Layer, names: dict[str, str]) -> None:
        call = call_of(session, layer, case, x)
        if session.row.get("equal_weights", True):
            state = weights or call.module.state_dict()
            call.module.load_state_dict(state, strict=False)
            weights.update(state)
        if session.args.compile_only:
            call.both()
            return
        with strictly(layer):
            made = measured(session, call, expected)
        session.emit(names | made)
        if layer.name == "ours" and "floor" in session.measured:
            floor = floor_of(session, call)
            session.emit({"case": case.name, "layer": "floor", **floor})

    for layer in layers:
        names = {"case": case.name, "layer": layer.name}
        if not session.late(f"{case.name} {layer.name}"):
            session.attempt(names, partial(run, layer, names))
            release()


def measured(
    session: Session, call: Call, expected: dict[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """A record of one layer; keeps results in ``expected`` for the layers after it."""
    name = call.layer.name
    if "exact" in session.measured:
        exact = exact_results(call, session.sizes(call.case))
        off = distances(call.results(passes=2), exact)
        return {**off, "furthest": furthest(off)}
    results: dict[str, Tensor] = {}
    if "errors" in session.measured:
        results = call.results()
    made = call.times(session.repeats)
    if "alone" in session.measured:
        made |= call.alone(session.repeats)
    if "graph" in session.measured:
        made |= call.graph(session.repeats)
    if DEVICE == "cuda" and "gpu" in session.measured:
        # what the GPU takes if the host is never late
        made["gpu"] = sum(us for _, _, us in kernel_times(call.both)) / 1e3
    for to, exact in expected.items():
        off = distances(results, exact)
        made[f"from {to}"] = off
        made["furthest"] = max(made.get("furthest", 0.0), furthest(off))
        made["correct"] = made.get("correct", True) and furthest(off) <= FURTHEST
    if results and (not expected or name == "ours"):
        expected[name] = results
    return made


def floor_of(session: Session, call: Call) -> dict[str, Any]:
    def milliseconds(run: Any) -> float:
        return time_of(run, session.repeats)["median"]

    sizes = session.sizes(call.case)
    found = floor_ms(call, sizes, session.bandwidth, milliseconds)
    forward, both = found["total"]
    return {"forward": forward, "forward_backward": both, "floor": found}


def kernels_of(session: Session, case: Case, layer: Layer) -> None:
    names = {"case": case.name, "layer": layer.name}
    if session.late(f"{case.name} kernels of {layer.name}"):
        return

    def run() -> Any:
        call = call_of(session, layer, case, input_of(session, case))
        return kernel_times(call.both)

    found = session.attempt(names, run)
    if found is not None:
        print_kernels(f"{case.name} {layer.name}", found, session.args.kernels)
        session.emit(names | {"kernels": found})


def host(session: Session) -> None:
    """What the host takes to issue a forward and backward behind a kernel that sleeps.

    The layers take turns. A backward through several layers (``in_a_row``) wakes
    autograd's thread once.
    """
    start_megatron()
    several = session.row["in_a_row"]
    core = session.row["core"]
    for case in session.cases():
        x = input_of(session, case)
        sizes = session.sizes(case)
        forwards = {}
        boths = {}
        for layer in session.layers():
            row = row_of(partial(build, layer, sizes, core, case.linears), several)
            forward = partial(through, row, x, thd(case.offsets))
            forwards[layer.name] = forward
            boths[layer.name] = with_backward(forward, row, x)
        of_forward = host_ms(list(forwards.values()), in_a_row=several)
        of_both = host_ms(list(boths.values()), in_a_row=several)
        for n, name in enumerate(boths):
            record = {
                "case": case.name,
                "layer": name,
                "host_forward": of_forward[n],
                "host_forward_backward": of_both[n],
            }
            session.emit(record)

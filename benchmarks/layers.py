"""One layer over a case: time, memory, errors, the floor, stages, kernels, the host."""

from __future__ import annotations

import cProfile
import pstats
from functools import partial
from typing import Any

import torch
from lib.calls import (
    FURTHEST,
    Call,
    as_asked,
    distances,
    exact_results,
    furthest,
    halves_of_in_proj,
)
from lib.cases import Case
from lib.floor import floor_ms
from lib.layers import (
    DEVICE,
    Layer,
    row_of,
    start_megatron,
    thd,
    through,
    tune_over,
)
from lib.layers import build as build_layer
from lib.measure import host_ms, print_kernels, table, time_of
from lib.session import Session, release
from torch import Tensor


def call_of(session: Session, layer: Layer, case: Case, x: Tensor) -> Call:
    sizes = session.sizes(case)
    backend = session.row.get("core", "auto")
    call = Call(layer, sizes, case, x, backend)
    if "configurations" in session.row:
        tune_over(session.row["configurations"])
    return call


def input_of(session: Session, case: Case) -> Tensor:
    torch.manual_seed(2)
    hidden = session.sizes(case).hidden
    x = torch.randn(case.tokens, case.batch, hidden, device=DEVICE)
    return x.bfloat16().requires_grad_()


def times(session: Session) -> None:
    """Every layer of every case; then what takes longer, of those of most interest."""
    start_megatron()
    cases = session.cases()
    layers = session.layers()
    for case in cases:
        times_of_case(session, case, layers)
    if "stages" in session.measured and not session.args.compile_only:
        for case in cases:
            stages_of_case(session, case, layers)
    if DEVICE == "cuda" and session.args.kernels:
        for layer in layers:
            kernels_of(session, cases[0], layer)


def times_of_case(session: Session, case: Case, layers: list[Layer]) -> None:
    x = input_of(session, case)
    expected: dict[str, dict[str, Tensor]] = {}
    weights: dict[str, Any] = {}
    for layer in layers:
        names = {"case": case.name, "layer": layer.name}
        if session.late(f"{case.name} {layer.name}"):
            continue

        def run(layer: Layer = layer, names: dict = names) -> None:
            call = call_of(session, layer, case, x)
            if session.row.get("equal_weights", True):
                call.module.load_state_dict(
                    weights or call.module.state_dict(), strict=False
                )
                if not weights:
                    weights.update(call.module.state_dict())
            if session.args.compile_only:
                call.both()
                return
            with as_asked(layer):
                made = measured(session, call, expected)
            session.emit(names | made)
            if layer.name == "ours" and "floor" in session.measured:
                floor = floor_of(session, call)
                session.emit({"case": case.name, "layer": "floor", **floor})

        session.attempt(names, run)
        release()


def measured(
    session: Session, call: Call, expected: dict[str, dict[str, Tensor]]
) -> dict[str, Any]:
    """A record of one layer; keeps results in ``expected`` for the layers after it."""
    name = call.layer.name
    made: dict[str, Any] = {}
    results: dict[str, Tensor] = {}
    if "errors" in session.measured:
        results = call.results()
    if "exact" in session.measured:
        found = call.results(passes=2)
        exact = exact_results(call, session.sizes(call.case))
        if "in_proj gates" in session.row.get("columns", []):
            found = halves_of_in_proj(call.module, found)
            exact = halves_of_in_proj(call.module, exact)
        off = distances(found, exact)
        return {**off, "furthest": furthest(off)}
    made |= call.times(session.repeats)
    if "alone" in session.measured:
        made |= call.alone(session.repeats)
    if "graph" in session.measured:
        made |= call.graph(session.repeats)
    if DEVICE == "cuda" and "gpu" in session.measured:
        # what the GPU takes if the host is never late
        made["gpu"] = sum(us for _, _, us in call.kernels()) / 1e3
    for to, exact in expected.items():
        off = distances(results, exact)
        made[f"from {to}"] = off
        made["furthest"] = max(made.get("furthest", 0.0), furthest(off))
        made["correct"] = made.get("correct", True) and furthest(off) <= FURTHEST
    if results and (not expected or name == "ours"):
        expected[name] = results
    return made


def floor_of(session: Session, call: Call) -> dict[str, Any]:
    sizes = session.sizes(call.case)

    def milliseconds(run: Any) -> float:
        return time_of(run, session.repeats)["median"]

    found = floor_ms(call, sizes, session.bandwidth(), milliseconds)
    forward, both = found["total"]
    return {"forward": forward, "forward_backward": both, "floor": found}


def stages_of_case(session: Session, case: Case, layers: list[Layer]) -> None:
    """A row for each stage, a column for each layer."""
    x = input_of(session, case)
    found = {}
    for layer in layers:
        what = f"{case.name} stages of {layer.name}"
        if layer.whose == "fla" or layer.few or session.late(what):
            continue
        names = {"case": case.name, "layer": layer.name}

        def run(layer: Layer = layer) -> Any:
            return call_of(session, layer, case, x).stages(session.repeats)

        stages = session.attempt(names, run)
        if stages is not None:
            found[layer.name] = stages
            session.emit(names | {"stages": stages})
    rows = [["ms, forward / backward", *found]]
    for name in dict.fromkeys(name for stages in found.values() for name in stages):
        cells = []
        for stages in found.values():
            pair = stages.get(name)
            cells.append("" if pair is None else f"{pair[0]:.3f} / {pair[1]:.3f}")
        rows.append([name, *cells])
    session.say(f"\n{case.name}, each stage alone\n{table(rows)}\n")


def kernels_of(session: Session, case: Case, layer: Layer) -> None:
    names = {"case": case.name, "layer": layer.name}
    if session.late(f"{case.name} kernels of {layer.name}"):
        return

    def run() -> Any:
        return call_of(session, layer, case, input_of(session, case)).kernels()

    found = session.attempt(names, run)
    if found is not None:
        print_kernels(f"{case.name} {layer.name}", found, session.args.kernels)
        session.emit(names | {"kernels": found})


def host(session: Session) -> None:
    """What the host takes to issue a forward and backward behind a kernel that sleeps.

    The layers take turns. A backward through several layers (``in_a_row``) wakes
    autograd's thread once. ``host_in_one_thread`` has the backward in the calling
    thread: what it is less by goes into autograd's own thread. ``profile``: print so
    many functions in which the time goes, in the calling thread.
    """
    start_megatron()
    several = session.row["in_a_row"]
    for case in session.cases():
        x = input_of(session, case)
        packed = thd(case.offsets)
        forwards = {}
        boths = {}
        for layer in session.layers():
            build = partial(
                build_layer,
                layer,
                session.sizes(case),
                session.row["core"],
                case.linears,
            )
            row = row_of(build, several)
            forward = partial(through, row, x, packed)
            forwards[layer.name] = forward
            boths[layer.name] = with_backward(forward, row, x)
        of_forward = host_ms(list(forwards.values()), in_a_row=several)
        of_both = host_ms(list(boths.values()), in_a_row=several)
        with torch.autograd.set_multithreading_enabled(False):
            alone = host_ms(list(boths.values()), in_a_row=several)
        found = zip(boths, of_forward, of_both, alone, strict=True)
        for name, forward_ms, both_ms, alone_ms in found:
            record = {
                "case": case.name,
                "layer": name,
                "host_forward": forward_ms,
                "host_forward_backward": both_ms,
                "host_in_one_thread": alone_ms,
            }
            session.emit(record)
        if session.row["profile"]:
            for name, both in boths.items():
                print_profile(f"{case.name} {name}", both, session.row["profile"])


def with_backward(run: Any, module: torch.nn.Module, x: Tensor) -> Any:
    grad = torch.randn_like(run())
    parameters = list(module.parameters())

    def both() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        run().backward(grad)

    return both


def print_profile(of: str, run: Any, functions: int, calls: int = 20) -> None:
    """The functions that take the most of ``calls`` calls, by their own time."""
    with torch.autograd.set_multithreading_enabled(False):
        profile = cProfile.Profile()
        profile.enable()
        for _ in range(calls):
            run()
        profile.disable()
        if DEVICE == "cuda":
            torch.cuda.synchronize()
    print(f"\n{of}, {calls} calls with the backward in the calling thread:")
    for order in ("tottime", "cumulative"):
        pstats.Stats(profile).sort_stats(order).print_stats(functions)

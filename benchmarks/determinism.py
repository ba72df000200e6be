"""Do a layer's bits hold: in hundreds of runs in two processes, and beside any
neighbours.

"flash_qla" and "reference" run in deterministic mode and under torch's own switch,
which raises at an op without a fixed order; "fla" runs as outside of it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lib.calls import as_asked
from lib.cases import Case
from lib.invariance import check_batch_invariance
from lib.layers import DEVICE, Layer, Sizes, build, start_megatron, thd
from lib.processes import compare_processes, in_processes
from lib.repeats import Report, check_repeats, forward_backward
from lib.session import Session
from torch import Tensor

from megatron_gdn.ops.mixer import mix


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=DEVICE).bfloat16()


def repeats(session: Session) -> None:
    """Forward and backward again and again, over poisoned memory and beside a competing
    stream, in processes that share the GPU."""
    todo = []
    for layer in session.layers():
        for case in session.cases():
            count = session.row["slow_repeats"] if layer.few else session.repeats
            todo.append((layer, session.sizes(case), case, count))
    processes = session.row["processes"]
    by_process = in_processes(
        repeats_in_one_process, todo, session.left(), processes=processes
    )
    for index, (layer, sizes, case, _) in enumerate(todo):
        reports = [found[index] for found in by_process if index in found]
        names = {"case": case.name, "layer": layer.name, "ratio": ratio_of(sizes)}
        if len(reports) < processes:
            session.say(f"{names}: out of time")
            continue
        verdict = "not compared"
        if len(reports) > 1:
            verdict = compare_processes(reports) or "equal"
        record = {
            "processes": processes,
            "repeats": sum(report.repeats for report in reports),
            "verdict": verdict,
            "digests": reports[0].digests,
            "seconds": reports[0].seconds,
        }
        session.emit(names | record)


def ratio_of(sizes: Sizes) -> int:
    """Value heads per key head."""
    return sizes.heads[1] // sizes.heads[0]


def repeats_in_one_process(
    index: int, todo: list[tuple[Layer, Sizes, Case, int]], seconds: float
) -> dict[int, Report]:
    """Reports by the number of the task; runs in a process of its own."""
    began = time.monotonic()
    start_megatron()
    reports = {}
    for number, (layer, sizes, case, count) in enumerate(todo):
        if time.monotonic() - began > seconds:
            continue
        module = build(layer, sizes, seed=0)
        run = forward_backward(
            module,
            normal(case.tokens, 1, sizes.hidden, seed=1),
            normal(case.tokens, 1, sizes.hidden, seed=2),
            attention_mask=None,
            packed_seq_params=thd(case.offsets),
        )
        with as_asked(layer):
            reports[number] = check_repeats(run, count)
        if index == 0:
            report = reports[number]
            print(f"{layer.name} {case.name}: {report}, {report.seconds:.1f} s")
        del module, run
    return reports


def neighbours(session: Session) -> None:
    """The longest odd document alone, beside the others and elsewhere in the buffer,
    through the layer and through the mixer alone."""
    start_megatron()
    for layer in session.layers():
        for case in session.cases():
            order = sorted(case.lengths or (), reverse=True)
            lengths = [order[1], *(n for i, n in enumerate(order) if i != 1)]
            sizes = session.sizes(case)
            module: Any = build(layer, sizes, seed=0)
            names = {"case": case.name, "layer": layer.name, "ratio": ratio_of(sizes)}
            for part in ("layer", "mixer"):
                run, width, d_width = runs_of(module, sizes)[part]
                xs = [normal(n, 1, width, seed=n) for n in lengths]
                ds = [normal(n, 1, d_width, seed=n + 1) for n in lengths]
                found = check_batch_invariance(run, xs, ds)
                differs = [str(difference) for difference in found]
                record = {"through": part, "lengths": lengths, "differs": differs}
                session.emit(names | record)


def runs_of(module: Any, sizes: Sizes) -> dict[str, tuple[Any, int, int]]:
    """A run over packed rows, and the widths of its rows and of its output's."""

    def through_layer(x: Tensor, offsets: list[int], d_out: Tensor) -> dict:
        run = forward_backward(
            module, x, d_out, attention_mask=None, packed_seq_params=thd(offsets)
        )
        found = run()
        return {"output": found["output"], "dx": found["dx"]}

    def through_mixer(x: Tensor, offsets: list[int], d_out: Tensor) -> dict:
        proj = x.detach().requires_grad_()
        batch = module.micro_batches.of(thd(offsets), proj)
        out = mix(proj, module.stages(proj, batch), batch.passage.sequence_context)
        (d_proj,) = torch.autograd.grad(out, proj, d_out)
        return {"output": out, "dproj": d_proj}

    return {
        "layer": (through_layer, sizes.hidden, sizes.hidden),
        "mixer": (through_mixer, module.in_proj_dim, module.v_dim),
    }

"""Do a layer's bits hold: in hundreds of runs in two processes, and beside any
neighbours.

"flash_qla" and "reference" run in deterministic mode and under torch's own switch,
which raises at an op without a fixed order; "fla" runs as outside of it.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from lib.calls import strictly
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


def names_of(case: Case, layer: Layer, sizes: Sizes) -> dict[str, Any]:
    ratio = sizes.heads[1] // sizes.heads[0]
    return {"case": case.name, "layer": layer.name, "ratio": ratio}


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
        names = names_of(case, layer, sizes)
        if len(reports) < processes:
            session.say(f"{names}: out of time")
            continue
        record = {
            "processes": processes,
            "repeats": sum(report.repeats for report in reports),
            "verdict": compare_processes(reports) or "equal",
            "digests": reports[0].digests,
        }
        session.emit(names | record)


def repeats_in_one_process(
    index: int, todo: list[tuple[Layer, Sizes, Case, int]], seconds: float
) -> dict[int, Report]:
    """Reports by the number of the task; runs in a process of its own."""
    began = time.monotonic()
    start_megatron()
    reports = {}
    for number, (layer, sizes, case, count) in enumerate(todo):
        if time.monotonic() - began > seconds:
            break
        run = forward_backward(
            build(layer, sizes, seed=0),
            normal(case.tokens, 1, sizes.hidden, seed=1),
            normal(case.tokens, 1, sizes.hidden, seed=2),
            attention_mask=None,
            packed_seq_params=thd(case.offsets),
        )
        with strictly(layer):
            reports[number] = check_repeats(run, count)
        if index == 0:
            print(f"{layer.name} {case.name}: {reports[number]}", flush=True)
        del run
    return reports


def neighbours(session: Session) -> None:
    """The longest odd document alone, beside the others and elsewhere in the buffer,
    through the layer and through the mixer alone."""
    start_megatron()
    for layer in session.layers():
        for case in session.cases():
            longest, watched, *others = sorted(case.lengths or (), reverse=True)
            lengths = [watched, longest, *others]
            sizes = session.sizes(case)
            module: Any = build(layer, sizes, seed=0)
            for part, (run, width, d_width) in runs_of(module, sizes).items():
                xs = [normal(n, 1, width, seed=n) for n in lengths]
                ds = [normal(n, 1, d_width, seed=n + 1) for n in lengths]
                found = check_batch_invariance(run, xs, ds)
                differs = [str(difference) for difference in found]
                record = {"through": part, "lengths": lengths, "differs": differs}
                session.emit(names_of(case, layer, sizes) | record)


def runs_of(module: Any, sizes: Sizes) -> dict[str, tuple[Any, int, int]]:
    """A run over packed rows, and the widths of its rows and of its output's."""

    def through_layer(x: Tensor, offsets: list[int], d_out: Tensor) -> dict:
        x = x.detach().requires_grad_()
        out = module(x, None, packed_seq_params=thd(offsets))[0]
        return {"output": out, "dx": torch.autograd.grad(out, x, d_out)[0]}

    def through_mixer(x: Tensor, offsets: list[int], d_out: Tensor) -> dict:
        proj = x.detach().requires_grad_()
        batch = module.micro_batches.of(thd(offsets), proj)
        out = mix(proj, module.stages(proj, batch), batch.passage.sequence_context)
        return {"output": out, "dproj": torch.autograd.grad(out, proj, d_out)[0]}

    return {
        "layer": (through_layer, sizes.hidden, sizes.hidden),
        "mixer": (through_mixer, module.in_proj_dim, module.v_dim),
    }

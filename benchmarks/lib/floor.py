"""The floor under a layer: its projections alone, its rule alone, and the bytes around
them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megatron_gdn.ops.readout.base import SplitReadout

from .calls import Call, with_backward
from .layers import Sizes

# Of a call, in milliseconds.
Milliseconds = Callable[[Callable[[], object]], float]


def floor_ms(
    call: Call, sizes: Sizes, bandwidth: float, milliseconds: Milliseconds
) -> dict[str, list[float]]:
    """Each part and their sum: ``[forward, forward and backward]`` in milliseconds.

    Args:
        call: our layer, Gated DeltaNet or Mamba2.
        bandwidth: bytes per second of a copy, read and written.
    """
    module = call.module
    rows = module.in_proj(call.x)[0].detach()
    rule, mixed = rule_alone(call, rows)
    projections = [0.0, 0.0]
    for linear, given in ((module.in_proj, call.x), (module.out_proj, mixed)):
        x = given.detach().requires_grad_()
        forward = lambda linear=linear, x=x: linear(x)[0]  # noqa: E731
        projections[0] += milliseconds(forward)
        projections[1] += milliseconds(with_backward(forward, linear, x))
    of_rule = [milliseconds(lambda: rule(False)), milliseconds(lambda: rule(True))]

    G, H, K, V = sizes.of_heads
    C = module.dims.layout.conv_width
    gradients = C
    if sizes.mixer == "gdn":
        group = H // G if module.rule.name == "flash_qla" else 1
        gradients = 2 * G * group * K + H * V
    forward_bytes = 2 * 2 * C + 3 * 2 * H * V + 12 * H
    backward_bytes = 2 * (2 * C + gradients) + 5 * 2 * H * V + 16 * H
    tokens = call.case.tokens * call.case.batch
    moved = [forward_bytes, forward_bytes + backward_bytes]
    parts = {
        "projections": projections,
        "rule": of_rule,
        "bytes": [tokens * of_token / bandwidth * 1e3 for of_token in moved],
    }
    return parts | {"total": [sum(each) for each in zip(*parts.values(), strict=True)]}


@torch.no_grad()
def rule_alone(call: Call, rows: Tensor) -> tuple[Callable[[bool], Any], Tensor]:
    """The rule, with its backward or without, called as ``ops/mixer.py`` calls it, and
    the rows of out_proj."""
    batch = call.module.micro_batches.of(call.packed, rows)
    context = batch.passage.sequence_context
    stages = call.module.stages(rows, batch)
    rule = stages.rule
    readout = stages.readout
    if isinstance(readout, SplitReadout):
        readout = readout.first_step
    *of_front, gamma = stages.parameters
    inputs = stages.front.forward(rows, of_front, context.documents)
    o, _, _ = rule.begin(inputs, context.rule_documents).run()
    mixed = readout.forward(o, rows, gamma)
    d_o = torch.randn_like(o, dtype=rows.dtype)
    read = inputs._asdict()
    for name in read.keys() - set(rule.backward_reads):
        read[name] = None
    kept = type(inputs)(**read)

    def run(backward: bool) -> None:
        saved = rule.begin(inputs, context.rule_documents).run().saved
        if backward:
            rule.begin_backward(d_o, kept, saved, context.rule_documents).run()

    return run, mixed

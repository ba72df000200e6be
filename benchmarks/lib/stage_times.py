"""The time of each projection and of each stage of a layer, run alone.

Legend: S seq, B batch, D hidden, P columns of a projection row, R columns of a linear's
input.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from megatron_gdn.mixers.base import RecurrentMixer
from megatron_gdn.ops.readout.base import SplitReadout

from .rules import begin_backward

# Calls a function several times; returns the milliseconds of one call.
Milliseconds = Callable[[Callable[[], object]], float]
Context = Callable[[], AbstractContextManager[Any]]
# [forward, backward] in milliseconds
Times = dict[str, list[float]]


def stage_times(
    layer: nn.Module,
    x_SBD: Tensor,
    packed: Any,
    milliseconds: Milliseconds,
    context: Context = nullcontext,
) -> Times:
    """Milliseconds of the projections of ``layer``, and of the stages of one of our
    mixers.

    Args:
        packed: Megatron's description of the documents, or None.
        context: makes the context of a forward, such as Megatron's for FP8.
    """
    found = {}
    linear: Any
    for name, linear in layer.named_children():
        if not name.endswith("_proj"):
            continue
        columns = linear.weight.shape[1]
        given_SBR = torch.randn(
            *x_SBD.shape[:2], columns, device=x_SBD.device, dtype=x_SBD.dtype
        )
        call = lambda x, linear=linear: linear(x)[0]  # noqa: E731
        found[name] = _of_call(call, linear, given_SBR, milliseconds, context)
    if isinstance(layer, RecurrentMixer):
        # Rows, and the gates that come beside them; their gradients come together too.
        together = lambda x: Joined.apply(*layer.project_apart(x))  # noqa: E731
        found["all before the front"] = _of_call(
            together, layer, x_SBD.detach().clone(), milliseconds, context
        )
        with torch.no_grad(), context():
            rows_SBP, gates = layer.project_apart(x_SBD)
        found |= _of_stages(layer, rows_SBP, gates, packed, milliseconds)
    return found


def _of_call(
    call: Callable[[Tensor], Tensor],
    module: nn.Module,
    x: Tensor,
    milliseconds: Milliseconds,
    context: Context,
) -> list[float]:
    """The forward of ``call``, a part of ``module``, and its backward."""
    x.requires_grad_()

    def forward() -> Tensor:
        with context():
            return call(x)

    grad = torch.randn_like(forward())

    def both() -> None:
        x.grad = None
        module.zero_grad(set_to_none=True)
        forward().backward(grad)

    first = milliseconds(forward)
    return [first, milliseconds(both) - first]


class Joined(torch.autograd.Function):
    """The first of two tensors, of which both get gradients, without a copy."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, gates: Tensor | None) -> Tensor:
        ctx.gates = None if gates is None else torch.ones_like(gates)
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, d_rows: Tensor) -> tuple[Tensor, Tensor | None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return d_rows, ctx.gates


@torch.no_grad()
def _of_stages(
    layer: RecurrentMixer,
    rows_SBP: Tensor,
    gates: Tensor | None,
    packed: Any,
    milliseconds: Milliseconds,
) -> Times:
    """Front, rule and readout, called as ``ops/mixer.py`` calls them."""
    batch = layer.micro_batches.of(packed, rows_SBP)
    sequence_context = batch.passage.sequence_context
    documents = sequence_context.documents
    of_rule = sequence_context.rule_documents
    stages = layer.stages(rows_SBP, batch, gates)
    front = stages.front
    rule = stages.rule
    readout = stages.readout
    if isinstance(readout, SplitReadout):
        readout = readout.inside
    *of_front, gamma = stages.parameters

    inputs = front.forward(rows_SBP, of_front, documents)
    o, _, saved = rule.begin(inputs, of_rule).run()
    mixed = readout.forward(o, rows_SBP, gamma)
    d_mixed = torch.randn_like(mixed)
    d_rows = torch.empty_like(rows_SBP)
    d_o, _ = readout.backward(d_mixed, o, rows_SBP, gamma, d_rows)

    def rule_backward() -> Any:
        return begin_backward(rule, inputs, d_o.clone(), saved, of_rule).run()

    grads = rule_backward()
    pairs = {
        "front (conv, norms, gates)": (
            lambda: front.forward(rows_SBP, of_front, documents),
            lambda: front.backward(rows_SBP, of_front, grads, d_rows, documents),
        ),
        "rule": (lambda: rule.begin(inputs, of_rule).run(), rule_backward),
        "readout (norm, gate)": (
            lambda: readout.forward(o, rows_SBP, gamma),
            lambda: readout.backward(d_mixed, o, rows_SBP, gamma, d_rows),
        ),
    }
    found = {
        name: [milliseconds(forward), milliseconds(backward)]
        for name, (forward, backward) in pairs.items()
    }
    if front.recomputed:
        again = milliseconds(
            lambda: front.forward(rows_SBP, of_front, documents, front.recomputed)
        )
        found[f"{', '.join(front.recomputed)} computed again"] = [0.0, again]
    return found

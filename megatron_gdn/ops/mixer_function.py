"""The autograd function of a mixer, between its projections.

Legend: S seq, B batch, P projection width, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from .first_derivative import first_derivative_only
from .front.base import Front
from .hand_over import HandOver
from .recompute import RefilledOutput
from .rule import Saved
from .unfilled import leaves_memory_unfilled

if TYPE_CHECKING:
    from .mixer import Plan


class Call(NamedTuple):
    """One run of a mixer, beside its tensors."""

    plan: Plan
    front: Front
    eps: float | None  # of the output norm; None: no norm here
    zero_centered: bool
    keep: bool  # for a backward
    refilled: RefilledOutput | None
    hand_over: HandOver | None = None  # of the gradient of the output


class _Kept(NamedTuple):
    """What the backward needs beside the saved tensors."""

    call: Call
    rule_plan: Any
    stamp: Tensor | None  # of the documents
    parameters: int  # how many of the saved tensors
    linked: int  # likewise: what a state link kept


class MixerFunction(torch.autograd.Function):
    """Projection rows ``[S, B, P]`` to ``[S, B, H V]``; without a norm, to o and z."""

    @staticmethod
    @leaves_memory_unfilled
    def forward(ctx, call: Call, proj: Tensor, gamma: Tensor | None, *parameters: Tensor | None):
        out, saved, ctx.kept = _forward(call, proj, gamma, parameters)
        if call.keep:
            ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @first_derivative_only
    @leaves_memory_unfilled
    def backward(ctx, d_out: Tensor, d_z: Tensor | None = None):
        saved, hand_over = list(ctx.saved_tensors), ctx.kept.call.hand_over
        # From here on each tensor lives as long as it is read, if no second backward will come.
        ctx.maybe_clear_saved_tensors()
        gradient = [d_out if hand_over is None else hand_over.take(d_out)]
        del d_out
        return None, *_backward(ctx.kept, saved, gradient, d_z)


def _forward(
    call: Call, proj: Tensor, gamma: Tensor | None, parameters: Sequence[Tensor | None]
) -> tuple[Any, Sequence[Tensor | None], _Kept | None]:
    """The mixer's output, and what its backward needs if there will be one."""
    plan, front, eps, zero_centered, keep, refilled, _ = call
    rule, neighbours, norm = plan.rule, plan.neighbours, plan.norm_kernels
    inputs = front.forward(proj, parameters, neighbours.documents)
    begun = rule.begin(inputs, neighbours.of_rule)
    initial, linked = None, ()
    if neighbours.states is not None:
        initial, linked = neighbours.states.entering(rule, begun, inputs)
    o, _, of_rule = begun.run(initial, keep=keep)
    del begun
    saved, kept = (), None
    if keep:
        read = [x if save else None for save, x in zip(plan.saved, inputs, strict=True)]
        with_norm = None if eps is None else o
        stamp = None if neighbours.documents is None else neighbours.documents.stamp
        saved = (stamp, proj, gamma, with_norm, *parameters, *read, *linked, *of_rule.tensors)
        kept = _Kept(call, of_rule.plan, stamp, len(parameters), len(linked))
    if eps is None:
        z = proj[..., plan.z]
        return (
            (o.to(proj.dtype), z.unflatten(-1, (plan.heads, -1)).transpose(0, 1)), saved, kept
        )  # fmt: skip
    mixed = norm.gated_norm_forward(o, proj, gamma, plan.z, eps=eps, zero_centered=zero_centered)
    if refilled is not None:

        def refill(out: Tensor) -> None:
            norm.gated_norm_forward(
                o, proj, gamma, plan.z, eps=eps, zero_centered=zero_centered, out=out
            )

        refilled.remember(mixed, refill)
    return mixed, saved, kept


def _backward(
    kept: _Kept, saved: list[Any], gradient: list[Tensor], d_z: Tensor | None
) -> tuple[Any, ...]:
    """The gradients of proj, gamma and the parameters.

    Args:
        saved, gradient: the saved tensors, and the gradient of the output. Both lists are emptied:
            no other reference keeps a tensor alive that was read for the last time.
        d_z: of the output z, where there is no norm.
    """
    plan, front, eps, zero_centered, *_ = kept.call
    rule, neighbours = plan.rule, plan.neighbours
    stamp, proj, gamma, o = saved[:4]
    if neighbours.documents is not None and kept.stamp is not None:
        neighbours.documents.require_unchanged(kept.stamp, stamp)
    a = 4 + kept.parameters
    b = a + len(front.names)
    c = b + kept.linked
    parameters, read, linked = saved[4:a], saved[a:b], tuple(saved[b:c])
    of_rule = Saved(tuple(saved[c:]), kept.rule_plan)
    saved.clear()
    d_proj = proj.new_empty(proj.shape)
    d_gamma = None
    if eps is None:
        z_rows = d_proj[..., plan.z]
        if d_z is None:
            z_rows.zero_()
        else:
            z_rows.copy_(d_z.transpose(0, 1).flatten(2))
        d_o = gradient.pop().contiguous()
    else:
        d_o, d_gamma = plan.norm_kernels.gated_norm_backward(
            gradient.pop(), o, proj, gamma, plan.z, d_proj, eps=eps, zero_centered=zero_centered
        )
    del d_z, o
    gradient.append(d_o)
    del d_o
    made = front.forward(proj, parameters, neighbours.documents, plan.again)
    inputs = type(made)(*[x if y is None else y for x, y in zip(read, made, strict=True)])
    del made, read
    # No reference stays here, so that a rule which makes another form of d_o can free this one.
    begun = rule.begin_backward(gradient.pop(), inputs, of_rule, neighbours.of_rule)
    del inputs, of_rule
    initial = d_final = None
    if neighbours.states is not None:
        initial, d_final = neighbours.states.leaving(begun, linked)
    grads = begun.run(initial, d_final)
    del begun
    of_parameters = front.backward(proj, parameters, grads, d_proj, neighbours.documents)
    return d_proj, d_gamma, *of_parameters

"""A recurrent mixer as one autograd function: projection rows in, mixed rows out.

    inputs = front(rows)            conv, activation, norms, gates: one kernel over strided rows
    o      = rule(inputs)           the recurrence
    mixed  = readout(o, rows)       norm and gate: one kernel, written as [S, B, H V]

It is one function so that it saves only what the backward reads, and so that every gradient of the
projection is written once, into its columns of one buffer. :class:`.neighbours.Neighbours` gives
the history of the front and the initial state of the rule.

Legend: S seq, B batch, P projection width, H heads with a state, V columns of a state.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .aligned import AlignedFront, AlignedReadout
from .front.history import ContinuedFront
from .hand_over import HandOver
from .mixer_function import Call, MixerFunction
from .neighbours import ALONE, Neighbours
from .no_tokens import mix_no_tokens
from .parts import Parts
from .readout.base import Apart
from .recompute import RefilledOutput
from .rules.by_level import RuleByLevel
from .second_run import SecondRun
from .trees import TreeDocuments


def mix(
    rows: Tensor,
    parts: Parts,
    neighbours: Neighbours = ALONE,
    refilled: RefilledOutput | None = None,
) -> Tensor:
    """Everything between in_proj and out_proj, for the heads one rank holds.

    Args:
        rows: ``[S, B, P]`` in the front's layout; any strides of S and B.
        neighbours: boundaries, history and states.
        refilled: lets the reader of the result free it until the backward, see
            :class:`RefilledOutput`.

    Returns:
        ``[S, B, H * V]``, ready for out_proj. If the readout is an :class:`Apart` with ``closed``,
        its ``call`` is still to be made, once all heads are together.
    """
    front, rule, readout, parameters, run_again = parts
    apart, inside = None, readout
    if isinstance(inside, Apart):
        apart, inside = inside, inside.inside
    if parts.aligned:
        front = AlignedFront(front)
        inside = AlignedReadout(inside, neighbours.documents) if inside.reads_o else inside
    if rows.numel():
        if isinstance(neighbours.documents, TreeDocuments):
            rule, history = RuleByLevel(rule), neighbours.documents.history(parts.past)
            neighbours = replace(neighbours, history=history)
        if neighbours.history is not None:
            front = ContinuedFront(front, neighbours.history)
        keep = torch.is_grad_enabled() and (rows.requires_grad or _any_wanted(parameters))
        hand_over = HandOver() if keep else None
        of_function = refilled if apart is None else None
        second_run = SecondRun(front, rule, neighbours) if keep and run_again else None
        call = Call(front, rule, inside, neighbours, keep, of_function, hand_over, second_run)
        mixed = MixerFunction.apply(call, rows, *parameters)
        mixed = mixed if hand_over is None else hand_over.behind(mixed)
    else:  # the other ranks that share the sequences have no rows either: no rank waits for any
        width = inside.gate.stop - inside.gate.start
        mixed = mix_no_tokens(rows, *parameters, width=width)
    if apart is None or apart.closed:
        return mixed
    if refilled is None:
        return apart.call(mixed, rows)
    return _called_again(apart, mixed, rows, refilled)


def _any_wanted(parameters: tuple[Tensor | None, ...]) -> bool:
    """Whether any of them needs a gradient."""
    return any(x is not None and x.requires_grad for x in parameters)


def _called_again(apart: Apart, mixed: Tensor, rows: Tensor, refilled: RefilledOutput) -> Tensor:
    """``apart.call``, with its output and its intermediates dropped: it runs three times in all.

    This is not Megatron's checkpoint, which compiles a C++ extension in the first backward.
    """
    made = checkpoint(apart.call, mixed, rows, use_reentrant=False, preserve_rng_state=False)
    assert isinstance(made, Tensor)
    mixed, rows = mixed.detach(), rows.detach()

    def refill(out: Tensor) -> None:
        out.copy_(apart.call(mixed, rows))

    refilled.remember(made, refill)
    return made

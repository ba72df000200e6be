"""A recurrent mixer as one autograd function: projection rows in, mixed rows out.

    inputs = front(rows)       conv, activation, norms, gates: one kernel over strided
                               rows
    o      = rule(inputs)      the recurrence
    mixed  = readout(o, rows)  norm and gate: one kernel, written as [S, B, H V]

The autograd function saves only tensors that the backward reads. The backward writes
the gradients of all projection columns to one buffer. :class:`.stages.SequenceContext`
gives the front its history and the rule its initial state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from . import recompute
from .aligned import AlignedFront, AlignedReadout
from .autograd import first_derivative_only, output_without_tokens
from .front.history import History, HistoryTable
from .front.table import Front
from .obstacles import why_not_triton
from .readout.base import Readout, SplitReadout
from .recompute import HandOver, RefilledOutput, SecondRun
from .rules.base import Bits, Rule, Saved
from .stages import WHOLE_SEQUENCES, SequenceContext, Stages
from .switches import leaves_memory_unfilled
from .trees import RuleByLevel, TreeDocuments


def mix(
    rows: Tensor,
    stages: Stages,
    sequence_context: SequenceContext = WHOLE_SEQUENCES,
    refilled: RefilledOutput | None = None,
) -> Tensor:
    """Compute out_proj's input ``[S, B, H * V]`` from in_proj's output ``rows``, on one
    rank.

    ``sequence_context`` has the documents' boundaries, the history and the initial
    states. ``refilled`` frees out_proj's input until out_proj's backward. If the
    readout is a ``closed`` :class:`SplitReadout`, the caller must run its ``call``
    after the exchange of heads.
    """
    rule = stages.rule
    parameters = stages.parameters
    front = stages.front
    inside = stages.readout
    split_readout = None
    if isinstance(inside, SplitReadout):
        split_readout = inside
        inside = inside.inside
    if rule.bits is Bits.ON_GRID:
        front = cast(Front, AlignedFront(front))
        if inside.reads_o:
            inside = AlignedReadout(inside, sequence_context.documents)
    if rows.numel():
        if isinstance(sequence_context.documents, TreeDocuments):
            history = sequence_context.documents.history(stages.history_length)
            rule = rule.wrapped_by(RuleByLevel)
            sequence_context = replace(sequence_context, history=history)
        trained = [x for x in (rows, *parameters) if x is not None and x.requires_grad]
        keep = torch.is_grad_enabled() and bool(trained)
        S, B, _ = rows.shape
        out_bytes = S * B * front.layout.mixed_width * rows.element_size()
        hand_over = None
        if keep and out_bytes >= recompute.LEAST_BYTES:
            hand_over = HandOver()
        if split_readout is None:
            of_function = refilled
        else:
            of_function = None
        if keep and stages.recompute:
            second_run = SecondRun(front, rule, sequence_context)
        else:
            second_run = None
        call = MixerArguments(
            front,
            rule,
            inside,
            sequence_context,
            keep,
            of_function,
            hand_over,
            second_run,
        )
        mixed = MixerFunction.apply(call, rows, *parameters)
        if hand_over is not None:
            mixed = hand_over.store_gradient_of(mixed)
    else:  # no rank of the group has rows of these sequences, so no rank waits for another
        width = inside.gate.stop - inside.gate.start
        mixed = output_without_tokens(rows, *parameters, width=width)
    if split_readout is None or split_readout.closed:
        return mixed
    if refilled is None:
        return split_readout.call(mixed, rows)
    return _checkpoint_readout(split_readout, mixed, rows, refilled)


def _checkpoint_readout(
    split_readout: SplitReadout, mixed: Tensor, rows: Tensor, refilled: RefilledOutput
) -> Tensor:
    """Run ``split_readout.call`` on ``mixed [S, B, H V]``; keep neither output nor
    intermediates.

    ``call`` runs three times: here, when the output is refilled, and in ``call``'s
    backward. Megatron's checkpoint is not used, since it compiles a C++ extension in
    the first backward.
    """
    made = checkpoint(
        split_readout.call, mixed, rows, use_reentrant=False, preserve_rng_state=False
    )
    assert isinstance(made, Tensor)
    mixed = mixed.detach()
    rows = rows.detach()

    def refill(out: Tensor) -> None:
        out.copy_(split_readout.call(mixed, rows))

    refilled.remember(made, refill)
    return made


class MixerArguments(NamedTuple):
    """The arguments of a mixer's run that are not tensors, such as its front, rule and
    readout."""

    front: Front
    rule: Rule
    readout: Readout
    sequence_context: SequenceContext
    keep: bool  # whether tensors are kept for a backward
    refilled: RefilledOutput | None
    hand_over: HandOver | None  # lets the backward free the output's gradient early
    second_run: SecondRun | None  # None if front and rule run only once


class _SavedTensors(NamedTuple):
    """The tensors that autograd saves for the backward, which autograd keeps as one
    flat list."""

    # :attr:`Documents.stamp`, whose changes autograd and we notice
    stamp: Tensor | None
    rows: Tensor
    o: Any  # the rule's output, or None if the backward does not read it
    parameters: Sequence[Tensor | None]
    # of the rule; None where the backward computes it or does not read it
    inputs: Sequence[Tensor | None]
    linked: Sequence[Tensor]  # of ``sequence_context.states``
    of_rule: Sequence[Tensor | None]

    def flat(self) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """All tensors in the order of the fields, and the lengths of the four lists."""
        one_each = self[:3]
        lists = self[3:]
        flat = one_each + tuple(itertools.chain.from_iterable(lists))
        return flat, tuple(map(len, lists))

    @classmethod
    def of_flat(cls, flat: Sequence[Any], sizes: Sequence[int]) -> _SavedTensors:
        """The tensors of which :meth:`flat` made ``flat``, with lists of ``sizes``."""
        ends = list(itertools.accumulate(sizes, initial=3))
        lists = [flat[start:end] for start, end in itertools.pairwise(ends)]
        stamp, rows, o = flat[:3]
        parameters, inputs, linked, of_rule = lists
        return cls(stamp, rows, o, parameters, inputs, linked, of_rule)


class _BackwardValues(NamedTuple):
    """Values that the backward needs besides the tensors that autograd saves."""

    call: MixerArguments
    rule_plan: object
    stamp: Tensor | None  # from :attr:`Documents.stamp`, the boundaries in the forward
    sizes: tuple[int, ...]  # of :class:`_SavedTensors`
    history: History | None


class MixerFunction(torch.autograd.Function):
    """Maps rows ``[S, B, P]`` to ``[S, B, H V]``; the last of ``parameters`` is gamma
    or None."""

    @staticmethod
    @leaves_memory_unfilled
    def forward(ctx, call: MixerArguments, rows: Tensor, *parameters: Tensor | None):
        out, saved, ctx.kept = _forward(call, rows, parameters)
        if call.keep:
            ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @first_derivative_only
    @leaves_memory_unfilled
    def backward(ctx, d_out: Tensor):
        """The gradients of ``rows`` and all parameters from ``d_out``, the output's
        gradient."""
        saved = list(ctx.saved_tensors)
        hand_over = ctx.kept.call.hand_over
        # From here on each saved tensor is freed after its last use, unless
        # retain_graph=True.
        ctx.maybe_clear_saved_tensors()
        gradient = [d_out if hand_over is None else hand_over.take(d_out)]
        del d_out
        return None, *_backward(ctx.kept, saved, gradient)


def _forward(
    call: MixerArguments, rows: Tensor, parameters: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor | None], _BackwardValues | None]:
    """The mixer's output, the tensors to save, and the other values for the
    backward."""
    front, rule, readout, sequence_context, keep, refilled, _, second_run = call
    of_front = parameters[:-1]
    gamma = parameters[-1]
    history = None
    if sequence_context.history is not None:
        history = sequence_context.history.fetch(rows[..., front.layout.conv_columns])
    inputs = front.forward(rows, of_front, sequence_context.documents, history=history)
    begun = rule.begin(inputs, sequence_context.rule_documents)
    initial = None
    linked = ()
    if sequence_context.states is not None:
        initial, linked = sequence_context.states.forward_states(rule, begun, inputs)
    o, _, of_rule = begun.run(initial, keep=keep)
    del begun
    saved = ()
    kept = None
    if keep:
        wanted = rule.backward_reads
        recomputed = front.recomputed
        of_readout = o if readout.reads_o else None
        if second_run is not None:
            wanted = ()
            of_readout = None
            of_rule = rule.kept_to_recompute(of_rule)
        named = zip(front.names, inputs, strict=True)
        read = [
            x if name in wanted and name not in recomputed else None
            for name, x in named
        ]
        if sequence_context.documents is None:
            stamp = None
        else:
            stamp = sequence_context.documents.stamp
        saved, sizes = _SavedTensors(
            stamp, rows, of_readout, parameters, read, linked, of_rule.tensors
        ).flat()
        kept = _BackwardValues(call, of_rule.plan, stamp, sizes, history)
        del read
    del inputs  # if nothing is kept for a backward, this frees the rule's inputs
    mixed = readout.forward(o, rows, gamma)
    if refilled is not None:
        output = o.detach  # returns o; with a second run, o is computed again
        if second_run is not None:
            arguments = rows, of_front, history, linked, of_rule
            output = lambda: second_run.compute_once(*arguments)[1]  # noqa: E731

        def refill(out: Tensor) -> None:
            readout.forward(output(), rows, gamma, out=out)

        refilled.remember(mixed, refill)
    return mixed, saved, kept


def _backward(
    values: _BackwardValues, saved: list[Tensor | None], gradient: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of rows and parameters; empties ``saved``, ``gradient`` to free
    tensors."""
    front = values.call.front
    rule = values.call.rule
    readout = values.call.readout
    sequence_context = values.call.sequence_context
    history = values.history
    stamp, rows, o, parameters, read, linked, of_rule = _SavedTensors.of_flat(
        saved, values.sizes
    )
    saved.clear()
    if (
        sequence_context.documents is not None
        and stamp is not None
        and values.stamp is not None
    ):
        sequence_context.documents.require_unchanged(values.stamp, stamp)
    of_front = parameters[:-1]
    gamma = parameters[-1]
    linked = tuple(linked)
    of_rule = Saved(tuple(of_rule), values.rule_plan)
    d_rows = rows.new_empty(rows.shape)
    inputs = None
    second_run = values.call.second_run
    if second_run is not None:
        inputs, o, of_rule = second_run.take(rows, of_front, history, linked, of_rule)
    d_o, d_gamma = readout.backward(gradient.pop(), o, rows, gamma, d_rows)
    del o
    gradient.append(d_o)
    del d_o
    if inputs is None:
        made = front.forward(
            rows, of_front, sequence_context.documents, front.recomputed, history
        )
        inputs = made._make(
            x if y is None else y for x, y in zip(read, made, strict=True)
        )
        del made
    del read
    # This function keeps no reference to d_o, so a rule that converts d_o can free the
    # original.
    begun = rule.begin_backward(
        gradient.pop(), inputs, of_rule, sequence_context.rule_documents
    )
    del inputs, of_rule
    initial = d_final = None
    if sequence_context.states is not None:
        initial, d_final = sequence_context.states.backward_states(begun, linked)
    grads = begun.run(initial, d_final)
    del begun
    if history is not None:
        history = history.with_gradient_buffer()
    of_parameters = front.backward(
        rows, of_front, grads, d_rows, sequence_context.documents, history
    )
    if sequence_context.history is not None and history is not None:
        assert history.d_rows is not None
        returned = sequence_context.history.give_back(history.d_rows)
        add_returned(d_rows[..., front.layout.conv_columns], returned, history.table)
    return d_rows, *of_parameters, d_gamma


def add_returned(d_conv_sBC: Tensor, returned: Tensor, table: HistoryTable) -> None:
    """Add ``returned``, gradients of rows read as history, to the rows' gradient
    ``d_conv_sBC``."""
    if not table.additions.numel():
        return
    if (
        why_not_triton(
            d_conv_sBC.device.type, d_conv_sBC.dtype, table.before.shape[1] + 1
        )
        is None
    ):
        from .front.history_kernels import add_rows

        add_rows(d_conv_sBC, returned, table.additions)
        return
    tokens = table.additions[:, 0]
    sources = table.additions[:, 1:]
    # index -1 (no source) selects these zeros
    nothing = returned.new_zeros((1,) + returned.shape[1:])
    further = torch.cat([returned, nothing])[sources.long()].sum(1)
    further = further.masked_fill((tokens < 0)[:, None, None], 0)
    whole = d_conv_sBC.to(returned.dtype).index_add(0, tokens.clamp(min=0), further)
    d_conv_sBC.copy_(whole)

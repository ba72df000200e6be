"""A recurrent mixer as one autograd function: projection rows in, mixed rows out.

    inputs = front(rows)       conv, activation, norms, gates: one kernel on a GPU
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
from functools import partial
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
from .recompute import GradientHandOver, RefilledOutput, SecondRun
from .rules.base import Bits, Rule, SavedForBackward
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

    Args:
        rows: ``[S, B, P]``.
        sequence_context: the documents' boundaries, the history and the initial states.
        refilled: frees the result after out_proj's forward, and fills it again before
            out_proj's backward; None: the result is kept.

    If the readout is a :class:`SplitReadout` with ``second_step_after_exchange``, the
    caller must run its ``second_step`` after the exchange of heads.
    """
    rule = stages.rule
    parameters = stages.parameters
    front = stages.front
    readout = stages.readout
    split_readout = None
    if isinstance(readout, SplitReadout):
        split_readout = readout
        readout = split_readout.first_step
    if rule.bits is Bits.ON_GRID:
        front = cast(Front, AlignedFront(front))
        if readout.reads_o:
            readout = AlignedReadout(readout, sequence_context.documents)
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
        if keep and out_bytes >= recompute.MIN_HAND_OVER_BYTES:
            hand_over = GradientHandOver()
        second_run = None
        if keep and stages.recompute:
            second_run = SecondRun(front, rule, sequence_context)
        arguments = MixerArguments(
            front,
            rule,
            readout,
            sequence_context,
            keep,
            # with a split readout, out_proj does not read the function's output
            refilled if split_readout is None else None,
            hand_over,
            second_run,
        )
        mixed = MixerFunction.apply(arguments, rows, *parameters)
        if hand_over is not None:
            mixed = hand_over.store_gradient_of(mixed)
    else:
        # No rank of the group has rows of these sequences. So no rank waits for this
        # one, and front, rule and readout do not run.
        width = readout.gate_columns.stop - readout.gate_columns.start
        mixed = output_without_tokens(rows, *parameters, width=width)
    if split_readout is None or split_readout.second_step_after_exchange:
        return mixed
    if refilled is None:
        return split_readout.second_step(mixed, rows)
    return _checkpoint_readout(split_readout, mixed, rows, refilled)


def _checkpoint_readout(
    split_readout: SplitReadout, mixed: Tensor, rows: Tensor, refilled: RefilledOutput
) -> Tensor:
    """The result of the second step of ``split_readout`` on ``mixed [S, B, H V]``. The
    result is freed, and filled again by ``refilled``.

    The step runs three times: here, when ``refilled`` fills the result again, and in
    the step's backward. Megatron's checkpoint is not used, since it compiles a C++
    extension in the first backward.
    """
    result = checkpoint(
        split_readout.second_step,
        mixed,
        rows,
        use_reentrant=False,
        preserve_rng_state=False,
    )
    assert isinstance(result, Tensor)
    mixed = mixed.detach()
    rows = rows.detach()

    def refill(out: Tensor) -> None:
        out.copy_(split_readout.second_step(mixed, rows))

    refilled.remember(result, refill)
    return result


class MixerArguments(NamedTuple):
    """The arguments of :class:`MixerFunction` that are not tensors."""

    front: Front
    rule: Rule
    readout: Readout
    sequence_context: SequenceContext
    keeps_tensors: bool  # whether tensors are kept for a backward
    # frees and refills the output; None: it is kept
    refilled_output: RefilledOutput | None
    # lets the backward free the output's gradient early
    hand_over: GradientHandOver | None
    second_run: SecondRun | None  # None if front and rule run only once


class _SavedTensors(NamedTuple):
    """The tensors that autograd saves for the backward; autograd keeps a flat list."""

    # the boundaries, :attr:`Documents.stamp`: a backward checks that they are the same
    stamp: Tensor | None
    rows: Tensor
    o: Any  # the rule's output, or None if the backward does not read it
    parameters: Sequence[Tensor | None]
    # the rule's inputs; None for an input that the backward computes again or does not
    # read
    inputs: Sequence[Tensor | None]
    state_tensors: Sequence[Tensor]  # tensors of ``sequence_context.states``
    rule_tensors: Sequence[Tensor | None]  # tensors of the rule's forward

    def flat(self) -> tuple[tuple[Tensor | None, ...], tuple[int, ...]]:
        """All tensors in the order of the fields, and the lengths of the four lists."""
        lists = (self.parameters, self.inputs, self.state_tensors, self.rule_tensors)
        flat: tuple[Tensor | None, ...] = (self.stamp, self.rows, self.o)
        for tensors in lists:
            flat += tuple(tensors)
        return flat, tuple(map(len, lists))

    @classmethod
    def from_flat(cls, flat: Sequence[Any], lengths: Sequence[int]) -> _SavedTensors:
        """The inverse of :meth:`flat`."""
        stamp, rows, o = flat[:3]
        ends = list(itertools.accumulate(lengths, initial=3))
        lists = [flat[start:end] for start, end in itertools.pairwise(ends)]
        parameters, inputs, state_tensors, rule_tensors = lists
        return cls(stamp, rows, o, parameters, inputs, state_tensors, rule_tensors)


class _BackwardValues(NamedTuple):
    """Values that the backward needs besides the tensors that autograd saves."""

    arguments: MixerArguments
    rule_values: object  # ``SavedForBackward.other_values`` of the rule's forward
    # :attr:`Documents.stamp` of the forward; the backward checks that the boundaries
    # are still the same
    stamp: Tensor | None
    list_lengths: tuple[int, ...]  # from :meth:`_SavedTensors.flat`
    history: History | None  # the rows before each sequence, which the front read


class MixerFunction(torch.autograd.Function):
    """Maps rows ``[S, B, P]`` to ``[S, B, H V]``.

    ``parameters`` are the front's parameters, then the readout's gamma or None.
    """

    @staticmethod
    @leaves_memory_unfilled
    def forward(
        ctx, arguments: MixerArguments, rows: Tensor, *parameters: Tensor | None
    ):
        """The output ``[S, B, H V]`` from ``rows`` and ``parameters``; with
        ``arguments.keeps_tensors`` tensors are saved for the backward."""
        out, saved, ctx.values = _forward(arguments, rows, parameters)
        if arguments.keeps_tensors:
            ctx.save_for_backward(*saved)
        return out

    @staticmethod
    @first_derivative_only
    @leaves_memory_unfilled
    def backward(ctx, d_out: Tensor):
        """The gradients of ``rows`` and all parameters from ``d_out``, the output's
        gradient."""
        saved = list(ctx.saved_tensors)
        hand_over = ctx.values.arguments.hand_over
        # From here on each saved tensor is freed after its last use, unless
        # retain_graph=True.
        ctx.maybe_clear_saved_tensors()
        if hand_over is not None:
            d_out = hand_over.take(d_out)
        # in a list, so that _backward can drop the last reference to the gradient
        gradient = [d_out]
        del d_out
        return None, *_backward(ctx.values, saved, gradient)


def _forward(
    arguments: MixerArguments, rows: Tensor, parameters: Sequence[Tensor | None]
) -> tuple[Tensor, Sequence[Tensor | None], _BackwardValues | None]:
    """The mixer's output, the tensors to save, and the other values for the backward.

    Without ``arguments.keeps_tensors`` nothing is saved, and the last result is None.
    """
    front = arguments.front
    rule = arguments.rule
    readout = arguments.readout
    context = arguments.sequence_context
    second_run = arguments.second_run
    front_parameters = parameters[:-1]
    gamma = parameters[-1]
    history = None
    if context.history is not None:
        history = context.history.fetch(rows[..., front.layout.conv_columns])
    inputs = front.forward(rows, front_parameters, context.documents, history=history)
    rule_forward = rule.begin(inputs, context.rule_documents)
    initial = None
    state_tensors = ()  # tensors that the backward of ``context.states`` needs
    if context.states is not None:
        initial, state_tensors = context.states.forward_states(
            rule, rule_forward, inputs
        )
    o, _, saved_by_rule = rule_forward.run(initial, keep=arguments.keeps_tensors)
    del rule_forward
    saved = ()
    values = None
    if arguments.keeps_tensors:
        saved_o = o if readout.reads_o else None
        saved_names = rule.backward_reads.difference(front.recomputed)
        if second_run is not None:  # it computes o and all inputs again
            saved_o = None
            saved_names = ()
            saved_by_rule = rule.kept_to_recompute(saved_by_rule)
        named_inputs = zip(front.input_names, inputs, strict=True)
        saved_inputs = [x if name in saved_names else None for name, x in named_inputs]
        stamp = None
        if context.documents is not None:
            stamp = context.documents.stamp
        saved, list_lengths = _SavedTensors(
            stamp,
            rows,
            saved_o,
            parameters,
            saved_inputs,
            state_tensors,
            saved_by_rule.tensors,
        ).flat()
        values = _BackwardValues(
            arguments, saved_by_rule.other_values, stamp, list_lengths, history
        )
    del inputs  # if nothing is kept for a backward, this frees the rule's inputs
    mixed = readout.forward(o, rows, gamma)
    if arguments.refilled_output is not None:
        if second_run is None:
            rule_output = o.detach  # a function that returns o
        else:
            # o is not kept, but computed again: a function that holds no reference to o
            rule_output = partial(
                second_run.rule_output,
                rows,
                front_parameters,
                history,
                state_tensors,
                saved_by_rule,
            )

        def refill(out: Tensor) -> None:
            readout.forward(rule_output(), rows, gamma, out=out)

        arguments.refilled_output.remember(mixed, refill)
    return mixed, saved, values


def _backward(
    values: _BackwardValues, saved: list[Tensor | None], gradient: list[Tensor]
) -> tuple[Tensor | None, ...]:
    """The gradients of rows and parameters.

    ``saved`` are the tensors that :func:`_forward` saved, ``gradient`` is the output's
    gradient in a list. Both lists are emptied, so that each tensor is freed after its
    last use.
    """
    front = values.arguments.front
    rule = values.arguments.rule
    readout = values.arguments.readout
    context = values.arguments.sequence_context
    second_run = values.arguments.second_run
    history = values.history
    stamp, rows, o, parameters, saved_inputs, state_tensors, rule_tensors = (
        _SavedTensors.from_flat(saved, values.list_lengths)
    )
    saved.clear()
    if context.documents is not None:
        assert stamp is not None
        assert values.stamp is not None
        context.documents.require_unchanged(values.stamp, stamp)
    front_parameters = parameters[:-1]
    gamma = parameters[-1]
    state_tensors = tuple(state_tensors)
    saved_by_rule = SavedForBackward(tuple(rule_tensors), values.rule_values)
    del rule_tensors
    d_rows = rows.new_empty(rows.shape)
    inputs = None
    if second_run is not None:
        inputs, o, saved_by_rule = second_run.take(
            rows, front_parameters, history, state_tensors, saved_by_rule
        )
    d_o, d_gamma = readout.backward(gradient.pop(), o, rows, gamma, d_rows)
    del o
    gradient.append(d_o)
    del d_o
    if inputs is None:
        recomputed = front.forward(
            rows, front_parameters, context.documents, front.recomputed, history
        )
        pairs = zip(saved_inputs, recomputed, strict=True)
        inputs = recomputed._make(again if x is None else x for x, again in pairs)
        del recomputed, pairs
    del saved_inputs
    # This function keeps no reference to d_o, so a rule that converts d_o can free the
    # original.
    rule_backward = rule.begin_backward(
        gradient.pop(), inputs, saved_by_rule, context.rule_documents
    )
    del inputs, saved_by_rule
    initial = d_final = None
    if context.states is not None:
        initial, d_final = context.states.backward_states(rule_backward, state_tensors)
    grads = rule_backward.run(initial, d_final)
    del rule_backward
    if history is not None:
        history = history.with_gradient_buffer()
    d_parameters = front.backward(
        rows, front_parameters, grads, d_rows, context.documents, history
    )
    if context.history is not None:
        assert history is not None
        assert history.d_rows is not None
        returned = context.history.give_back(history.d_rows)
        add_returned(d_rows[..., front.layout.conv_columns], returned, history.table)
    return d_rows, *d_parameters, d_gamma


def add_returned(d_conv_sBC: Tensor, returned: Tensor, table: HistoryTable) -> None:
    """Add the gradients that other pieces computed to ``d_conv_sBC``, the gradient of
    this rank's rows, in place.

    ``returned [R, B, C]`` are the gradients of the R rows that were read as history;
    ``table.gradient_additions`` says to which token each is added.
    """
    if not table.gradient_additions.numel():
        return
    # W, the taps of the convolution, is one more than the rows before a piece
    if (
        why_not_triton(
            d_conv_sBC.device.type, d_conv_sBC.dtype, table.rows_before.shape[1] + 1
        )
        is None
    ):
        from .front.history_kernels import add_rows

        add_rows(d_conv_sBC, returned, table.gradient_additions)
        return
    tokens = table.gradient_additions[:, 0]
    sources = table.gradient_additions[:, 1:]
    # index -1 (no source) selects this row of zeros
    zeros = returned.new_zeros((1,) + returned.shape[1:])
    added = torch.cat([returned, zeros])[sources.long()].sum(1)
    # token -1 (an unused entry in fixed buffers) adds zeros to token 0
    added = added.masked_fill((tokens < 0)[:, None, None], 0)
    total = d_conv_sBC.to(returned.dtype).index_add(0, tokens.clamp(min=0), added)
    d_conv_sBC.copy_(total)

"""A rule in which each token updates its state n times before it reads the state.

    S_t = exp(g_t) S_{t-1}
    S_t = S_t + beta_tj k_tj (v_tj - S_t^T k_tj)^T      for j = 1 .. n
    o_t = S_t^T q_t / sqrt(K)

A delta rule computes this over n rows for each token, of which only the first one
decays and only the last one is read.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from ..documents import Documents
from ..state_maps.state_map import StateMap
from .base import (
    Gradients,
    Inputs,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    Saved,
)


def spread_steps(inputs: Inputs, steps: int) -> Inputs:
    """The inputs ``[B, n S, ...]`` of a rule, from a token's ``[B, S, ...]``.

    ``k``, ``v`` and ``beta`` have n times the heads, step by step; they become rows.
    ``g`` goes to the first row of a token and ``q`` to the last; other rows are zeros.
    """

    def in_rows(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        return x.unflatten(2, (steps, -1)).flatten(1, 2)

    def alone(x: Tensor | None, row: int) -> Tensor | None:
        if x is None:
            return None
        return _at_row(x, row, steps)

    return inputs._replace(
        q=alone(inputs.q, -1),
        k=in_rows(inputs.k),
        v=in_rows(inputs.v),
        g=alone(inputs.g, 0),
        beta=in_rows(inputs.beta),
    )


def _at_row(x: Tensor, row: int, steps: int) -> Tensor:
    """``[B, n S, ...]``: ``x [B, S, ...]`` at one row of each token, zeros elsewhere."""
    rows = x.new_zeros(x.shape[:2] + (steps,) + x.shape[2:])
    rows[:, :, row] = x
    return rows.flatten(1, 2)


def _row_of(x: Tensor, row: int, steps: int) -> Tensor:
    """``[B, S, ...]``, contiguous: one row of each token of ``x [B, n S, ...]``."""
    return x.unflatten(1, (-1, steps))[:, :, row].contiguous()


def _offsets_of_rows(documents: Documents, steps: int) -> tuple[Tensor]:
    """The boundaries of the documents, counted in rows."""
    # in fixed buffers one more entry follows, the end of an empty document
    return (documents.starts[: documents.max_filled + 1] * steps,)


def documents_of_steps(documents: Documents | None, steps: int) -> Documents | None:
    """The same documents, with n rows for each token."""
    if documents is None:
        return None
    return documents.keep_documents(
        _offsets_of_rows,
        steps,
        max_filled=documents.max_filled,
        tokens=steps * documents.total_tokens,
    )


class StepsForward(RuleForward):
    """The forward of :class:`RuleOfSteps`: the inner rule's over the rows."""

    def __init__(
        self, rule: RuleOfSteps, inputs: Inputs, documents: Documents | None
    ) -> None:
        steps = rule.steps
        self._steps = steps
        rows = documents_of_steps(documents, steps)
        self._inner = rule.rule.begin(spread_steps(inputs, steps), rows)

    def state_map(self) -> StateMap:
        return self._inner.state_map()

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        output = self._inner.run(initial, keep=keep, final=final)
        return output._replace(o=_row_of(output.o, -1, self._steps))


class StepsBackward(RuleBackward):
    """The backward of :class:`RuleOfSteps`: only the last row of a token has a gradient
    of o."""

    def __init__(
        self,
        rule: RuleOfSteps,
        d_o: Tensor,
        inputs: Inputs,
        saved: Saved,
        documents: Documents | None,
    ) -> None:
        steps = rule.steps
        self._steps = steps
        self._inner = rule.rule.begin_backward(
            _at_row(d_o, -1, steps),
            spread_steps(inputs, steps),
            saved,
            documents_of_steps(documents, steps),
        )

    def d_initial(self) -> Tensor:
        return self._inner.d_initial()

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        return self._of_tokens(self._inner.run(initial, d_final))

    def run_to_states(
        self,
        initial: Tensor | None,
        d_final: Tensor | None,
        maps: Callable[[], StateMap],
    ) -> tuple[Gradients, Tensor]:
        grads, d_initial = self._inner.run_to_states(initial, d_final, maps)
        return self._of_tokens(grads), d_initial

    def _of_tokens(self, grads: Gradients) -> Gradients:
        """The gradients of the inputs before :func:`spread_steps`."""
        steps = self._steps

        def in_heads(x: Tensor) -> Tensor:
            return x.unflatten(1, (-1, steps)).flatten(2, 3)

        return grads._replace(
            q=_row_of(grads.q, -1, steps),
            k=in_heads(grads.k),
            v=in_heads(grads.v),
            g=_row_of(grads.g, 0, steps),
            beta=in_heads(grads.beta),
        )


class RuleOfSteps(Rule):
    """Runs ``rule`` over ``steps`` rows for each token."""

    forward = StepsForward
    backward = StepsBackward

    def __init__(self, rule: Rule, steps: int) -> None:
        # Scaled gradients have one factor per head, not one per head and step.
        assert rule.operand_dtype is None
        self.rule = rule
        self.steps = steps
        self.name = rule.name
        self.bits = rule.bits
        self.backward_reads = rule.backward_reads
        self.why_not_heads = rule.why_not_heads
        self.kept_to_recompute = rule.kept_to_recompute

    def recompute(
        self,
        inputs: object,
        kept: Saved,
        documents: Documents | None,
        initial: Tensor | None,
    ) -> RuleOutput:
        steps = self.steps
        rows = documents_of_steps(documents, steps)
        output = self.rule.recompute(spread_steps(inputs, steps), kept, rows, initial)
        return output._replace(o=_row_of(output.o, -1, steps))

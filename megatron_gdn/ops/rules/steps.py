"""A rule in which each token updates the state n times before it reads the state.

    S_t = exp(g_t) S_{t-1}
    S_t = S_t + beta_tj k_tj (v_tj - S_t^T k_tj)^T      for j = 1 .. n
    o_t = S_t^T q_t / sqrt(K)

A delta rule computes this over n rows for each token: only the first row of a token
decays the state, and only the output of its last row is used.
"""

from __future__ import annotations

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
    SavedForBackward,
)


def spread_steps(inputs: Inputs, steps: int) -> Inputs:
    """A rule's inputs with n rows for each token, ``[B, n S, ...]``; n is ``steps``.

    The given ``inputs`` are ``[B, S, ...]``. ``k``, ``v`` and ``beta`` have n times the
    heads: those of the first step, then those of the second, and so on. The heads of
    each step become one row. ``g`` goes to the first row of a token and ``q`` to the
    last; their other rows are zeros.
    """

    def heads_to_rows(x: Tensor) -> Tensor:
        """``[B, n S, H, ...]`` from ``x [B, S, n H, ...]``."""
        return x.unflatten(2, (steps, -1)).flatten(1, 2)

    def to_row(x: Tensor | None, row: int) -> Tensor | None:
        """``[B, n S, ...]``: ``x [B, S, ...]`` in row number ``row`` of each token; None
        stays None."""
        if x is None:
            return None
        return _with_zero_rows(x, row, steps)

    return inputs._replace(
        q=to_row(inputs.q, -1),
        k=heads_to_rows(inputs.k),
        v=heads_to_rows(inputs.v),
        g=to_row(inputs.g, 0),
        beta=heads_to_rows(inputs.beta),
    )


def _with_zero_rows(x: Tensor, row: int, steps: int) -> Tensor:
    """``x [B, S, ...]`` as the row number ``row`` of each token, ``[B, n S, ...]``; the
    token's other rows are zeros."""
    rows = x.new_zeros(x.shape[:2] + (steps,) + x.shape[2:])
    rows[:, :, row] = x
    return rows.flatten(1, 2)


def _row_of_each_token(x: Tensor, row: int, steps: int) -> Tensor:
    """The row number ``row`` of each token of ``x [B, n S, ...]``: ``[B, S, ...]``,
    contiguous."""
    return x.unflatten(1, (-1, steps))[:, :, row].contiguous()


def _offsets_of_rows(documents: Documents, steps: int) -> tuple[Tensor]:
    """The boundaries of the documents, counted in rows."""
    # In fixed buffers ``starts`` has one more entry, the end of an empty document; it
    # is left out.
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
    """The forward of :class:`RuleOfSteps`: the forward of the inner rule over rows."""

    def __init__(
        self, rule: RuleOfSteps, inputs: Inputs, documents: Documents | None
    ) -> None:
        """Begin the inner rule's forward over ``n S`` rows for the S tokens of
        ``inputs [B, S, ...]``. Only the inner forward stores inputs."""
        steps = rule.steps
        self._steps = steps
        row_documents = documents_of_steps(documents, steps)
        self._inner = rule.rule.begin(spread_steps(inputs, steps), row_documents)

    def state_map(self) -> StateMap:
        return self._inner.state_map()

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The inner rule's output at the last row of each token: ``o [B, S, H, V]``.
        The arguments are those of :meth:`RuleForward.run`."""
        output = self._inner.run(initial, keep=keep, final=final)
        return output._replace(o=_row_of_each_token(output.o, -1, self._steps))


class StepsBackward(RuleBackward):
    """The backward of :class:`RuleOfSteps`. In d_o all rows of a token are zero except
    the last."""

    def __init__(
        self,
        rule: RuleOfSteps,
        d_o: Tensor,
        inputs: Inputs,
        saved: SavedForBackward,
        documents: Documents | None,
    ) -> None:
        """Begin the inner rule's backward; ``d_o`` is ``[B, S, H, V]``, ``saved`` is
        from the inner rule's forward."""
        steps = rule.steps
        self._steps = steps
        self._inner = rule.rule.begin_backward(
            _with_zero_rows(d_o, -1, steps),
            spread_steps(inputs, steps),
            saved,
            documents_of_steps(documents, steps),
        )

    def d_initial(self) -> Tensor:
        return self._inner.d_initial()

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        """The gradients of the tokens' inputs, the transpose of :func:`spread_steps`;
        ``initial`` and ``d_final`` are ``[N, H, K, V]`` or None (zeros)."""
        grads = self._inner.run(initial, d_final)
        steps = self._steps

        def rows_to_heads(x: Tensor) -> Tensor:
            """``[B, S, n H, ...]`` from ``x [B, n S, H, ...]``."""
            return x.unflatten(1, (-1, steps)).flatten(2, 3)

        return grads._replace(
            q=_row_of_each_token(grads.q, -1, steps),
            k=rows_to_heads(grads.k),
            v=rows_to_heads(grads.v),
            g=_row_of_each_token(grads.g, 0, steps),
            beta=rows_to_heads(grads.beta),
        )


class RuleOfSteps(Rule):
    """Runs ``rule`` over rows; each token has ``steps`` rows."""

    forward_class = StepsForward
    backward_class = StepsBackward

    def __init__(self, rule: Rule, steps: int) -> None:
        """Wrap ``rule``, and take over its attributes about bits, heads and saved
        tensors."""
        # A rule with fp16 operands scales its gradients by one factor per head
        # (`RuleGrads.factor`). Here it would need one factor per head and step.
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
        kept: SavedForBackward,
        documents: Documents | None,
        initial: Tensor | None,
    ) -> RuleOutput:
        """Run the inner rule's forward again over rows; return ``o`` of each token's
        last row. The arguments are those of :meth:`Rule.recompute`, with ``inputs`` of
        tokens."""
        steps = self.steps
        row_documents = documents_of_steps(documents, steps)
        output = self.rule.recompute(
            spread_steps(inputs, steps), kept, row_documents, initial
        )
        return output._replace(o=_row_of_each_token(output.o, -1, steps))

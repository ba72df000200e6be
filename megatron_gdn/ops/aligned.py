"""A mixer whose bits depend on a sequence's tokens alone: not on its cut, place or neighbours.

Every sequence is computed by itself in steps of 64 tokens, counted from its start, each in buffers
of one shape: the first n tokens of a step, n <= 64, are followed by empty ones, which later tokens
would not change. So the same kernels see a token at the same place with the same tokens before it,
whether it comes with its whole sequence in training or alone in generation, and its bits are the
same. The price is a loop over steps in place of batched products. The backward is the plain rule's.

Legend: S seq, B batch, P projection width, W conv taps, n tokens of a step, H heads with a state, K
rows of a state, V columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from .delta_rule.plain import CHUNK, PlainForward, PlainRule
from .documents import Documents
from .front.base import Front, Parameters
from .rule import RuleOutput, Saved

STEP = CHUNK


def rows_before(parameters: Parameters) -> int:
    """W - 1, the rows before a token that the convolution reads."""
    weight = parameters[0]
    assert weight is not None
    return weight.shape[-1] - 1


def front_of_step(
    front: Front,
    parameters: Parameters,
    rows: Tensor,
    only: tuple[str, ...] | None = None,
) -> Any:
    """The rule's inputs of a step.

    Args:
        rows: ``[W - 1 + n, P]``, the tokens after the W - 1 rows before them (zeros at the start).

    Returns:
        as ``front.forward``, ``[1, n, ...]``.
    """
    past = rows_before(parameters)
    buffer = rows.new_zeros(past + STEP, 1, rows.shape[-1])
    buffer[: len(rows), 0] = rows
    made = front.forward(buffer, parameters, None, only)
    return type(made)(*(None if x is None else x[:, past : len(rows)] for x in made))


def rule_of_step(rule: PlainRule, inputs: Any, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output ``[1, n, H, V]`` of a step, and the state after it (exact after a full one).

    Args:
        inputs: ``[1, n, ...]``.
        state: ``[1, H, K, V]`` before the step; None is zero.
    """
    n = inputs.k.shape[1]
    whole = type(inputs)(*(_filled_up(x) for x in inputs))
    output = PlainRule.begin(rule, whole, None).run(state, keep=False, final=True)
    assert output.final is not None
    return output.o[:, :n], output.final


def _filled_up(x: Tensor) -> Tensor:
    """``[1, n, ...]`` with empty tokens up to a step."""
    buffer = x.new_zeros(1, STEP, *x.shape[2:])
    buffer[:, : x.shape[1]] = x
    return buffer


def _steps(lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Of sequences end to end: number, first token of the sequence, and start and end of a step."""
    first = 0
    for number, length in enumerate(lengths):
        for start in range(first, first + length, STEP):
            yield number, first, start, min(start + STEP, first + length)
        first += length


class AlignedFront:
    """A front in steps; its backward is the plain one."""

    def __init__(self, front: Front) -> None:
        self.layout, self.names = front.layout, front.names
        self.convolved, self.cheap = front.convolved, front.cheap
        self._front, self.backward = front, front.backward

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
    ) -> Any:
        """As the inner one."""
        if only is not None and not only:
            return self._front.forward(proj, parameters, documents, only)
        S, past = proj.shape[0], rows_before(parameters)
        rows = []
        for x_SP in proj.unbind(1):
            made = []
            for _, first, start, end in _steps(Documents.lengths_of(documents, S)):
                before = x_SP[max(start - past, first) : start]
                fill = x_SP.new_zeros(past - len(before), x_SP.shape[1])
                step = torch.cat([fill, before, x_SP[start:end]])
                made.append(front_of_step(self._front, parameters, step, only))
            rows.append(_joined(made, 1))
        return _joined(rows, 0)


def _joined(pieces: list[Any], dim: int) -> Any:
    kind = type(pieces[0])
    return kind(*(None if x[0] is None else torch.cat(x, dim) for x in zip(*pieces, strict=True)))


class AlignedRule(PlainRule):
    """The plain rule in steps."""

    in_steps = True

    def begin(self, inputs: Any, documents: Documents | None) -> AlignedForward:
        return AlignedForward(self, inputs, documents)


class AlignedForward(PlainForward):
    def __init__(self, rule: AlignedRule, inputs: Any, documents: Documents | None) -> None:
        super().__init__(inputs, documents)
        self._aligned, self._documents = rule, documents

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        # `_inputs` are the rows of the batch, or all documents in one row.
        inputs, rule = self._inputs, self._aligned
        lengths, row = self._rule.lengths, 0
        assert isinstance(lengths, tuple)  # the front has refused documents in fixed buffers
        by_row = self._documents is None
        output = torch.empty_like(inputs.v)
        states: list[Tensor | None] = [None] * len(lengths)
        if initial is not None:
            states = list(initial.split(1))
        for number, first, start, end in _steps(lengths):
            if by_row:
                row, start, end = number, start - first, end - first
            step = type(inputs)(*(x[row : row + 1, start:end] for x in inputs))
            o, states[number] = rule_of_step(rule, step, states[number])
            output[row, start:end] = o[0]
        last = None
        if final:
            zero = self._rule.zero_state(inputs.k, inputs.v).flatten(1, 2)[:1]
            last = torch.cat([zero if state is None else state for state in states])
        return RuleOutput(output.view(*self._rows, *output.shape[2:]), last, Saved())


class AlignedNorm:
    """A gated norm, one token at a time; its backward is the plain one."""

    def __init__(self, kernels: ModuleType) -> None:
        self._kernels, self.gated_norm_backward = kernels, kernels.gated_norm_backward

    def gated_norm_forward(
        self, o: Tensor, proj: Tensor, gamma: Tensor, z: slice, *, out: Tensor | None = None, **how
    ) -> Tensor:
        """As the inner one."""
        made = proj.new_empty(*proj.shape[:2], z.stop - z.start) if out is None else out
        for s in range(proj.shape[0]):
            for b in range(proj.shape[1]):
                one, row = o[b : b + 1, s : s + 1].contiguous(), proj[s : s + 1, b : b + 1]
                made[s, b] = self._kernels.gated_norm_forward(
                    one, row.contiguous(), gamma, z, **how
                )[0, 0]
        return made

"""A mixer whose bits depend on a sequence's tokens alone: not on its cut, place or neighbours.

Every sequence is computed by itself, in steps of 64 tokens from its start. All steps have buffers
of one shape: a step with only n tokens is filled up with empty ones. What follows the first n
tokens does not change them. So the same kernels see a token at the same place, after the same
tokens, with its whole sequence in training and alone in generation. Its bits are the same. The
price is a loop over steps in place of batched products. The backward is the plain rule's.

Legend: S seq, B batch, P projection width, W conv taps, n tokens of a step, H heads with a state, K
rows of a state, V columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from .documents import Documents
from .front.base import Front, FrontAround, Parameters
from .readout.base import Readout
from .rules.base import Rule, RuleBackward, RuleForward, RuleOutput, Saved, on_tokens
from .rules.chunk_table import CHUNK
from .rules.rows import in_one_row, in_rows
from .state_maps.state_map import StateMap

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
        rows: ``[W - 1 + n, P]``: the W - 1 rows before the step (zeros at the start of a
            sequence), then its n tokens.

    Returns:
        as ``front.forward``, ``[1, n, ...]``.
    """
    past = rows_before(parameters)
    buffer = rows.new_zeros(past + STEP, 1, rows.shape[-1])
    buffer[: len(rows), 0] = rows
    made = front.forward(buffer, parameters, None, only)
    return on_tokens(made, lambda x: x[:, past : len(rows)])


def rule_of_step(rule: Rule, inputs: Any, state: Tensor | None) -> tuple[Tensor, Tensor]:
    """The output ``[1, n, H, V]`` of a step, and the state after it (exact if the step is full).

    Args:
        rule: a plain rule, which computes a step of 64 tokens as one chunk.
        inputs: ``[1, n, ...]``.
        state: ``[1, H, K, V]`` before the step; None is zero.
    """
    n = inputs[0].shape[1]
    output = rule.begin(on_tokens(inputs, _filled_up), None).run(state, keep=False, final=True)
    assert output.final is not None
    return output.o[:, :n], output.final


def _filled_up(x: Tensor) -> Tensor:
    """``[1, n, ...]`` filled up with zeros to a step of 64 tokens."""
    buffer = x.new_zeros(1, STEP, *x.shape[2:])
    buffer[:, : x.shape[1]] = x
    return buffer


def _steps(lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """For every step: the sequence's number and first token, the step's start and end."""
    first = 0
    for number, length in enumerate(lengths):
        for start in range(first, first + length, STEP):
            yield number, first, start, min(start + STEP, first + length)
        first += length


class AlignedFront(FrontAround):
    """A front that runs in steps. Its backward is the inner front's."""

    def forward(
        self,
        proj: Tensor,
        parameters: Parameters,
        documents: Documents | None,
        only: tuple[str, ...] | None = None,
    ) -> Any:
        """As the inner front's."""
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


class AlignedRule:
    """A plain rule that runs in steps. Its backward and its state maps are the plain rule's.

    Args:
        plain: a rule in plain torch with chunks of 64 tokens.
    """

    in_steps = True
    batch_invariant = True
    operand_dtype = None

    def __init__(self, plain: Rule) -> None:
        self.plain = plain
        self.name, self.reads_again = self.plain.name, self.plain.reads_again

    def why_not_heads(self, heads: int) -> str | None:
        return self.plain.why_not_heads(heads)

    def begin(self, inputs: Any, documents: Documents | None) -> RuleForward:
        return AlignedForward(self.plain, inputs, documents)

    def begin_backward(
        self, d_o: Tensor, inputs: Any, saved: Saved, documents: Documents | None
    ) -> RuleBackward:
        return self.plain.begin_backward(d_o, inputs, saved, documents)


class AlignedForward:
    def __init__(self, plain: Rule, inputs: Any, documents: Documents | None) -> None:
        self._plain, self._inputs, self._documents = plain, inputs, documents

    def state_map(self) -> StateMap:
        return self._plain.begin(self._inputs, self._documents).state_map()

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """``keep`` has no effect: the plain backward starts from the inputs alone."""
        batch, tokens = rows = self._inputs[0].shape[:2]
        inputs = on_tokens(self._inputs, in_one_row)
        lengths = (tokens,) * batch
        if self._documents is not None:
            lengths = tuple(n for n in self._documents.lengths if n)
        states: list[Any] = [None] * len(lengths) if initial is None else list(initial.split(1))
        made = []
        for number, _, start, end in _steps(lengths):
            step = on_tokens(inputs, lambda x, a=start, b=end: x[:, a:b])
            o, states[number] = rule_of_step(self._plain, step, states[number])
            made.append(o)
        return RuleOutput(
            in_rows(torch.cat(made, 1), rows), torch.cat(states) if final else None, Saved()
        )


class AlignedReadout:
    """A readout that runs one token at a time. Its backward is the inner readout's."""

    reads_o: ClassVar[bool] = True

    def __init__(self, readout: Readout) -> None:
        self._readout, self.backward, self.gate = readout, readout.backward, readout.gate

    def forward(
        self, o: Tensor, rows: Tensor, gamma: Tensor | None, *, out: Tensor | None = None
    ) -> Tensor:
        """As the inner readout's."""
        S, B, _ = rows.shape
        made = rows.new_empty(S, B, self.gate.stop - self.gate.start) if out is None else out
        for s in range(S):
            for b in range(B):
                one, row = o[b : b + 1, s : s + 1].contiguous(), rows[s : s + 1, b : b + 1]
                made[s, b] = self._readout.forward(one, row.contiguous(), gamma)[0, 0]
        return made


def by_token(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """``function`` of ``[S, B, C]``, one token at a time; differentiable."""
    tokens = x.flatten(0, 1).split(1)
    return torch.cat([function(token[None]) for token in tokens], 1).view(x.shape)

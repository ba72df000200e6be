"""Packed documents that continue earlier documents: a shared prefix is computed once.

    prompt ──┬── first answer   parents = (-1, 0, 0)
             └── second answer  each answer starts from the prompt's state and last rows

The *level* of a document is the number of its ancestors. A rule runs the documents of
one level as ordinary packed documents:

    forward      S_in of a child = S_out of its parent                  level 0 first
    backward     dS_out of a parent = sum of its children's dS_in       last level first

Legend: T tokens of the buffer, n sequences of one level.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from .documents import Documents
from .front.history import History, HistoryTable, ranges
from .host_tables import to_device
from .rules.base import (
    Gradients,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    Saved,
    map_inputs,
)
from .state_maps.state_map import StateMap
from .switches import full_fp32_matmul

# bytes; kernels need tensors whose addresses are multiples of this number
ALIGNMENT = 16


class Level(NamedTuple):
    """The non-empty documents with the same number of ancestors; siblings are
    neighbours."""

    # indices of the level's tokens in the buffer, document after document
    tokens: slice | Tensor
    documents: Documents  # boundaries of the documents among ``tokens``
    parents: Tensor  # int64 [n], the index of each document's parent in the level above
    children: tuple[int, ...]  # the number of non-empty children of each document

    def rows(self, x: Tensor) -> Tensor:
        """The rows of ``x`` ``[1, T, ...]`` at this level's tokens."""
        if isinstance(self.tokens, slice):
            rows = x[:, self.tokens]
            if rows.data_ptr() % ALIGNMENT == 0:
                return rows
            return rows.clone()
        return x.index_select(1, self.tokens)


@dataclass(frozen=True, eq=False)
class TreeDocuments(Documents):
    """Documents with padding in one buffer; a document may continue an earlier
    document."""

    why_headwise = "the one that runs documents that continue others"
    why_not_on_grid = (
        "documents that continue others run without config.batch_invariant_mode: its "
        "chunks of 64 tokens begin anew in every document. Switch it off, or pack the "
        "sequences separately."
    )
    may_have_parents = True

    parents: tuple[int, ...] = ()  # the document that each document continues; -1: none
    # tokens of each document, without padding
    lengths_without_padding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.parents) != len(self.lengths):
            raise ValueError(
                f"parents has {len(self.parents)} entries; there are "
                f"{len(self.lengths)} documents."
            )
        for index, parent in enumerate(self.parents):
            if not -1 <= parent < index:
                raise ValueError(
                    f"parents[{index}] is {parent}; a document continues an earlier "
                    f"one (0 to {index - 1}), or none (-1). Put every document behind "
                    "its parent."
                )

    @property
    def boundary_numbers(self) -> tuple[int, ...]:
        return self.offsets + self.parents + self.lengths_without_padding

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """The non-empty ancestors of each document, from the first to the parent."""
        paths: list[tuple[int, ...]] = []
        for parent in self.parents:
            if parent >= 0:
                before = paths[parent]
            else:
                before = ()
            has_tokens = parent >= 0 and self.lengths_without_padding[parent] > 0
            if has_tokens:
                before += (parent,)
            paths.append(before)
        return tuple(paths)

    def tokens_before(self, start: int) -> tuple[slice, ...]:
        path = self.paths[bisect_right(self.offsets, start) - 1]
        begin = self.offsets
        length = self.lengths_without_padding
        return tuple(slice(begin[i], begin[i] + length[i]) for i in path)

    @cached_property
    def _count_before(self) -> list[int]:
        """The number of tokens in each document's ancestors."""
        return [
            sum(self.lengths_without_padding[i] for i in path) for path in self.paths
        ]

    @property
    def longest_sequence(self) -> int:
        """The largest sum of a document's tokens, its padding and the tokens of its
        ancestors."""
        return max(map(sum, zip(self._count_before, self.lengths, strict=True)))

    @cached_property
    def position_in_sequence_T(self) -> Tensor:
        before_N = torch.tensor(self._count_before, dtype=torch.int32, device="cpu")
        before_T = before_N.repeat_interleave(torch.tensor(self.lengths, device="cpu"))
        return self.position_T + to_device(before_T, self.device)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """The levels of non-empty documents, from level 0 on."""
        length = self.lengths_without_padding
        children: dict[int, list[int]] = {i: [] for i in range(-1, len(length))}
        for i, path in enumerate(self.paths):
            if length[i]:
                children[path[-1] if path else -1].append(i)
        if not children[-1]:
            raise ValueError(
                f"{self.total_tokens} tokens are padding of documents without tokens."
            )
        levels = []
        families = [children[-1]]
        while members := list(chain.from_iterable(families)):
            of_members = ([x[i] for i in members] for x in (self.offsets, length))
            start, count = (torch.tensor(x, device="cpu") for x in of_members)
            places = ranges(start, count)
            in_order = bool((places.diff() == 1).all())
            whole = slice(int(places[0]), int(places[-1]) + 1)
            if in_order:
                tokens = whole
            else:
                tokens = to_device(places, self.device)
            documents = Documents(
                tuple(accumulate(count.tolist(), initial=0)), self.device
            )
            parents = [n for n, family in enumerate(families) for _ in family]
            parents = to_device(torch.tensor(parents, device="cpu"), self.device)
            families = [children[i] for i in members]
            levels.append(Level(tokens, documents, parents, tuple(map(len, families))))
        return tuple(levels)

    def to_buffer(self, pieces: Sequence[Tensor]) -> Tensor:
        """Join ``pieces``, the rows of each level, to ``[1, T, ...]`` with zeros at
        padding."""
        if pieces[0] is None or pieces[0].shape[1] == self.total_tokens:
            return pieces[0]
        whole = pieces[0].new_zeros((1, self.total_tokens) + pieces[0].shape[2:])
        for piece, level in zip(pieces, self.levels, strict=True):
            whole[:, level.tokens] = piece
        return whole

    def history(self, past: int) -> HistoryOfParents | None:
        """The last ``past`` rows of each document's ancestors; None if there are no
        such rows."""
        return self.keep(TreeDocuments._history, past)

    def _history(self, past: int) -> HistoryOfParents | None:
        """Compute the last ``past`` rows of documents' ancestors, which :meth:`history`
        caches."""
        begin = self.offsets
        length = self.lengths_without_padding
        continuing = [i for i, path in enumerate(self.paths) if path and length[i]]
        if not (continuing and past):
            return None
        sent = []
        before = []
        for i in continuing:
            path = reversed(self.paths[i])
            backwards = (
                range(begin[j] + length[j] - 1, begin[j] - 1, -1) for j in path
            )
            newest = list(islice(chain.from_iterable(backwards), past))
            before.append(
                [len(sent) + age if age < len(newest) else -1 for age in range(past)]
            )
            sent += newest
        first = [begin[i] for i in continuing]
        counts = [length[i] for i in continuing]
        first, counts, rows, moved = (
            torch.tensor(x, device="cpu") for x in (first, counts, before, sent)
        )
        table = HistoryTable.build(
            first, counts, rows, moved, self.total_tokens, self.device
        )
        return HistoryOfParents(table, to_device(moved, self.device))


class HistoryOfParents(NamedTuple):
    """A `HistoryLink`: copies of ancestors' last rows; their gradients are summed in
    order."""

    table: HistoryTable
    rows: Tensor  # int64, indices of the copied rows in the buffer

    def fetch(self, rows_sBC: Tensor) -> History:
        return History(rows_sBC.index_select(0, self.rows), self.table)

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        return d_rows_RBC


class ForwardByLevel(RuleForward):
    """The forward of :class:`RuleByLevel`: the inner rule's forwards, one level after
    another."""

    documents: TreeDocuments

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        assert initial is None and not final
        outputs = []
        tensors = []
        plans = []
        ended = None
        for level in self.documents.levels:
            begun = self.rule.rule.begin(
                map_inputs(self.inputs, level.rows), level.documents
            )
            entering = None
            through = None
            continued = any(level.children)
            if ended is not None:
                entering = ended.index_select(0, level.parents)
                if keep and continued:
                    through = begun.state_map().through
            o, ended, saved = begun.run(entering, keep=keep, final=continued)
            outputs.append(o)
            tensors += (entering, through) + saved.tensors
            plans.append((saved.plan, len(saved.tensors)))
        o = self.documents.to_buffer(outputs)
        return RuleOutput(o, None, Saved(tuple(tensors) if keep else (), tuple(plans)))


class BackwardByLevel(RuleBackward):
    """The backward of :class:`RuleByLevel`: the inner rule's backwards, last level
    first."""

    documents: TreeDocuments

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        assert initial is None and d_final is None
        tensors = list(self.saved.tensors)
        grads = []
        levels = self.documents.levels
        for number, level in reversed(list(enumerate(levels))):
            plan, count = self.saved.plan[number]
            entered, through, *mine = tensors[-count - 2 :]
            del tensors[-count - 2 :]
            inputs = map_inputs(self.inputs, level.rows)
            saved = Saved(tuple(mine), plan)
            begun = self.rule.rule.begin_backward(
                level.rows(self.d_o), inputs, saved, level.documents
            )
            if number:
                d_entered = begun.d_initial()
            else:
                d_entered = None
            if d_entered is not None and d_final is not None:
                maps = StateMap(d_entered, through).transposed(d_entered)
                with full_fp32_matmul(d_final.device.type):
                    # One product per document, so that other documents do not change
                    # its bits.
                    each = zip(maps.local, maps.through, d_final, strict=True)
                    d_entered = torch.stack(
                        [
                            StateMap(local, through).apply(d)
                            for local, through, d in each
                        ]
                    )
            grads.insert(0, begun.run(entered, d_final))
            if d_entered is not None:
                families = d_entered.split(levels[number - 1].children)
                d_final = torch.stack([family.sum(0) for family in families])
        return grads[0]._make(map(self.documents.to_buffer, zip(*grads, strict=True)))


class RuleByLevel(Rule):
    """Runs ``rule`` once for each level; ``o`` and gradients of padding are zero."""

    forward = ForwardByLevel
    backward = BackwardByLevel

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.name = rule.name
        self.bits = rule.bits
        self.backward_reads = rule.backward_reads

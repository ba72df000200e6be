"""Packed documents that continue others: a prefix that several share is computed once.

    prompt ──┬── first answer         parents = (-1, 0, 0)
             └── second answer        each answer starts from the prompt's state and last rows

Documents of one *level* have the same number of documents before them. A level runs as packed
documents do, from the states in which the level above it ended.

Legend: N documents, T tokens of the buffer, n sequences of one level.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from .documents import Documents
from .front.history import History, HistoryTable
from .host_tables import to_device


class Level(NamedTuple):
    """The documents with as many documents before them, without the empty ones.

    ``siblings`` are pairs of int64 indices, documents of the level above and children of theirs:
    each one's first child, then each one's second child, and so on. A sum over children that takes
    them in this order is the same in every run.
    """

    tokens: slice | Tensor  # their places in the buffer, document after document
    documents: Documents  # their boundaries among ``tokens``
    parents: Tensor | None  # int64 [n], where each parent is in the level above; None at the top
    siblings: tuple[tuple[Tensor, Tensor], ...]
    continued: bool  # whether the next level has documents


@dataclass(frozen=True, eq=False)
class TreeDocuments(Documents):
    """Documents in slots of one buffer, each of which may continue an earlier one.

    ``parents`` has the index of the document whose last token each one continues, -1 for none.
    """

    parents: tuple[int, ...] = ()
    lengths_without_padding: tuple[int, ...] = ()  # of each document, at the start of its slot

    def __post_init__(self) -> None:
        super().__post_init__()
        N = len(self.lengths)
        for name, given in (("parents", self.parents), ("lengths", self.lengths_without_padding)):
            if len(given) != N:
                raise ValueError(f"{name} has {len(given)} entries; there are {N} documents.")
        for index, parent in enumerate(self.parents):
            if not -1 <= parent < index:
                raise ValueError(
                    f"parents[{index}] is {parent}; a document continues an earlier one "
                    f"(0 to {index - 1}), or none (-1). Put every document behind its parent."
                )
        both = zip(self.lengths_without_padding, self.lengths, strict=True)
        for index, (length, slot) in enumerate(both):
            if not 0 <= length <= slot:
                raise ValueError(
                    f"document {index} has {length} tokens and a slot of {slot}; a document fits "
                    f"in its slot."
                )

    @property
    def numbers(self) -> tuple[int, ...]:
        return *self.offsets, *self.parents, *self.lengths_without_padding

    @cached_property
    def paths(self) -> tuple[tuple[int, ...], ...]:
        """For each document those before it that have tokens, from the first to its parent."""
        paths: list[tuple[int, ...]] = []
        for parent in self.parents:
            before = paths[parent] if parent >= 0 else ()
            has_tokens = parent >= 0 and self.lengths_without_padding[parent] > 0
            paths.append((*before, parent) if has_tokens else before)
        return tuple(paths)

    def tokens_before(self, start: int) -> tuple[slice, ...]:
        """Where the tokens lie that the document in the slot from ``start`` on continues."""
        document = bisect_right(self.offsets, start) - 1
        return tuple(
            slice(self.offsets[i], self.offsets[i] + self.lengths_without_padding[i])
            for i in self.paths[document]
        )

    @property
    def longest_sequence(self) -> int:
        """Slots of the longest document and of all that it continues."""
        length = self.lengths_without_padding
        paths = zip(self.paths, self.lengths, strict=True)
        return max(sum(length[i] for i in path) + slot for path, slot in paths)

    @cached_property
    def position_in_sequence_T(self) -> Tensor:
        length = self.lengths_without_padding
        before_N = torch.tensor([sum(length[i] for i in path) for path in self.paths], device="cpu")
        before_T = before_N.repeat_interleave(torch.tensor(self.lengths, device="cpu"))
        return self.position_T + to_device(before_T.to(torch.int32), self.device)

    @cached_property
    def levels(self) -> tuple[Level, ...]:
        """From the top down."""
        filled = [i for i, length in enumerate(self.lengths_without_padding) if length]
        if not filled:
            raise ValueError(f"{self.total_tokens} tokens are padding of documents without tokens.")
        depth = max(len(self.paths[i]) for i in filled)
        members = [[i for i in filled if len(self.paths[i]) == d] for d in range(depth + 1)]
        place = {i: n for level in members for n, i in enumerate(level)}
        levels = []
        for d, level in enumerate(members):
            lengths = [self.lengths_without_padding[i] for i in level]
            parents, siblings = None, ()
            if d:
                parents = [place[self.paths[i][-1]] for i in level]
                siblings = self._siblings(parents)
                parents = self._index(parents)
            levels.append(Level(
                self._tokens_of(level, lengths),
                Documents((0, *accumulate(lengths)), self.device),
                parents, siblings, d < depth,
            ))  # fmt: skip
        return tuple(levels)

    def _index(self, values: list[int]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.int64, device="cpu"), self.device)

    def _tokens_of(self, level: list[int], lengths: list[int]) -> slice | Tensor:
        starts = [self.offsets[i] for i in level]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        if starts[1:] == ends[:-1]:
            return slice(starts[0], ends[-1])
        both = zip(starts, ends, strict=True)
        return self._index([token for start, end in both for token in range(start, end)])

    def _siblings(self, parents: list[int]) -> tuple[tuple[Tensor, Tensor], ...]:
        children: dict[int, list[int]] = {}
        for child, parent in enumerate(parents):
            children.setdefault(parent, []).append(child)
        most = max(map(len, children.values()))
        turns = [{p: c[turn] for p, c in children.items() if turn < len(c)} for turn in range(most)]
        return tuple((self._index([*turn]), self._index([*turn.values()])) for turn in turns)

    @cached_property
    def _histories(self) -> dict[int, HistoryOfParents | None]:
        return {}

    def history(self, past: int) -> HistoryOfParents | None:
        """The ``past`` rows before each document, from its parents; None if there are none."""
        if past not in self._histories:
            self._histories[past] = self._history(past)
        return self._histories[past]

    def _history(self, past: int) -> HistoryOfParents | None:
        start, length = self.offsets, self.lengths_without_padding
        continuing = [i for i, path in enumerate(self.paths) if path and length[i]]
        if not (continuing and past):
            return None
        sent, history = [], []
        for i in continuing:
            row = []
            for ancestor in reversed(self.paths[i]):
                newest = start[ancestor] + length[ancestor] - 1
                row += range(newest, max(newest - length[ancestor], newest - past + len(row)), -1)
            history.append([len(sent) + age if age < len(row) else -1 for age in range(past)])
            sent += row
        host = torch.tensor
        first = host([start[i] for i in continuing], device="cpu")
        count = host([length[i] for i in continuing], device="cpu")
        before, rows = host(history, device="cpu"), host(sent, device="cpu")
        table = HistoryTable.build(first, count, before, rows, self.total_tokens, self.device)
        return HistoryOfParents(table, to_device(rows, self.device))


class HistoryOfParents:
    """The rows before each document, from its parents: a :class:`.front.history.HistoryLink`.

    Every child has a copy of the rows, so the gradients of the copies are summed in one order.
    """

    def __init__(self, table: HistoryTable, rows: Tensor) -> None:
        self.table, self._rows = table, rows

    def fetch(self, rows_sBC: Tensor) -> History:
        return History(rows_sBC.index_select(0, self._rows), self.table)

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        return d_rows_RBC

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
from .front.history import History, HistoryTable, join_ranges
from .host_tables import to_device
from .rules.base import (
    Gradients,
    Rule,
    RuleBackward,
    RuleForward,
    RuleOutput,
    SavedForBackward,
    map_inputs,
)
from .state_maps.state_map import StateMap
from .switches import full_fp32_matmul

# bytes; kernels take tensors whose addresses are multiples of this number
ALIGNMENT_BYTES = 16


class TreeLevel(NamedTuple):
    """The n documents with tokens that have the same number of ancestors; siblings are
    neighbours."""

    # indices of the level's tokens in the buffer, document after document
    token_indices: slice | Tensor
    documents: Documents  # boundaries of the documents among these tokens
    parents: Tensor  # int64 [n], the index of each document's parent in the level above
    # for each document, how many documents with tokens continue it
    child_counts: tuple[int, ...]

    def rows_of(self, x: Tensor) -> Tensor:
        """The rows of ``x [1, T, ...]`` at this level's tokens.

        Kernels require addresses that are multiples of ALIGNMENT_BYTES, so a slice at
        another address is copied.
        """
        if isinstance(self.token_indices, slice):
            rows = x[:, self.token_indices]
            if rows.data_ptr() % ALIGNMENT_BYTES == 0:
                return rows
            return rows.clone()
        return x.index_select(1, self.token_indices)


@dataclass(frozen=True, eq=False)
class TreeDocuments(Documents):
    """Documents with padding in one buffer; a document may continue an earlier one, its
    parent."""

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
        """Raise a ValueError unless each document has a parent before it, or none
        (-1)."""
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
    def boundary_key(self) -> tuple[int, ...]:
        return self.offsets + self.parents + self.lengths_without_padding

    @cached_property
    def ancestors(self) -> tuple[tuple[int, ...], ...]:
        """For each document its ancestors that have tokens, the oldest first."""
        ancestors: list[tuple[int, ...]] = []
        for parent in self.parents:
            if parent < 0:
                of_document = ()
            elif self.lengths_without_padding[parent] == 0:
                of_document = ancestors[parent]
            else:
                of_document = ancestors[parent] + (parent,)
            ancestors.append(of_document)
        return tuple(ancestors)

    def ancestor_slices(self, start: int) -> tuple[slice, ...]:
        """The tokens of the ancestors of the document that begins at token ``start``:
        one slice of the buffer per ancestor with tokens, the oldest first."""
        document = bisect_right(self.offsets, start) - 1
        return tuple(self._tokens_of(i) for i in self.ancestors[document])

    def _tokens_of(self, document: int) -> slice:
        """The tokens of a document in the buffer, without padding."""
        start = self.offsets[document]
        return slice(start, start + self.lengths_without_padding[document])

    @cached_property
    def _ancestor_token_counts(self) -> list[int]:
        """For each document, the number of tokens of all its ancestors."""
        length = self.lengths_without_padding
        return [sum(length[i] for i in ancestors) for ancestors in self.ancestors]

    @property
    def longest_sequence(self) -> int:
        """The largest sum of a document's tokens, its padding and the tokens of its
        ancestors."""
        return max(
            map(sum, zip(self._ancestor_token_counts, self.lengths, strict=True))
        )

    @cached_property
    def position_in_sequence_T(self) -> Tensor:
        """int32 ``[T]``: how many tokens come before each token, in its document and in
        all ancestors of this document."""
        before_N = torch.tensor(
            self._ancestor_token_counts, dtype=torch.int32, device="cpu"
        )
        before_T = before_N.repeat_interleave(
            torch.tensor(self.lengths, dtype=torch.int64, device="cpu")
        )
        return self.position_T + to_device(before_T, self.device)

    @cached_property
    def levels(self) -> tuple[TreeLevel, ...]:
        """The levels of the documents with tokens, from level 0 on. If a parent has no
        tokens, its children continue its nearest ancestor with tokens."""
        length = self.lengths_without_padding
        # the documents that continue each document; children[-1] are the documents
        # without a parent
        children: dict[int, list[int]] = {i: [] for i in range(-1, len(length))}
        for document, ancestors in enumerate(self.ancestors):
            if length[document]:
                parent = ancestors[-1] if ancestors else -1
                children[parent].append(document)
        if not children[-1]:
            raise ValueError(
                f"{self.total_tokens} tokens are padding of documents without tokens."
            )
        levels = []
        families = [children[-1]]  # the children of each document of the level above
        while members := list(chain.from_iterable(families)):
            starts = torch.tensor(
                [self.offsets[i] for i in members], dtype=torch.int64, device="cpu"
            )
            counts = [length[i] for i in members]
            tokens = join_ranges(
                starts, torch.tensor(counts, dtype=torch.int64, device="cpu")
            )
            side_by_side = bool((tokens.diff() == 1).all())
            if side_by_side:
                tokens = slice(int(tokens[0]), int(tokens[-1]) + 1)
            else:
                tokens = to_device(tokens, self.device)
            documents = Documents(tuple(accumulate(counts, initial=0)), self.device)
            # for each member the index of its parent among the level above
            parents = [n for n, family in enumerate(families) for _ in family]
            parents = to_device(
                torch.tensor(parents, dtype=torch.int64, device="cpu"), self.device
            )
            families = [children[i] for i in members]
            child_counts = tuple(map(len, families))
            levels.append(TreeLevel(tokens, documents, parents, child_counts))
        return tuple(levels)

    def to_buffer(self, rows_by_level: Sequence[Tensor]) -> Tensor:
        """Join the rows of all levels, ``[1, t, ...]`` for a level of t tokens, to
        ``[1, T, ...]``, with zeros at padding.

        If the entries are None, for a gradient that the rule does not have, the result
        is None.
        """
        first = rows_by_level[0]
        if first is None or first.shape[1] == self.total_tokens:
            return first
        buffer = first.new_zeros((1, self.total_tokens) + first.shape[2:])
        for rows, level in zip(rows_by_level, self.levels, strict=True):
            buffer[:, level.token_indices] = rows
        return buffer

    def history(self, past: int) -> HistoryOfParents | None:
        """The ``past`` rows before each document, from its ancestors; None if there are
        no such rows."""
        return self.keep(TreeDocuments._history, past)

    def _history(self, past: int) -> HistoryOfParents | None:
        """Compute :meth:`history`, which stores the result: for each document with
        ancestors, the last ``past`` tokens of these ancestors. Missing rows are
        zeros."""
        length = self.lengths_without_padding
        continuing = [
            document
            for document, ancestors in enumerate(self.ancestors)
            if ancestors and length[document]
        ]
        if not (continuing and past):
            return None
        copied = []  # the tokens whose rows are copied, for one document after another
        # for each document the indices in ``copied`` of the rows before it, the newest
        # first; -1 where its ancestors have no more rows
        before = []
        for document in continuing:
            newest = self._last_tokens_before(document, past)
            indices = range(len(copied), len(copied) + len(newest))
            before.append(list(indices) + [-1] * (past - len(newest)))
            copied += newest
        starts = [self.offsets[document] for document in continuing]
        counts = [length[document] for document in continuing]
        copied_T = torch.tensor(copied, dtype=torch.int64, device="cpu")
        table = HistoryTable.build(
            torch.tensor(starts, dtype=torch.int64, device="cpu"),
            torch.tensor(counts, dtype=torch.int64, device="cpu"),
            torch.tensor(before, dtype=torch.int64, device="cpu"),
            copied_T,
            self.total_tokens,
            self.device,
        )
        return HistoryOfParents(table, to_device(copied_T, self.device))

    def _last_tokens_before(self, document: int, most: int) -> list[int]:
        """The last tokens of the ancestors of ``document``, ``most`` at most, the
        newest first."""
        newest_first = []
        for ancestor in reversed(self.ancestors[document]):
            tokens = self._tokens_of(ancestor)
            newest_first.append(range(tokens.stop - 1, tokens.start - 1, -1))
        return list(islice(chain.from_iterable(newest_first), most))


class HistoryOfParents(NamedTuple):
    """A `HistoryLink` that copies the last rows of ancestors.

    The gradients of the copies are added to the rows in a fixed order.
    """

    table: HistoryTable
    row_indices: Tensor  # int64, indices of the copied rows in the buffer

    def fetch(self, rows_sBC: Tensor) -> History:
        return History(rows_sBC.index_select(0, self.row_indices), self.table)

    def give_back(self, d_rows_RBC: Tensor) -> Tensor:
        return d_rows_RBC


class ForwardByLevel(RuleForward):
    """The forward of :class:`RuleByLevel`: the inner rule runs one level after another,
    level 0 first."""

    documents: TreeDocuments

    def run(
        self, initial: Tensor | None = None, *, keep: bool = True, final: bool = False
    ) -> RuleOutput:
        """The output ``o [1, T, H, V]``, with zeros at padding.

        ``initial`` must be None and ``final`` False. Level 0 starts from zeros, a later
        level from its parents' final states. With ``keep``, the backward gets for each
        level the entering states, ``through`` and the inner rule's tensors. The first
        and the last level need no ``through``.
        """
        assert initial is None and not final
        inner = self.rule.rule
        outputs = []
        tensors = []
        level_values = []
        final_states = None  # of the level above
        for level in self.documents.levels:
            inputs = map_inputs(self.inputs, level.rows_of)
            forward = inner.begin(inputs, level.documents)
            entering = None
            through = None
            has_children = any(level.child_counts)
            if final_states is not None:
                entering = final_states.index_select(0, level.parents)
                if keep and has_children:
                    through = forward.state_map().through
            o, final_states, saved = forward.run(
                entering, keep=keep, final=has_children
            )
            outputs.append(o)
            tensors += (entering, through) + saved.tensors
            level_values.append(_LevelValues(saved.other_values, len(saved.tensors)))
        o = self.documents.to_buffer(outputs)
        saved_tensors = tuple(tensors) if keep else ()
        return RuleOutput(o, None, SavedForBackward(saved_tensors, tuple(level_values)))


class _LevelValues(NamedTuple):
    """What the backward of a level needs besides tensors."""

    rule_values: object  # ``SavedForBackward.other_values`` of the inner rule
    # how many tensors the inner rule saved; ``entering`` and ``through`` come before
    # these tensors
    tensor_count: int


class BackwardByLevel(RuleBackward):
    """The backward of :class:`RuleByLevel`: the inner rule's backward runs one level
    after another, the last level first."""

    documents: TreeDocuments

    def run(
        self, initial: Tensor | None = None, d_final: Tensor | None = None
    ) -> Gradients:
        """The gradients of the inputs, ``[1, T, ...]``, with zeros at padding.

        ``initial`` and ``d_final`` must be None. In the loop ``d_final`` holds dS_out
        of one level's documents, None for the last level. ``d_initial()`` gives dS_in
        for dS_out = 0; the state map adds ``through^T dS_out``, one document at a time,
        so that no document changes another one's bits.
        """
        assert initial is None and d_final is None
        inner = self.rule.rule
        tensors = list(self.saved.tensors)
        grads_by_level = []
        levels = self.documents.levels
        for number, level in reversed(list(enumerate(levels))):
            rule_values, tensor_count = self.saved.other_values[number]
            entering, through, *rule_tensors = tensors[-tensor_count - 2 :]
            del tensors[-tensor_count - 2 :]
            inputs = map_inputs(self.inputs, level.rows_of)
            saved = SavedForBackward(tuple(rule_tensors), rule_values)
            backward = inner.begin_backward(
                level.rows_of(self.d_o), inputs, saved, level.documents
            )
            d_entering = None
            if number:
                d_entering = backward.d_initial()
            if d_entering is not None and d_final is not None:
                # ``transposed`` reads no ``local``, so any tensor can stand for it
                maps = StateMap(d_entering, through).transposed(d_entering)
                d_entering = _apply_one_by_one(maps, d_final)
            grads_by_level.insert(0, backward.run(entering, d_final))
            if d_entering is not None:
                # a parent's dS_out is the sum of its children's dS_in
                families = d_entering.split(levels[number - 1].child_counts)
                d_final = torch.stack([family.sum(0) for family in families])
        joined = map(self.documents.to_buffer, zip(*grads_by_level, strict=True))
        return grads_by_level[0]._make(joined)


def _apply_one_by_one(maps: StateMap, states: Tensor) -> Tensor:
    """``maps.apply(states)`` with one product per document, so that other documents do
    not change a document's bits."""
    results = []
    with full_fp32_matmul(states.device.type):
        for local, through, state in zip(maps.local, maps.through, states, strict=True):
            results.append(StateMap(local, through).apply(state))
        return torch.stack(results)


class RuleByLevel(Rule):
    """Runs ``rule`` once for each level of a tree; at padding ``o`` and all gradients
    are zero."""

    forward_class = ForwardByLevel
    backward_class = BackwardByLevel

    def __init__(self, rule: Rule) -> None:
        """``rule`` runs the documents of one level as packed documents."""
        self.rule = rule
        self.name = rule.name
        self.bits = rule.bits
        self.backward_reads = rule.backward_reads

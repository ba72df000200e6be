"""Trees of documents, and the same sequences laid out separately: the oracle of tree
packing."""

import random
from collections.abc import Callable
from itertools import accumulate
from typing import NamedTuple

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_gdn import tree_packed_seq_params
from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.trees import TreeDocuments


class Tree(NamedTuple):
    """Documents of ``lengths`` tokens in slots of a ``multiple``; each continues its
    parent."""

    parents: tuple[int, ...]
    lengths: tuple[int, ...]
    multiple: int = 1

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple(
            -(-length // self.multiple) * self.multiple for length in self.lengths
        )

    @property
    def documents(self) -> TreeDocuments:
        offsets = (0, *accumulate(self.slots))
        return TreeDocuments(offsets, torch.device("cpu"), self.parents, self.lengths)

    @property
    def params(self) -> PackedSeqParams:
        return self.params_on("cpu")

    def params_on(self, device: str) -> PackedSeqParams:
        return tree_packed_seq_params(
            self.lengths, self.parents, multiple_of=self.multiple, device=device
        )

    def without_padding(self, x: Tensor) -> Tensor:
        """``x [S, ...]``, 0 at padding."""
        tokens = separately(self).tokens
        return x.new_zeros(x.shape).index_copy(0, tokens, x[tokens])

    def path(self, document: int) -> list[int]:
        """The document and all that it continues, from the first one on."""
        parent = self.parents[document]
        return [*(self.path(parent) if parent >= 0 else []), document]

    def tokens(self, document: int) -> list[int]:
        """Where the document's tokens lie in the buffer."""
        start = sum(self.slots[:document])
        return list(range(start, start + self.lengths[document]))


class Separately(NamedTuple):
    """Every document, with all that it continues, as a sequence in the buffer of
    ``documents``: the tree's token of each of its tokens (``source``), each document's
    own tokens there (``kept``) and in the tree's buffer (``tokens``), in the order of
    the documents."""

    documents: Documents
    source: Tensor
    kept: Tensor
    tokens: Tensor

    def run(
        self, x: Tensor, forward: Callable[[Tensor, tuple[int, ...]], Tensor]
    ) -> Tensor:
        """What ``forward(rows, lengths)`` gives of the tree's tokens ``x [S, B, ...]``;
        else 0."""
        y = forward(x[self.source], self.documents.lengths)
        return y.new_zeros(len(x), *y.shape[1:]).index_copy(
            0, self.tokens, y[self.kept]
        )


def random_tree(
    seed: int, multiple: int = 1, most: int = 12, longest: int = 70
) -> Tree:
    """Up to ``most`` documents, up to four below each other; empty ones and single
    tokens too."""
    draw = random.Random(seed)
    parents = [-1]
    depth = [1]
    for index in range(1, draw.randint(2, most)):
        legal = [i for i in range(index) if depth[i] < 4 and parents.count(i) < 16]
        chosen = [-1, draw.choice(legal), legal[-1], parents[-1]]
        parent = draw.choices(chosen, [1, 2, 2, 4])[0]
        parents.append(parent if parent in legal else -1)
        depth.append(1 if parents[-1] < 0 else depth[parents[-1]] + 1)
    lengths = [draw.choice([0, 1, 2, 3, draw.randint(1, longest)]) for _ in parents]
    if not any(lengths):
        lengths[0] = 1
    return Tree(tuple(parents), tuple(lengths), multiple)


def separately(tree: Tree) -> Separately:
    source = []
    kept = []
    ends = [0]
    for document in range(len(tree.parents)):
        for part in tree.path(document):
            source += tree.tokens(part)
        kept += range(len(source) - tree.lengths[document], len(source))
        ends.append(len(source))
    return Separately(
        Documents(tuple(ends), torch.device("cpu")),
        torch.tensor(source, dtype=torch.int64),
        torch.tensor(kept, dtype=torch.int64),
        torch.tensor([t for d in range(len(tree.parents)) for t in tree.tokens(d)]),
    )

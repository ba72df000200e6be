"""How a layout cuts documents into fragments and pieces (pictured in ``docs/glossary.md``).

States and rows travel along *chains* of fragments. In zigzag every document is a chain; in the
other layouts the whole buffer is one.

Legend: R ranks, n nodes (fragments) of a chain, h of them on a rank, C chains, M documents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ..layouts import SequenceLayout, require_cut, require_fragments


def number_of_nodes(cp_size: int, layout: SequenceLayout) -> int:
    return cp_size if layout is SequenceLayout.CONTIGUOUS else 2 * cp_size


def nodes_of(rank: int, cp_size: int, layout: SequenceLayout) -> slice:
    """Which nodes of a chain a rank holds."""
    if layout is SequenceLayout.CONTIGUOUS:
        return slice(rank, rank + 1)
    return slice(rank, 2 * cp_size - rank, 2 * cp_size - 1 - 2 * rank)


class Fragments(NamedTuple):
    """All fragments, int64 ``[n, C]``, and the documents' starts."""

    begin: Tensor  # in the stream
    end: Tensor
    local: Tensor  # where a fragment begins in its rank's tokens
    first: Tensor  # where the document of its first piece begins in the stream
    first_end: Tensor
    last: Tensor  # where the document of its last piece begins in the stream
    last_end: Tensor

    @property
    def enters(self) -> Tensor:
        """Whether a state enters: the first piece continues a document."""
        return (self.first < self.begin) & (self.begin < self.end)

    @property
    def leaves(self) -> Tensor:
        """Whether a state leaves: the last piece's document continues."""
        return (self.last_end > self.end) & (self.begin < self.end)

    @property
    def passes(self) -> Tensor:
        """Whether a state passes from one end of the fragment to the other."""
        return self.enters & self.leaves & (self.first == self.last)


def fragments_of(documents: Documents, cp_size: int, layout: SequenceLayout) -> Fragments:
    """The fragments of all documents; errors are those of :func:`..layouts.check_lengths`."""
    require_cut(documents, cp_size, layout)
    key = (Fragments, cp_size, layout)
    return documents.table(key, lambda these: _fragments(these, cp_size, layout), move=False)


def _fragments(documents: Documents, cp_size: int, layout: SequenceLayout) -> Fragments:
    starts = documents.starts.long()
    if layout is SequenceLayout.ZIGZAG:
        ends = starts[: documents.most + 1]
        require_fragments(documents, ends.diff(), cp_size)
    else:
        ends = torch.cat([starts[:1], starts[-1:]])
    n = number_of_nodes(cp_size, layout)
    node, length = torch.arange(n, device=starts.device)[:, None], ends.diff() // n
    begin = ends[:-1] + node * length
    end = begin + length
    first, last = (
        torch.searchsorted(starts[1:], token, right=True).clamp(max=len(starts) - 2)
        for token in (begin, end - 1)
    )
    return Fragments(
        begin=begin, end=end, local=ends[:-1] // cp_size + (node >= cp_size) * length,
        first=starts[first], first_end=starts[first + 1],
        last=starts[last], last_end=starts[last + 1],
    )  # fmt: skip


def any_continues(documents: Documents, cp_size: int, layout: SequenceLayout) -> bool:
    """Whether a fragment may continue a document that another one began."""
    made = fragments_of(documents, cp_size, layout)
    return not documents.known or bool(made.enters.any())


def pieces_of(documents: Documents, cp_size: int, layout: SequenceLayout, rank: int) -> Documents:
    """The boundaries of a rank's pieces."""
    fragments_of(documents, cp_size, layout)
    # A rank has at most two fragments of the buffer, and at most one document lies in both.
    most = documents.most + 1
    if layout is SequenceLayout.ZIGZAG:
        most = 2 * documents.most
    return documents.cut(
        ("pieces", cp_size, layout, rank),
        lambda these: _boundaries(these, cp_size, layout, nodes_of(rank, cp_size, layout)),
        most,
        documents.total_tokens // cp_size,
    )


def _boundaries(
    documents: Documents, cp_size: int, layout: SequenceLayout, own: slice
) -> tuple[Tensor]:
    all_of_them, starts = fragments_of(documents, cp_size, layout), documents.starts
    begin, end, local = (x[own] for x in all_of_them[:3])
    if layout is SequenceLayout.ZIGZAG:
        inside = local.T
    else:
        inside = local + torch.minimum((starts - begin).clamp(min=0), end - begin)
    total = starts[-1:] // cp_size
    return (torch.cat([inside.flatten(), total]).int(),)

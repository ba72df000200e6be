"""How a layout cuts documents into fragments and pieces (pictured in
``docs/glossary.md``).

States and rows travel from fragment to fragment of a *chain*. In zigzag the fragments
of each document form a chain; in the other layouts the fragments of the whole buffer
form one chain.

Legend: n nodes of a chain (a node is one fragment of the chain), C chains.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ..layouts import SequenceLayout, require_cut, require_fragments


class Nodes(NamedTuple):
    """The nodes of a chain in order; node j is fragment ``slots[j]`` of rank
    ``hosts[j]``."""

    hosts: tuple[int, ...]
    slots: tuple[int, ...]


class Cutting(NamedTuple):
    """How ``cp_size`` ranks cut sequences into fragments; ``rank`` is the rank of this
    process."""

    cp_size: int
    layout: SequenceLayout
    rank: int

    @property
    def nodes(self) -> Nodes:
        """The nodes of a chain in sequence order."""
        up = tuple(range(self.cp_size))
        down = up[::-1]
        if self.layout is SequenceLayout.CONTIGUOUS:
            return Nodes(up, (0,) * len(up))
        if self.joins_middle:
            down = down[1:]
        return Nodes(up + down, (0,) * len(up) + (1,) * len(down))

    @property
    def joins_middle(self) -> bool:
        """Whether the last rank holds one fragment, twice as long as those of other
        ranks.

        Zigzag gives the last rank two stretches that follow each other. In a buffer
        they are one fragment, so that a document inside them is not cut. Every document
        has these stretches in ZIGZAG; there they stay two, as on the other ranks.
        """
        return self.layout is SequenceLayout.ZIGZAG_BUFFER

    @property
    def own(self) -> slice:
        """A slice that selects the nodes of ``rank`` among the nodes of a chain."""
        rank = self.rank
        hosts = self.nodes.hosts
        if hosts.count(rank) == 1:
            return slice(rank, rank + 1)
        second = len(hosts) - 1 - rank
        return slice(rank, second + 1, second - rank)


class Fragments(NamedTuple):
    """Where fragments lie: int64 ``[nodes, chains]``, all sequence positions but
    ``local``."""

    begin: Tensor
    end: Tensor
    # index of the fragment's first token among the tokens of the fragment's rank
    local: Tensor
    # begin and end of the document to which the fragment's first token belongs
    first: Tensor
    first_end: Tensor
    # begin and end of the document to which the fragment's last token belongs
    last: Tensor
    last_end: Tensor

    @property
    def enters(self) -> Tensor:
        """Whether a state enters a fragment: True if its first piece continues a
        document."""
        return (self.first < self.begin) & (self.begin < self.end)

    @property
    def leaves(self) -> Tensor:
        """Whether a state leaves a fragment: True if its last document goes on in the
        next one."""
        return (self.last_end > self.end) & (self.begin < self.end)

    @property
    def passes(self) -> Tensor:
        """Whether a state enters and leaves a fragment that lies inside one
        document."""
        return self.enters & self.leaves & (self.first == self.last)


def fragments_of(documents: Documents, cutting: Cutting) -> Fragments:
    """The fragments that ``cutting`` makes; errors as in
    :func:`..layouts.check_lengths`."""
    require_cut(documents, cutting.cp_size, cutting.layout)
    return documents.keep_tensors(_cut_fragments, cutting, move=False)


def _cut_fragments(documents: Documents, cutting: Cutting) -> Fragments:
    """Compute :func:`fragments_of` from the boundaries of ``documents``."""
    starts = documents.starts.long()
    cp_size = cutting.cp_size
    if cutting.layout is SequenceLayout.ZIGZAG:
        ends = starts[: documents.max_filled + 1]
        require_fragments(documents, ends.diff(), cp_size)
    else:
        ends = torch.cat([starts[:1], starts[-1:]])
    node = torch.arange(len(cutting.nodes.hosts), device=starts.device)[:, None]
    second = (node >= cp_size).long()
    if cutting.layout is SequenceLayout.CONTIGUOUS:
        length = ends.diff() // cp_size
    else:
        length = ends.diff() // (2 * cp_size)
    begin = ends[:-1] + node * length
    end = begin + length
    if cutting.joins_middle:
        begin = begin + second * length
        end = end + (node >= cp_size - 1) * length
    first, last = (
        torch.searchsorted(starts[1:], token, right=True).clamp(max=len(starts) - 2)
        for token in (begin, end - 1)
    )
    return Fragments(
        begin=begin,
        end=end,
        local=ends[:-1] // cp_size + second * length,
        first=starts[first],
        first_end=starts[first + 1],
        last=starts[last],
        last_end=starts[last + 1],
    )


def any_document_is_cut(documents: Documents, cutting: Cutting) -> bool:
    """Whether a document lies in several fragments; True if the host does not know the
    lengths."""
    fragments = fragments_of(documents, cutting)
    return not documents.known_on_host or bool(fragments.enters.any())


def pieces_of(documents: Documents, cutting: Cutting) -> Documents:
    """Boundaries of the pieces that ``cutting.rank`` holds, counted in this rank's
    tokens."""
    # A rank has at most two fragments of the buffer, and at most one document is in
    # both fragments.
    most = documents.max_filled + 1
    if cutting.layout is SequenceLayout.ZIGZAG:
        most = 2 * documents.max_filled
    tokens = documents.total_tokens // cutting.cp_size
    return documents.keep_documents(
        _piece_boundaries, cutting, max_filled=most, tokens=tokens
    )


def _piece_boundaries(documents: Documents, cutting: Cutting) -> tuple[Tensor]:
    """One int32 tensor: the first token of each piece of this rank, then the rank's
    token count."""
    fragments = fragments_of(documents, cutting)
    starts = documents.starts
    begin, end, local = (x[cutting.own] for x in fragments[:3])
    if cutting.layout is SequenceLayout.ZIGZAG:
        begins = local.T
    else:
        begins = local + torch.minimum((starts - begin).clamp(min=0), end - begin)
    total = starts[-1:] // cutting.cp_size
    return (torch.cat([begins.flatten(), total]).int(),)

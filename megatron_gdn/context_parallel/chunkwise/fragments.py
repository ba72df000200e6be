"""How a layout cuts documents into fragments and pieces (pictured in
``docs/glossary.md``).

The *nodes* of a *chain* are its fragments in sequence order; ranks send states and rows
from node to node. In zigzag each document is a chain. In the other layouts the whole
buffer is the only chain.

Legend: n nodes of a chain, C chains.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...ops.documents import Documents
from ..layouts import (
    SequenceLayout,
    require_divisible_lengths,
    require_divisible_on_device,
)


class Nodes(NamedTuple):
    """Where the nodes of a chain are, in sequence order.

    Rank ``ranks[j]`` holds node j. ``fragment_numbers[j]`` is 0 if node j is the first
    fragment of the chain on that rank, 1 if it is the second.
    """

    ranks: tuple[int, ...]
    fragment_numbers: tuple[int, ...]


class SequencePartition(NamedTuple):
    """How the data loader divided sequences among ``cp_size`` ranks."""

    cp_size: int
    layout: SequenceLayout
    rank: int  # of this process, in the context-parallel group

    @property
    def nodes(self) -> Nodes:
        """The nodes of a chain, the same in every chain.

        In zigzag the first cp nodes are the first fragments of ranks 0 .. cp - 1. The
        others are the second fragments of ranks cp - 1 .. 0. With
        ``joins_middle_fragments`` the two middle fragments, both of the last rank, are
        one node.
        """
        up = tuple(range(self.cp_size))
        down = up[::-1]
        if self.layout is SequenceLayout.CONTIGUOUS:
            return Nodes(up, (0,) * len(up))
        if self.joins_middle_fragments:
            down = down[1:]
        return Nodes(up + down, (0,) * len(up) + (1,) * len(down))

    @property
    def joins_middle_fragments(self) -> bool:
        """Whether the last rank holds one fragment, twice as long as a fragment of
        another rank.

        A zigzag of 2 cp parts gives the last rank the parts cp - 1 and cp, which are
        adjacent. ZIGZAG_BUFFER counts the two parts as one fragment, so that a document
        inside the two parts is not cut. In ZIGZAG each rank has two fragments of every
        document.
        """
        return self.layout is SequenceLayout.ZIGZAG_BUFFER

    @property
    def own_nodes(self) -> slice:
        """A slice that selects the one or two nodes of ``rank`` among the n nodes of a
        chain."""
        rank = self.rank
        ranks = self.nodes.ranks
        if ranks.count(rank) == 1:
            return slice(rank, rank + 1)
        # The second half of a zigzag has the ranks in reverse order. The slice's step
        # leaves out the nodes of other ranks.
        second = len(ranks) - 1 - rank
        return slice(rank, second + 1, second - rank)


class Fragments(NamedTuple):
    """Where all ranks' fragments begin and end; each field is int64 ``[n, C]``.

    All fields but ``local_begin`` are positions in the sequence. An ``end`` is one past
    the last token.
    """

    begin: Tensor
    end: Tensor
    # index of the fragment's first token among the tokens of the fragment's rank
    local_begin: Tensor
    # where the document with the fragment's first token begins and ends
    first_document_begin: Tensor
    first_document_end: Tensor
    # the same for the document with the fragment's last token
    last_document_begin: Tensor
    last_document_end: Tensor

    @property
    def state_enters(self) -> Tensor:
        """bool ``[n, C]``: whether the fragment begins inside a document, so that a
        state enters."""
        return (self.first_document_begin < self.begin) & (self.begin < self.end)

    @property
    def state_leaves(self) -> Tensor:
        """bool ``[n, C]``: whether the fragment ends inside a document, so that a state
        leaves."""
        return (self.last_document_end > self.end) & (self.begin < self.end)

    @property
    def state_passes(self) -> Tensor:
        """bool ``[n, C]``: whether the state that leaves the fragment depends on the
        state that enters. Then one document covers the whole fragment and goes on at
        both ends."""
        one_document = self.first_document_begin == self.last_document_begin
        return self.state_enters & self.state_leaves & one_document


def fragments_of(documents: Documents, partition: SequencePartition) -> Fragments:
    """The fragments of ``documents`` on all ranks, stored on ``documents``.

    The tensors are on the host; for fixed buffers they are on the device. Raises the
    errors of :func:`..layouts.check_lengths`.
    """
    require_divisible_lengths(documents, partition.cp_size, partition.layout)
    return documents.keep_tensors(_cut_fragments, partition, move=False)


def _cut_fragments(documents: Documents, partition: SequencePartition) -> Fragments:
    """Compute :func:`fragments_of` from the boundaries of ``documents``.

    These are torch operations, which run on the device in fixed buffers.
    """
    starts = documents.starts.long()
    cp_size = partition.cp_size
    if partition.layout is SequenceLayout.ZIGZAG:
        # [C + 1]; in fixed buffers without the last sequence, which is always empty
        chain_bounds = starts[: documents.max_filled + 1]
        require_divisible_on_device(documents, chain_bounds.diff(), cp_size)
    else:
        chain_bounds = torch.cat([starts[:1], starts[-1:]])
    node = torch.arange(len(partition.nodes.ranks), device=starts.device)[:, None]
    second = (node >= cp_size).long()  # 1 for a rank's second fragment
    if partition.layout is SequenceLayout.CONTIGUOUS:
        length = chain_bounds.diff() // cp_size
    else:
        length = chain_bounds.diff() // (2 * cp_size)
    begin = chain_bounds[:-1] + node * length
    end = begin + length
    if partition.joins_middle_fragments:
        # Node cp - 1 is twice as long as each other node.
        begin = begin + second * length
        end = end + (node >= cp_size - 1) * length
    # The index of the document that holds each fragment's first and last token. An
    # empty fragment may begin after the last token, so indices are clamped.
    first, last = (
        torch.searchsorted(starts[1:], token, right=True).clamp(max=len(starts) - 2)
        for token in (begin, end - 1)
    )
    return Fragments(
        begin=begin,
        end=end,
        local_begin=chain_bounds[:-1] // cp_size + second * length,
        first_document_begin=starts[first],
        first_document_end=starts[first + 1],
        last_document_begin=starts[last],
        last_document_end=starts[last + 1],
    )


def any_document_is_cut(documents: Documents, partition: SequencePartition) -> bool:
    """Whether any document has tokens in several fragments; True if the host does not
    know the lengths."""
    fragments = fragments_of(documents, partition)
    return not documents.known_on_host or bool(fragments.state_enters.any())


def pieces_of(documents: Documents, partition: SequencePartition) -> Documents:
    """Boundaries of the pieces that ``partition.rank`` holds, as offsets in this rank's
    tokens. They are stored on ``documents``."""
    # A rank has at most two fragments of the buffer, and at most one document is in
    # both fragments.
    most_pieces = documents.max_filled + 1
    if partition.layout is SequenceLayout.ZIGZAG:
        most_pieces = 2 * documents.max_filled
    tokens = documents.total_tokens // partition.cp_size
    return documents.keep_documents(
        _piece_boundaries, partition, max_filled=most_pieces, tokens=tokens
    )


def _piece_boundaries(
    documents: Documents, partition: SequencePartition
) -> tuple[Tensor]:
    """A tuple of one int32 tensor, as `Documents.keep_documents` needs: the first token
    of each piece of this rank, then the rank's token count."""
    fragments = fragments_of(documents, partition)
    starts = documents.starts
    begin = fragments.begin[partition.own_nodes]
    end = fragments.end[partition.own_nodes]
    local_begin = fragments.local_begin[partition.own_nodes]
    if partition.layout is SequenceLayout.ZIGZAG:
        begins = local_begin.T  # every fragment is one piece
    else:
        # [h, N + 1]: where each document begins in each of this rank's h fragments. A
        # document without tokens in the fragment gives an empty piece at the
        # fragment's begin or end; keep_documents leaves empty pieces out.
        offset = torch.minimum((starts - begin).clamp(min=0), end - begin)
        begins = local_begin + offset
    total = starts[-1:] // partition.cp_size
    return (torch.cat([begins.flatten(), total]).int(),)

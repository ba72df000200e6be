"""How a layout cuts documents into pieces and gives them to ranks; host arithmetic only.

Every layout cuts the packed stream into *fragments*. One rank holds all tokens of a fragment, side
by side. There are 2 * cp fragments of every document (zigzag) or of the whole buffer
(zigzag_buffer), or cp of the buffer (contiguous). A document end inside a fragment cuts it into
*pieces*, each of one document. So a document is a chain of pieces on changing ranks, and a rank
holds pieces of many documents. ``docs/glossary.md`` has a picture.

Legend: N pieces, T tokens of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
from torch import Tensor

from ..layouts import SequenceLayout, rank_order_of_sequence


@dataclass(frozen=True, eq=False)
class Pieces:
    """All N non-empty pieces of a stream, in stream order; int64 tensors on the host.

    Attributes:
        start: where each begins in the stream.
        length: its tokens, at least 1.
        seen: tokens of its document before it; 0 starts a document.
        left: tokens of its document after it; 0 ends one.
        fragment: the one it lies in, counted along the stream; in zigzag there are 2 * cp for each
            non-empty document.
        rank, local_start: who holds it, and where in that rank's tokens it begins.
        place: ``[T]``, every stream token's place in rank order.
        tokens: of each rank.
    """

    start: Tensor
    length: Tensor
    seen: Tensor
    left: Tensor
    fragment: Tensor
    rank: Tensor
    local_start: Tensor
    place: Tensor
    tokens: int

    def held_by(self, rank: int) -> Tensor:
        """Indices of this rank's pieces, in the order it holds them."""
        mine = (self.rank == rank).nonzero().flatten()
        return mine[self.local_start[mine].argsort()]

    @cached_property
    def any_continues(self) -> bool:
        """Whether any piece continues a document that another piece began."""
        return bool((self.seen > 0).any())


@lru_cache(maxsize=16)
def pieces_of(lengths: tuple[int, ...], cp_size: int, layout: SequenceLayout) -> Pieces:
    """Cut documents of these lengths; a ValueError says which length does not divide."""
    place = rank_order_of_sequence(lengths, cp_size, layout)
    total = sum(lengths)
    kept = torch.tensor([n for n in lengths if n], dtype=torch.int64, device="cpu")
    ends = kept.cumsum(0)
    starts = ends - kept
    if layout is SequenceLayout.ZIGZAG:
        number_2cp = torch.arange(2 * cp_size, device="cpu")
        tokens_N = kept // (2 * cp_size)
        fragment_start = (starts[:, None] + tokens_N[:, None] * number_2cp).flatten()
    else:
        count = cp_size if layout is SequenceLayout.CONTIGUOUS else 2 * cp_size
        fragment_start = torch.arange(count if total else 0, device="cpu") * (total // count)
    start = torch.cat([fragment_start, starts]).unique()  # sorted
    length = torch.diff(start, append=kept.new_tensor([total]))
    document = torch.searchsorted(starts, start, right=True) - 1
    tokens = total // cp_size
    return Pieces(
        start=start,
        length=length,
        seen=start - starts[document],
        left=ends[document] - start - length,
        fragment=torch.searchsorted(fragment_start, start, right=True) - 1,
        rank=place[start] // max(tokens, 1),
        local_start=place[start] % max(tokens, 1),
        place=place,
        tokens=tokens,
    )

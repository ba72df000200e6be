"""Computes the token indices of context-parallel sequence layouts, without
communication.

    sequence order   document 0, document 1, ...
    rank order       the tokens of rank 0, of rank 1, ..., concatenated

    undo = rank_order_of_sequence(lengths, cp)     each sequence position's place in
                                                   rank order
    x_sequence = x_rank[undo],  x_rank = x_sequence[inverse(undo)]

Legend: R context-parallel ranks, T tokens of the buffer, s = T / R tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache, partial

import torch
from torch import Tensor

from ..ops.documents import Documents, one_document
from ..ops.layout import SizeError
from ..ops.static_documents import StaticDocuments, require_on_device


class SequenceLayout(StrEnum):
    """How the data loader cut a sequence among context-parallel ranks.

    Zigzag (DualChunkSwap) cuts tokens into ``2 * cp`` equal fragments; rank ``r`` holds
    the fragments ``r`` and ``2 * cp - 1 - r``, which balances causal attention.

    ZIGZAG cuts every document in zigzag (a row that is not packed counts as a
    document), as Transformer Engine does. ZIGZAG_BUFFER cuts the whole buffer in
    zigzag, as Megatron's ``--dataloader-inter-document-masking`` does. CONTIGUOUS cuts
    the buffer into ``cp`` equal fragments; rank ``r`` holds fragment ``r``.
    """

    ZIGZAG = "zigzag"
    ZIGZAG_BUFFER = "zigzag_buffer"
    CONTIGUOUS = "contiguous"

    @classmethod
    def parse(cls, value: str | SequenceLayout) -> SequenceLayout:
        """The layout named ``value``; raises a ValueError that lists the legal
        names."""
        return parse_member(cls, value, "context-parallel layout")


def parse_member[Kind: StrEnum](kind: type[Kind], value: object, setting: str) -> Kind:
    """The member of enum ``kind`` for ``value``; ``setting`` is the option's name for
    errors."""
    try:
        return kind(value)
    except ValueError:
        legal = ", ".join(repr(member.value) for member in kind)
        raise ValueError(f"unknown {setting} {value!r}; use one of {legal}.") from None


def check_lengths(
    lengths: Sequence[int],
    cp_size: int,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG,
) -> None:
    """Raise a ValueError if ``cp_size`` ranks cannot share documents of these
    ``lengths``."""
    layout = SequenceLayout.parse(layout)
    if cp_size == 1:
        return
    if layout is SequenceLayout.ZIGZAG:
        multiple = 2 * cp_size
        wholes = lengths
        unit = "sequence"
    else:
        if layout is SequenceLayout.CONTIGUOUS:
            multiple = cp_size
        else:
            multiple = 2 * cp_size
        wholes = [sum(lengths)]
        unit = "packed buffer"
    for index, length in enumerate(wholes):
        if length % multiple:
            by_document = layout is SequenceLayout.ZIGZAG
            if by_document:
                passed = " and pass the padded boundaries as cu_seqlens_q_padded"
            else:
                passed = ""
            raise SizeError(
                f"{unit} {index} has {length} tokens, which is not a multiple of "
                f"{multiple}: the {layout.value!r} layout cuts it into {multiple} "
                f"equal fragments for context_parallel_size={cp_size}. Pad the {unit} "
                f"to {-(-length // multiple) * multiple} tokens{passed}; or, if the "
                "data loader uses another layout, name that layout as cp_layout: "
                f"{', '.join(repr(other.value) for other in SequenceLayout if other != layout)}."
            )


def rank_order_of_sequence(
    lengths: Sequence[int],
    cp_size: int,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG,
) -> Tensor:
    """For every token in sequence order, its place in rank order.

    Args:
        lengths: tokens of each document of the buffer, in order; zero is allowed. One
            entry if nothing is packed.
        cp_size: number of context-parallel ranks.
        layout: how the buffer was cut.

    Returns:
        int64 ``[T]`` on the CPU, a permutation of ``0 .. T-1`` with
        ``T = sum(lengths)``.

    Raises:
        ValueError: the ranks cannot divide a length equally among them
            (:func:`check_lengths`).
    """
    layout = SequenceLayout.parse(layout)
    check_lengths(lengths, cp_size, layout)
    total = sum(lengths)
    if cp_size == 1 or layout is SequenceLayout.CONTIGUOUS:
        return torch.arange(total, device="cpu")
    if layout is SequenceLayout.ZIGZAG_BUFFER:
        lengths = [total]

    length_N = torch.tensor(lengths, dtype=torch.int64, device="cpu")
    start_N = length_N.cumsum(0) - length_N
    return zigzag_places(
        start_N.repeat_interleave(length_N),
        length_N.repeat_interleave(length_N),
        cp_size,
    )


def zigzag_places(start_T: Tensor, length_T: Tensor, cp_size: int) -> Tensor:
    """Each token's place in rank order; ``start_T``, ``length_T``: its document's
    start, length."""
    total = len(start_T)
    offset_T = torch.arange(total, device=start_T.device) - start_T
    fragment_tokens_T = length_T // (2 * cp_size)
    fragment_T = offset_T // fragment_tokens_T
    second_T = fragment_T >= cp_size
    rank_T = torch.where(second_T, 2 * cp_size - 1 - fragment_T, fragment_T)
    # On each rank, the share of a document follows the shares of all earlier documents.
    place_T = (
        start_T // cp_size + offset_T % fragment_tokens_T + second_T * fragment_tokens_T
    )
    return rank_T * (total // cp_size) + place_T


def inverse(permutation_T: Tensor) -> Tensor:
    """The permutation that undoes ``permutation_T``: ``inverse(p)[p] == arange``."""
    inverse_T = torch.empty_like(permutation_T)
    inverse_T[permutation_T] = torch.arange(
        permutation_T.numel(), dtype=permutation_T.dtype, device=permutation_T.device
    )
    return inverse_T


def local_indices(
    lengths: Sequence[int],
    cp_size: int,
    cp_rank: int,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG,
) -> Tensor:
    """Sequence positions of one rank's tokens, in the rank's order: int64
    ``[T / cp_size]``, CPU.

    A data loader gives the rank ``tokens[..., local_indices(lengths, cp, rank)]``. For
    batch rows that are not packed, ``lengths`` has one entry, the tokens of a row.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not one of 0 .. {cp_size - 1}.")
    return inverse(rank_order_of_sequence(lengths, cp_size, layout)).view(cp_size, -1)[
        cp_rank
    ]


@lru_cache(maxsize=16)
def positions(lengths: tuple[int, ...], cp_size: int, layout: SequenceLayout) -> Tensor:
    """The sequence positions of every rank's tokens, in the rank's order: int64
    ``[R, s]``, CPU."""
    return inverse(rank_order_of_sequence(lengths, cp_size, layout)).view(cp_size, -1)


def documents_cut_by(
    layout: SequenceLayout,
    documents: Documents | None,
    tokens: int,
    device: torch.device,
) -> Documents:
    """What ``layout`` cuts: ``documents`` (ZIGZAG), or the buffer of ``tokens`` as one
    document."""
    if documents is not None and layout is SequenceLayout.ZIGZAG:
        return documents
    return one_document(tokens, device)


def positions_of(cut: Documents, cp_size: int, layout: SequenceLayout) -> Tensor:
    """:func:`positions` of documents ``cut``; on their device if the host knows no
    lengths."""
    if cut.known_on_host:
        return positions(cut.lengths, cp_size, layout)
    require_cut(cut, cp_size, layout)
    return cut.keep_tensors(_zigzag_positions, cp_size)[0]


def require_cut(documents: Documents, cp_size: int, layout: SequenceLayout) -> None:
    """Raise a ValueError if the host knows a length that the ranks cannot divide among
    them."""
    if documents.known_on_host:
        lengths = documents.lengths
    else:
        lengths = (documents.total_tokens,)
    check_lengths(lengths, cp_size, layout)


def _zigzag_positions(documents: Documents, cp_size: int) -> tuple[Tensor]:
    """The result of :func:`positions` for zigzag, computed on the device."""
    start = documents.cu_seqlens.long()
    document_T = documents.document_T()
    length = start.diff()
    require_fragments(documents, length, cp_size)
    places_T = zigzag_places(start[document_T], length[document_T], cp_size)
    return (inverse(places_T).view(cp_size, -1),)


def require_fragments(documents: Documents, length: Tensor, cp_size: int) -> None:
    """Check that ``2 * cp_size`` divides each document's ``length``; fixed buffers
    check it again whenever ``StaticDocuments.fill`` writes other lengths."""
    if isinstance(documents, StaticDocuments):
        demand = partial(check_lengths, cp_size=cp_size, layout=SequenceLayout.ZIGZAG)
        documents.add_check((require_fragments, cp_size), demand)
        require_on_device(
            (length % (2 * cp_size) == 0).all(),
            f"every document must be a multiple of {2 * cp_size} tokens: the 'zigzag' "
            f"layout cuts it into {2 * cp_size} fragments for "
            f"context_parallel_size={cp_size}. Pad every document, and pass the "
            "padded boundaries",
        )

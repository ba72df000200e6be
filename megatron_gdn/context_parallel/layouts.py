"""Index arithmetic of context-parallel sequence layouts; no communication, no torch.distributed.

    sequence order   document 0, document 1, ...
    rank order       the tokens of rank 0, of rank 1, ..., concatenated

    undo = rank_order_of_sequence(lengths, cp)     every sequence position's place in rank order
    x_sequence = x_rank[undo],  x_rank = x_sequence[inverse(undo)]

Legend: R context-parallel ranks, T tokens of the buffer, s = T / R tokens of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..ops.documents import Documents, one_document
from ..ops.layout import SizeError


class SequenceLayout(StrEnum):
    """How a context-parallel rank's tokens were cut from the sequence.

    Zigzag (DualChunkSwap) cuts into ``2 * cp`` equal fragments; rank ``r`` holds the fragments
    ``r`` and ``2 * cp - 1 - r``, which balances causal attention.

    ZIGZAG: every document by itself (the sequence, when not packed), as Transformer Engine does.
    ZIGZAG_BUFFER: the whole buffer, as Megatron's ``--dataloader-inter-document-masking`` does.
    CONTIGUOUS: rank ``r`` holds the ``r``-th of ``cp`` equal fragments of the buffer.
    """

    ZIGZAG = "zigzag"
    ZIGZAG_BUFFER = "zigzag_buffer"
    CONTIGUOUS = "contiguous"

    @classmethod
    def parse(cls, value: str | SequenceLayout) -> SequenceLayout:
        return member(cls, value, "context-parallel layout")


def member[Kind: StrEnum](kind: type[Kind], value: Any, what: str) -> Kind:
    """``kind(value)``, or an error that lists the legal values of ``what``."""
    try:
        return kind(value)
    except ValueError:
        legal = ", ".join(repr(one.value) for one in kind)
        raise ValueError(f"unknown {what} {value!r}; use one of {legal}.") from None


def check_lengths(
    lengths: Sequence[int], cp_size: int, layout: str | SequenceLayout = SequenceLayout.ZIGZAG
) -> None:
    """Refuse, with a ValueError, lengths that ``cp_size`` ranks cannot share in this layout."""
    layout = SequenceLayout.parse(layout)
    if cp_size == 1:
        return
    if layout is SequenceLayout.ZIGZAG:
        multiple, wholes, what = 2 * cp_size, lengths, "sequence"
    else:
        multiple = cp_size if layout is SequenceLayout.CONTIGUOUS else 2 * cp_size
        wholes, what = [sum(lengths)], "packed buffer"
    for index, length in enumerate(wholes):
        if length % multiple:
            by_document = layout is SequenceLayout.ZIGZAG
            passed = " and pass the padded boundaries as cu_seqlens_q_padded" if by_document else ""
            raise SizeError(
                f"{what} {index} has {length} tokens, which is not a multiple of {multiple}: the "
                f"{layout.value!r} layout cuts it into {multiple} equal fragments for "
                f"context_parallel_size={cp_size}. Pad it to "
                f"{-(-length // multiple) * multiple} tokens{passed}; or, if the data loader cut "
                f"it otherwise, name that as cp_layout: "
                f"{', '.join(repr(other.value) for other in SequenceLayout if other != layout)}."
            )


def rank_order_of_sequence(
    lengths: Sequence[int], cp_size: int, layout: str | SequenceLayout = SequenceLayout.ZIGZAG
) -> Tensor:
    """For every position in sequence order, its place in rank order.

    Args:
        lengths: tokens of each document of the buffer, in order (one entry when not packed);
            zero is allowed.
        cp_size: number of context-parallel ranks.
        layout: how the buffer was cut.

    Returns:
        int64 ``[T]`` on the CPU, a permutation of ``0 .. T-1`` with ``T = sum(lengths)``.

    Raises:
        ValueError: a length does not divide, see :func:`check_lengths`.
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
        start_N.repeat_interleave(length_N), length_N.repeat_interleave(length_N), cp_size
    )


def zigzag_places(start_T: Tensor, length_T: Tensor, cp_size: int) -> Tensor:
    """As :func:`rank_order_of_sequence` in zigzag, from start and length of tokens' documents."""
    total = len(start_T)
    offset_T = torch.arange(total, device=start_T.device) - start_T
    fragment_tokens_T = length_T // (2 * cp_size)
    fragment_T = offset_T // fragment_tokens_T
    second_T = fragment_T >= cp_size
    rank_T = torch.where(second_T, 2 * cp_size - 1 - fragment_T, fragment_T)
    # A rank's share of a document lies behind its shares of all earlier documents.
    place_T = start_T // cp_size + offset_T % fragment_tokens_T + second_T * fragment_tokens_T
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
    """The sequence positions that one rank holds, in its order: int64 ``[T / cp_size]`` on the CPU.

    A data loader gives the rank ``tokens[..., local_indices(lengths, cp, rank)]``; for a batch of
    sequences of length s that are not packed, ``lengths = [s]``.
    """
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank={cp_rank} is not one of 0 .. {cp_size - 1}.")
    return inverse(rank_order_of_sequence(lengths, cp_size, layout)).view(cp_size, -1)[cp_rank]


@lru_cache(maxsize=16)
def positions(lengths: tuple[int, ...], cp_size: int, layout: SequenceLayout) -> Tensor:
    """int64 ``[R, s]`` on the CPU: the sequence positions of every rank's tokens, in its order."""
    return inverse(rank_order_of_sequence(lengths, cp_size, layout)).view(cp_size, -1)


def cut_by(
    layout: SequenceLayout, documents: Documents | None, tokens: int, device: torch.device
) -> Documents:
    """The documents that ``layout`` cuts, or all ``tokens`` of the buffer as one document."""
    if documents is not None and layout is SequenceLayout.ZIGZAG:
        return documents
    return one_document(tokens, device)


def positions_of(cut: Documents, cp_size: int, layout: SequenceLayout) -> Tensor:
    """As :func:`positions`, for :func:`cut_by`; on the device if the host lacks boundaries."""
    if cut.known:
        return positions(cut.lengths, cp_size, layout)
    require_cut(cut, cp_size, layout)
    return cut.table(("zigzag", cp_size), lambda these: _zigzag(these, cp_size))[0]


def require_cut(documents: Documents, cp_size: int, layout: SequenceLayout) -> None:
    """:func:`check_lengths`, as far as the host knows the lengths."""
    lengths = documents.lengths if documents.known else (documents.total_tokens,)
    check_lengths(lengths, cp_size, layout)


def _zigzag(documents: Documents, cp_size: int) -> tuple[Tensor]:
    start, document_T = documents.cu_seqlens.long(), documents.document_T()
    length = start.diff()
    require_fragments(documents, length, cp_size)
    places_T = zigzag_places(start[document_T], length[document_T], cp_size)
    return (inverse(places_T).view(cp_size, -1),)


def require_fragments(documents: Documents, length: Tensor, cp_size: int) -> None:
    """Fail on the device if a document has a length that zigzag cannot cut."""
    documents.require(
        (length % (2 * cp_size) == 0).all(),
        f"every document must be a multiple of {2 * cp_size} tokens: the 'zigzag' layout cuts it "
        f"into that many fragments for context_parallel_size={cp_size}. Pad it, and pass the "
        f"padded boundaries",
    )


def held_positions(
    documents: Documents | None, tokens: int, group: Any, layout: SequenceLayout
) -> Tensor:
    """int64 ``[s]``: the sequence positions that this rank of ``group`` holds of ``tokens``."""
    device = torch.device("cpu") if documents is None else documents.device
    cut = cut_by(layout, documents, tokens, device)
    return positions_of(cut, group.size(), layout)[group.rank()]

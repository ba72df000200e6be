"""Computes the token indices of context-parallel sequence layouts, without
communication.

    sequence order   document 0, document 1, ...
    rank order       the tokens of rank 0, of rank 1, ..., concatenated

    place = rank_order_of_sequence(lengths, cp)
    x_sequence = x_rank[place],  x_rank = x_sequence[inverse(place)]

A token's *position* is its index in sequence order, its *place* the index in rank
order. A *unit* is a document, or the whole buffer; a layout divides each unit among the
ranks.

Legend: R context-parallel ranks, N documents, T tokens of the buffer, s = T / R tokens
of one rank.
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
    the fragments ``r`` and ``2 * cp - 1 - r``. This balances causal attention.

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
    """The member of the enum ``kind`` whose value is ``value``.

    Raises a ValueError that lists the legal values; ``setting`` is the option's name in
    the error.
    """
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
        unit_lengths = lengths
        unit = "sequence"
    else:
        if layout is SequenceLayout.CONTIGUOUS:
            multiple = cp_size
        else:
            multiple = 2 * cp_size
        unit_lengths = [sum(lengths)]
        unit = "packed buffer"
    for index, length in enumerate(unit_lengths):
        if length % multiple:
            if layout is SequenceLayout.ZIGZAG:
                padded_boundaries = (
                    " and pass the padded boundaries as cu_seqlens_q_padded"
                )
            else:
                padded_boundaries = ""
            raise SizeError(
                f"{unit} {index} has {length} tokens, which is not a multiple of "
                f"{multiple}: the {layout.value!r} layout cuts it into {multiple} "
                f"equal fragments for context_parallel_size={cp_size}. Pad the {unit} "
                f"to {-(-length // multiple) * multiple} tokens{padded_boundaries}; "
                "or, if the data loader uses another layout, name that layout as "
                "cp_layout: "
                f"{', '.join(repr(other.value) for other in SequenceLayout if other != layout)}."
            )


def rank_order_of_sequence(
    lengths: Sequence[int],
    cp_size: int,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG,
) -> Tensor:
    """For every token, in sequence order: its place in rank order.

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
    """int64 ``[T]``: the place in rank order of each token, for documents that are each
    cut in zigzag.

    ``start_T``, ``length_T``: first position and length of each token's document.
    """
    total = len(start_T)
    offset_T = torch.arange(total, device=start_T.device) - start_T
    fragment_tokens_T = length_T // (2 * cp_size)
    fragment_T = offset_T // fragment_tokens_T
    second_T = fragment_T >= cp_size  # whether the fragment is its rank's second one
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
    """int64 ``[R, s]`` on the CPU: the positions of each rank's tokens, in the rank's
    order."""
    return inverse(rank_order_of_sequence(lengths, cp_size, layout)).view(cp_size, -1)


def units_of_layout(
    layout: SequenceLayout,
    documents: Documents | None,
    tokens: int,
    device: torch.device,
) -> Documents:
    """What ``layout`` divides among the ranks, as `Documents`: ``documents`` in ZIGZAG,
    else the whole buffer of ``tokens`` tokens as one document."""
    if documents is not None and layout is SequenceLayout.ZIGZAG:
        return documents
    return one_document(tokens, device)


def positions_of(units: Documents, cp_size: int, layout: SequenceLayout) -> Tensor:
    """int64 ``[R, s]``: :func:`positions` for ``units`` of :func:`units_of_layout`.

    The result is on the CPU. For fixed buffers it is on the buffers' device, since the
    host does not know their lengths. Fixed buffers are units in ``zigzag`` only.
    """
    if units.known_on_host:
        return positions(units.lengths, cp_size, layout)
    require_divisible_lengths(units, cp_size, layout)
    return units.keep_tensors(_zigzag_positions, cp_size)[0]


def require_divisible_lengths(
    documents: Documents, cp_size: int, layout: SequenceLayout
) -> None:
    """Raise a ValueError if the ranks cannot divide ``documents`` equally in
    ``layout``.

    Of fixed buffers the host knows only the total, so only the total is checked.
    """
    if documents.known_on_host:
        lengths = documents.lengths
    else:
        lengths = (documents.total_tokens,)
    check_lengths(lengths, cp_size, layout)


def _zigzag_positions(documents: Documents, cp_size: int) -> tuple[Tensor]:
    """:func:`positions` for ZIGZAG, computed on the device of fixed buffers; a tuple
    of one tensor, as `Documents.keep_tensors` needs."""
    start = documents.cu_seqlens.long()
    document_T = documents.document_T()  # the index of each token's document
    length = start.diff()
    require_divisible_on_device(documents, length, cp_size)
    places_T = zigzag_places(start[document_T], length[document_T], cp_size)
    return (inverse(places_T).view(cp_size, -1),)


def require_divisible_on_device(
    documents: Documents, length: Tensor, cp_size: int
) -> None:
    """In fixed buffers, check that ``2 * cp_size`` divides each document's ``length``,
    an int64 tensor ``[N]`` on the device.

    `StaticDocuments.fill` repeats the check for new lengths: on the host if the new
    offsets are on the host, else on the device. Documents that the host knows were
    checked by :func:`require_divisible_lengths`.
    """
    if isinstance(documents, StaticDocuments):
        host_check = partial(
            check_lengths, cp_size=cp_size, layout=SequenceLayout.ZIGZAG
        )
        key = (require_divisible_on_device, cp_size)  # a second call adds no check
        documents.add_check(key, host_check)
        require_on_device(
            (length % (2 * cp_size) == 0).all(),
            f"every document must be a multiple of {2 * cp_size} tokens: the 'zigzag' "
            f"layout cuts it into {2 * cp_size} fragments for "
            f"context_parallel_size={cp_size}. Pad every document, and pass the "
            "padded boundaries",
        )

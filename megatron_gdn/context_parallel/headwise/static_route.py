"""Where the zigzag tokens of documents in fixed buffers go in a head exchange.

The tables are made on the device. (Layouts that cut the whole buffer do not depend on documents.)

Legend: R context-parallel ranks, T tokens of the buffer, s = T / R tokens of one rank.
"""

from __future__ import annotations

from itertools import chain

from torch import Tensor

from ...ops.static_documents import StaticDocuments
from ..layouts import check_lengths, inverse, zigzag_places
from .route import Wave, places_of, wave_tokens


def zigzag_positions(documents: StaticDocuments, cp_size: int) -> Tensor:
    """int64 ``[R, s]`` on the device: the sequence positions of every rank's tokens.

    Raises:
        ValueError: T is not a multiple of 2 * R; a document that is not fails on the device.
    """
    check_lengths((documents.total_tokens,), cp_size)
    return documents.table(("zigzag", cp_size), lambda these: _positions(these, cp_size))[0]


def _positions(documents: StaticDocuments, cp_size: int) -> tuple[Tensor]:
    start, document_T = documents.cu_seqlens.long(), documents.document_T()
    length = start.diff()
    require_fragments(documents, length, cp_size)
    places_T = zigzag_places(start[document_T], length[document_T], cp_size)
    return (inverse(places_T).view(cp_size, -1),)


def require_fragments(documents: StaticDocuments, length: Tensor, cp_size: int) -> None:
    """Fail on the device if ``length`` has one that zigzag cannot cut."""
    documents.require(
        (length % (2 * cp_size) == 0).all(),
        f"every document must be a multiple of {2 * cp_size} tokens: the 'zigzag' layout cuts it "
        f"into that many fragments for context_parallel_size={cp_size}. Pad it, and pass the "
        f"padded boundaries",
    )


def static_route(
    documents: StaticDocuments, cp_size: int, cp_rank: int, waves: int
) -> tuple[Wave, ...]:
    """As :func:`.route.route`, in zigzag; every fill writes the tables again."""
    key = ("route", cp_size, cp_rank, waves)
    if key not in documents.plans:
        cut = wave_tokens(documents.total_tokens // cp_size, waves)

        def tables(these: StaticDocuments) -> tuple[Tensor, ...]:
            table_Rs = zigzag_positions(these, cp_size)
            return tuple(chain(*(places_of(table_Rs, cp_rank, tokens) for tokens in cut)))

        made = documents.table(key, tables)
        documents.plans[key] = tuple(
            Wave(tokens, own, others, None)
            for tokens, own, others in zip(cut, made[::2], made[1::2], strict=True)
        )
    return documents.plans[key]

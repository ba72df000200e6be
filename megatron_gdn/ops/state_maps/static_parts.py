"""The cut of :func:`.parts.parts_by_length` for documents in fixed buffers, made on the device.

States may enter sequences that are not cut.

Legend: N documents at most, M = N + 1 sequences (the last is empty), P parts at most.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..host_tables import to_device
from ..static_documents import ChunkPlaces, StaticDocuments, chunk_places
from .parts import CHUNK, Parts, most_parts_and_fewest_chunks
from .steps import Steps


class StaticParts(NamedTuple):
    """As :class:`.parts.Parts`, for sequences that no state enters.

    Unused parts have no tokens and belong to the last sequence.

    Attributes:
        sequences: int32 ``[M + 1]``, where sequences begin, and the end.
        offsets: int32 ``[P + 1]``, where parts begin, and the end.
        first: int32 ``[M + 1]``, the first part of every sequence, and P.
        owner: int32 ``[P]``, the sequence of every part.
        opens, closes: bool ``[P]``, whether the part is the first or the last of its sequence.
        chunk_offsets, chunk_indices: the chunks of the parts, see
            :class:`~megatron_gdn.ops.static_documents.ChunkPlaces`.
    """

    sequences: Tensor
    offsets: Tensor
    first: Tensor
    owner: Tensor
    opens: Tensor
    closes: Tensor
    chunk_offsets: Tensor
    chunk_indices: Tensor

    @property
    def chunks(self) -> ChunkPlaces:
        return ChunkPlaces(self.chunk_offsets, self.chunk_indices)


def most_cuts(documents: StaticDocuments, value_heads: int) -> int:
    """In how many places documents of this buffer are cut at most.

    A document of c chunks is cut in at most (c - 1) // fewest places, and has more than
    64 * (c - 1) tokens.
    """
    most, fewest = most_parts_and_fewest_chunks(value_heads)
    by_length = documents.total_tokens // (CHUNK * fewest)
    return min(by_length, documents.max_documents * (most - 1))


def static_parts(documents: StaticDocuments, value_heads: int) -> StaticParts:
    """The parts of these documents; made once, and written again by every fill."""
    return documents.table(
        ("parts", value_heads), lambda documents: _static_parts(documents, value_heads)
    )


def _static_parts(documents: StaticDocuments, value_heads: int) -> StaticParts:
    most, fewest = most_parts_and_fewest_chunks(value_heads)
    P = documents.sequences + most_cuts(documents, value_heads)  # the last always without tokens
    sequences = documents.cu_seqlens
    chunks = _ceil(sequences.diff(), CHUNK)
    step = _ceil(chunks, most).clamp(min=fewest)
    # Parts cut a sequence as chunks do, so chunk_places computes their places too.
    first, indices = chunk_places(_ceil(chunks, step), P)
    owner, place = (x.contiguous() for x in indices.unbind(1))
    start = sequences[owner] + place * step[owner] * CHUNK
    start = torch.minimum(start, sequences[owner + 1])
    offsets = torch.cat([start, sequences[-1:]])
    # The empty last sequence gets the unused parts.
    first = torch.cat([first[:-1], first.new_full((1,), P)])
    places = chunk_places(_ceil(offsets.diff(), CHUNK), documents.most_chunks(CHUNK))
    return StaticParts(
        sequences, offsets, first, owner,
        opens=place == 0, closes=offsets[1:] == sequences[owner + 1],
        chunk_offsets=places.offsets, chunk_indices=places.indices,
    )  # fmt: skip


def uncut_parts(documents: StaticDocuments) -> Parts:
    """Each sequence as one part, which states may enter; every fill writes the tables again."""
    key = Parts
    if key not in documents.plans:
        chunks, ragged = documents.table("uncut parts", _chunks_of_sequences)
        M, device = documents.sequences, documents.device
        first = to_device(torch.arange(M + 1, dtype=torch.int32, device="cpu"), device)
        every, none = (to_device(torch.full((M,), x, device="cpu"), device) for x in (True, False))
        nothing = Steps((), first[:0])
        documents.plans[key] = Parts(
            sequences=documents.cu_seqlens, offsets=documents.cu_seqlens, first=first,
            owner=first[:-1], opens=every, closes=every, chunks=chunks, ragged=ragged,
            nowhere=none, whole=nothing, entering=nothing, opening=nothing, leaving=nothing,
        )  # fmt: skip
    return documents.plans[key]


def _chunks_of_sequences(documents: StaticDocuments) -> tuple[Tensor, Tensor]:
    length = documents.cu_seqlens.diff()[:, None]
    return _ceil(length, CHUNK), length % CHUNK != 0


def _ceil(count: Tensor, by: Tensor | int) -> Tensor:
    return (count + (by - 1)).div(by, rounding_mode="floor")

"""Sequences cut into parts, so that one long sequence can occupy a whole GPU.

A rule runs the parts side by side. Each part is an affine map of the state that enters it, and the
maps ``S_out = through @ S_in + local`` of one sequence are chained.

Legend: N sequences, P parts, H value heads, K key dim, V value dim; of documents in fixed buffers
M = N + 1 sequences (the last is empty) and P parts at most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..documents import ChunkPlaces, ceil_div, chunk_places
from ..host_tables import to_device
from ..static_documents import StaticDocuments
from .chains import IDENTITY, follow
from .state_map import NONE, Steps

CHUNK = 64
# One sequence alone is cut so that its parts times its heads fill about one H200 of 132
# multiprocessors. The number does not depend on the GPU at hand, because the cut decides rounding.
FULL_GPU = 128
_FEWEST_CHUNKS = 32


@dataclass(frozen=True, eq=False)
class Parts:
    """Tables of N sequences cut into P parts, at multiples of 64 tokens from a sequence's start."""

    sequences: Tensor  # int32 [N + 1], where sequences begin, and the end
    offsets: Tensor  # int32 [P + 1], where parts begin, and the end
    first: Tensor  # int32 [N + 1], the first part of every sequence, and P
    owner: Tensor  # int32 [P], the sequence of every part
    opens: Tensor  # bool [P], whether the part is the first of its sequence
    closes: Tensor  # bool [P], whether it is the last
    chunks: Tensor  # int32 [P, 1], chunks of 64 tokens per part, rounded up
    ragged: Tensor | None  # bool [P, 1], whether the part ends inside a chunk; None if none does
    nowhere: Tensor  # bool [P], all false
    whole: Steps  # write the final state of each sequence
    entering: Steps  # write the state that enters each part
    opening: Steps  # from the last part to the first, write dS_in of each sequence
    leaving: Steps  # from the last part to the first, write dS_out of each part

    @cached_property
    def are_sequences(self) -> bool:
        """Whether no sequence is cut."""
        return len(self.owner) == len(self.first) - 1

    @classmethod
    def build(cls, sequences: Sequence[int], offsets: Sequence[int], device: torch.device) -> Parts:
        """From the offsets of sequences (none empty) and of parts, which include the former."""
        starts, ends = set(sequences[:-1]), set(sequences[1:])
        first = [part for part, start in enumerate(offsets[:-1]) if start in starts]
        first.append(len(offsets) - 1)
        owner = [n for n, (a, b) in enumerate(pairwise(first)) for _ in range(a, b)]
        lengths = [end - start for start, end in pairwise(offsets)]

        def table(values, dtype=torch.int32) -> Tensor:
            return to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)

        ragged = [[length % CHUNK != 0] for length in lengths]
        chains = [range(a, b) for a, b in pairwise(first)]
        backwards = [chain[::-1] for chain in chains]
        return cls(
            sequences=table(sequences),
            offsets=table(offsets),
            first=table(first),
            owner=table(owner),
            opens=table([start in starts for start in offsets[:-1]], torch.bool),
            closes=table([end in ends for end in offsets[1:]], torch.bool),
            chunks=table([[-(-length // CHUNK)] for length in lengths]),
            ragged=table(ragged, torch.bool) if [True] in ragged else None,
            nowhere=table([False] * len(owner), torch.bool),
            whole=_last_of(chains, device),
            entering=_each_of(chains, device),
            opening=_last_of(backwards, device),
            leaving=_each_of(backwards, device),
        )


def _last_of(chains: Sequence[range], device: torch.device) -> Steps:
    """Steps that write the state after the n-th chain to place n."""
    return Steps.build(
        [[*((NONE, part) for part in chain), (n, NONE)] for n, chain in enumerate(chains)], device
    )


def _each_of(chains: Sequence[range], device: torch.device) -> Steps:
    """Steps that write the state before each part to the part's place."""
    return Steps.build(
        [[*((part, part) for part in chain[:-1]), (chain[-1], NONE)] for chain in chains], device
    )


def most_parts_and_fewest_chunks(value_heads: int) -> tuple[int, int]:
    """How many parts a sequence has at most, and how many chunks a part has at least."""
    return max(1, FULL_GPU // value_heads), max(8, min(_FEWEST_CHUNKS, value_heads))


def parts_by_length(
    sequences: Sequence[int], value_heads: int, longest: int | None = None
) -> list[int]:
    """Part offsets. The cut of a sequence depends only on its length and on the heads.

    A sequence is cut into as many parts as fill the GPU, but not shorter than 32 chunks, or
    ``value_heads`` chunks (at least 8) if these are fewer: other sequences fill the GPU too. No
    part has more than ``longest`` tokens (a multiple of 64).
    """
    most, fewest = most_parts_and_fewest_chunks(value_heads)
    offsets: list[int] = []
    for start, end in pairwise(sequences):
        chunks = -(-(end - start) // CHUNK)
        step = max(-(-chunks // most), fewest) * CHUNK
        step = step if longest is None else min(step, longest)
        offsets.extend(range(start, end, step))
    return [*offsets, sequences[-1]]


def compose(local: Tensor, through: Tensor, parts: Parts) -> tuple[Tensor, Tensor]:
    """The maps of whole sequences from those of their parts, ``[P, H, K, V]`` and ``[P, H, K, K]``.

    If some sequence is cut, the results are views of one ``[N, H, K, V + K]`` tensor.
    """
    if parts.are_sequences:
        return local, through
    (_, H, K, V), N = local.shape, len(parts.whole.chains)
    whole = local.new_empty(N, H, K, V + K)
    follow(local, through, parts.whole, whole, IDENTITY)
    return whole[..., :V], whole[..., V:]


def entering_states(
    local: Tensor, through: Tensor, parts: Parts, initial: Tensor | None
) -> Tensor | None:
    """The state that enters every part, ``[P, H, K, V]``; None if all are zero.

    ``initial`` ``[N, H, K, V]`` has the states that enter the sequences; None is zero.
    """
    if parts.are_sequences:
        return None if initial is None else initial.contiguous()
    initial = None if initial is None else initial.to(local.dtype).contiguous()
    return follow(local, through, parts.entering, local.new_empty(local.shape), initial)


def leaving_gradients(
    d_local: Tensor | None, through: Tensor | None, parts: Parts, d_final: Tensor | None
) -> Tensor | None:
    """The gradient of the state that leaves every part, ``[P, H, K, V]``; None: all are zero.

    Follows ``dS_in = through^T dS_out + d_local`` from the last part of a sequence to its first.
    ``d_local`` and ``through`` are read only if some sequence is cut.
    """
    if parts.are_sequences:
        return None if d_final is None else d_final.contiguous()
    assert d_local is not None and through is not None
    d_final = None if d_final is None else d_final.to(d_local.dtype).contiguous()
    return follow(d_local, through.mT, parts.leaving, d_local.new_empty(d_local.shape), d_final)


def initial_gradients(d_local: Tensor, through: Tensor | None, parts: Parts) -> Tensor:
    """The gradient of the initial states, ``[N, H, K, V]``, if that of the final states is 0."""
    if parts.are_sequences:
        return d_local
    assert through is not None
    out = d_local.new_empty(len(parts.opening.chains), *d_local.shape[1:])
    return follow(d_local, through.mT, parts.opening, out)


class StaticParts(NamedTuple):
    """As :class:`Parts`, of documents in fixed buffers that no state enters.

    Unused parts have no tokens and belong to the last sequence. The last two are the parts'
    :class:`~megatron_gdn.ops.documents.ChunkPlaces`.
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

    One of c chunks is cut in at most (c - 1) // fewest places, and has over 64 * (c - 1) tokens.
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
    chunks = ceil_div(sequences.diff(), CHUNK)
    step = ceil_div(chunks, most).clamp(min=fewest)
    # Parts cut a sequence as chunks do, so chunk_places computes their places too.
    first, indices = chunk_places(ceil_div(chunks, step), P)
    owner, place = (x.contiguous() for x in indices.unbind(1))
    start = sequences[owner] + place * step[owner] * CHUNK
    start = torch.minimum(start, sequences[owner + 1])
    offsets = torch.cat([start, sequences[-1:]])
    # The empty last sequence gets the unused parts.
    first = torch.cat([first[:-1], first.new_full((1,), P)])
    places = chunk_places(ceil_div(offsets.diff(), CHUNK), documents.most_chunks(CHUNK))
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
    return ceil_div(length, CHUNK), length % CHUNK != 0

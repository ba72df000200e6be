"""Cuts sequences into segments that a rule computes in parallel, so that one sequence
can fill a GPU.

Each segment is an affine map of its initial state, ``S_out = through @ S_in + local``.
The maps of one sequence form a chain. In fixed buffers the host does not know the
chains, so callers must not cut sequences with initial states there.

Legend: P segments; N, H, K, V as in :mod:`.state_map`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..documents import ChunkPlaces, Documents, ceil_div, chunk_places
from ..host_tables import to_device
from .state_map import NO_INDEX, ChainSteps, StateMap, follow_chains

CHUNK = 64  # tokens
# A sequence gets so many segments that segments times heads is about this number, near
# the 132 multiprocessors of an H200. This number is the same on every GPU, since the
# cuts change the rounding.
PROGRAMS_OF_A_FULL_GPU = 128
# with 32 heads or more; :func:`cut_by_length` says how many with fewer heads
_FEWEST_CHUNKS_OF_SEGMENT = 32


class SegmentBoundaries(NamedTuple):
    """Where N sequences are cut: at multiples of 64 tokens from each sequence's start.

    ``documents.starts`` is ``[N + 1]``; for ordinary documents N is the number of
    documents with tokens. In fixed buffers N is the largest number of documents plus 1,
    and the last sequence is empty. P is then the largest number of segments that any
    documents could have; unused segments are empty segments of the last sequence.
    """

    # int32 [P + 1], the first token of every segment, and the end of the last segment
    offsets: Tensor
    # int32 [N + 1], the number of every sequence's first segment, and P
    first_segment: Tensor


def one_segment_per_sequence(documents: Documents) -> SegmentBoundaries:
    """The cut in which every sequence is one segment, so P = N.

    ``offsets`` are ``documents.starts [N + 1]``; ``first_segment`` is 0, 1, ..., N.
    """
    starts = documents.starts
    return SegmentBoundaries(
        starts, torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    )


def cut_at(documents: Documents, offsets: Sequence[int]) -> SegmentBoundaries:
    """The cut at ``offsets``: the first token of every segment, and the end of the last
    segment. Every start of a sequence must be among them."""
    starts = documents.starts
    offsets_P = torch.tensor(offsets, dtype=torch.int32, device=starts.device)
    return SegmentBoundaries(
        offsets_P, torch.searchsorted(offsets_P, starts, out_int32=True)
    )


def cut_by_length(
    documents: Documents, value_heads: int, longest_segment: int | None = None
) -> SegmentBoundaries:
    """Cut each sequence at tokens that depend only on its length and on the number of
    heads.

    A sequence is cut into as many segments as fill the GPU. But segments must not be
    too short, because other sequences also fill the GPU: a segment has at least 32
    chunks. With fewer than 32 heads it has at least ``value_heads`` chunks, and never
    fewer than 8.

    Args:
        longest_segment: the largest number of tokens of a segment, a multiple of 64;
            None: no limit.
    """
    starts = documents.starts
    max_segments, min_chunks = _segment_limits(value_heads)
    chunks_N = ceil_div(starts.diff(), CHUNK)
    chunks_per_segment_N = ceil_div(chunks_N, max_segments).clamp(min=min_chunks)
    if longest_segment is not None:
        chunks_per_segment_N = chunks_per_segment_N.clamp(max=longest_segment // CHUNK)
    segments_N = ceil_div(chunks_N, chunks_per_segment_N)
    if documents.known_on_host:
        P = int(segments_N.sum())
    else:  # the empty last sequence of fixed buffers has a segment too
        P = documents.sequences + largest_number_of_cuts(documents, value_heads)
    # Segments follow each other in a sequence as chunks do, so chunk_places also gives
    # each segment's sequence, and its number in the sequence.
    first_segment, indices = chunk_places(segments_N, P)
    sequence_P, number_P = indices.unbind(1)
    tokens_before_P = number_P * chunks_per_segment_N[sequence_P] * CHUNK
    start_P = torch.minimum(
        starts[sequence_P] + tokens_before_P, starts[sequence_P + 1]
    )
    # The last sequence, which is empty in fixed buffers, gets the unused segments.
    first_segment = torch.cat([first_segment[:-1], first_segment.new_full((1,), P)])
    return SegmentBoundaries(torch.cat([start_P, starts[-1:]]), first_segment)


def largest_number_of_cuts(documents: Documents, value_heads: int) -> int:
    """The largest number of cuts that :func:`cut_by_length` makes in these documents,
    whatever their boundaries are.

    A document of c chunks has more than 64 * (c - 1) tokens. If each of its segments
    has at least ``min_chunks`` chunks, it has at most (c - 1) // min_chunks cuts.
    """
    max_segments, min_chunks = _segment_limits(value_heads)
    return min(
        documents.total_tokens // (CHUNK * min_chunks),
        documents.max_filled * (max_segments - 1),
    )


def _segment_limits(value_heads: int) -> tuple[int, int]:
    """The largest number of segments of a sequence, and the smallest number of chunks
    of a segment."""
    max_segments = max(1, PROGRAMS_OF_A_FULL_GPU // value_heads)
    min_chunks = max(8, min(_FEWEST_CHUNKS_OF_SEGMENT, value_heads))
    return max_segments, min_chunks


@dataclass(frozen=True, eq=False)
class Segments:
    """Tables of N sequences cut into P segments.

    The last four fields are steps along the chain of each sequence's segments. For
    example, the steps ``to_entering_states`` write the state that enters each segment.
    """

    # int32 [N + 1], the first token of every sequence, and the end of the last
    sequence_offsets: Tensor
    # int32 [P + 1], the first token of every segment, and the end of the last
    offsets: Tensor
    # int32 [N + 1], the number of every sequence's first segment, and P
    first_segment: Tensor
    sequence_of_segment: Tensor  # int32 [P]
    begins_sequence: Tensor  # bool [P], whether the segment is its sequence's first
    ends_sequence: Tensor  # bool [P], whether the segment is its sequence's last
    # bool [P], False everywhere: a mask that selects no segment, for FlashQLA's kernels
    no_segment: Tensor
    chunk_counts: Tensor  # int32 [P, 1], chunks of 64 tokens per segment, rounded up
    # bool [P, 1], whether the segment ends inside a chunk; None if no segment does
    ends_inside_chunk: Tensor | None
    # for each chunk of 64 tokens: its segment, and its number in the segment
    chunk_places: ChunkPlaces
    # forwards: to each sequence's final state; to the state that enters each segment
    to_final_states: ChainSteps
    to_entering_states: ChainSteps
    # backwards: to the gradient of each sequence's initial state; to the gradient of
    # the state that leaves each segment
    to_initial_gradients: ChainSteps
    to_leaving_gradients: ChainSteps

    @property
    def are_sequences(self) -> bool:
        """Whether no sequence is cut, so that each segment is one sequence."""
        return len(self.sequence_of_segment) == len(self.first_segment) - 1

    @staticmethod
    def of[*Arguments](
        documents: Documents,
        cut: Callable[[Documents, *Arguments], SegmentBoundaries],
        *arguments: *Arguments,
    ) -> Segments:
        """The segments of ``cut(documents, *arguments)``, stored on ``documents``."""
        return documents.keep(_build_segments, cut, *arguments)


def _build_segments(
    documents: Documents, cut: Callable[..., SegmentBoundaries], *arguments: object
) -> Segments:
    """The :class:`Segments` of ``cut(documents, *arguments)``, with tables on the
    device.

    In fixed buffers the host does not know the chains, so the last four fields have no
    steps.
    """
    made = documents.keep_tensors(_compute_tables, cut, *arguments, move=False)
    device = documents.device
    tables = _SegmentTables._make(to_device(x, device) for x in made)
    ends_inside_chunk: Tensor | None = tables.ends_inside_chunk
    chains: list[range] = []  # the segments of each sequence
    if documents.known_on_host:
        first_segments = made.first_segment.tolist()
        chains = [range(first, end) for first, end in pairwise(first_segments)]
        if not made.ends_inside_chunk.any():
            ends_inside_chunk = None
    backwards = [chain[::-1] for chain in chains]
    return Segments(
        sequence_offsets=documents.cu_seqlens,
        offsets=tables.offsets,
        first_segment=tables.first_segment,
        sequence_of_segment=tables.sequence_of_segment,
        begins_sequence=tables.begins_sequence,
        ends_sequence=tables.ends_sequence,
        no_segment=tables.no_segment,
        chunk_counts=tables.chunk_counts,
        ends_inside_chunk=ends_inside_chunk,
        chunk_places=ChunkPlaces(tables.chunk_offsets, tables.chunk_indices),
        to_final_states=_steps_to_ends(chains, device),
        to_entering_states=_steps_to_segments(chains, device),
        to_initial_gradients=_steps_to_ends(backwards, device),
        to_leaving_gradients=_steps_to_segments(backwards, device),
    )


class _SegmentTables(NamedTuple):
    """The tensors of :class:`Segments` that are computed from
    :class:`SegmentBoundaries`."""

    offsets: Tensor
    first_segment: Tensor
    sequence_of_segment: Tensor
    begins_sequence: Tensor
    ends_sequence: Tensor
    no_segment: Tensor
    chunk_counts: Tensor
    ends_inside_chunk: Tensor
    chunk_offsets: Tensor  # the fields of ``Segments.chunk_places``
    chunk_indices: Tensor


def _compute_tables(
    documents: Documents, cut: Callable[..., SegmentBoundaries], *arguments: object
) -> _SegmentTables:
    """The tables for the segments of ``cut(documents, *arguments)``, on the device of
    ``documents.starts``.

    ``cut`` returns the fields of :class:`SegmentBoundaries`. Tables ``[P, 1]``
    broadcast over the H heads.
    """
    offsets, first_segment = cut(documents, *arguments)
    starts = documents.starts
    number = torch.arange(len(offsets) - 1, dtype=torch.int32, device=starts.device)
    sequence = torch.searchsorted(
        first_segment[1:].contiguous(), number, right=True, out_int32=True
    )
    lengths = offsets.diff()
    chunk_counts = ceil_div(lengths, CHUNK)
    places = chunk_places(chunk_counts, documents.max_chunks(CHUNK))
    return _SegmentTables(
        offsets=offsets,
        first_segment=first_segment,
        sequence_of_segment=sequence,
        begins_sequence=offsets[:-1] == starts[sequence],
        ends_sequence=offsets[1:] == starts[sequence + 1],
        no_segment=torch.zeros_like(sequence, dtype=torch.bool),
        chunk_counts=chunk_counts[:, None],
        ends_inside_chunk=lengths[:, None] % CHUNK != 0,
        chunk_offsets=places.offsets,
        chunk_indices=places.indices,
    )


def _steps_to_ends(chains: Sequence[range], device: torch.device) -> ChainSteps:
    """Steps ``(target, map)`` that write the state at the end of chain n to index n of
    the output. A chain has a sequence's segments in the order in which their maps are
    applied."""
    steps = []
    for n, chain in enumerate(chains):
        steps.append([(NO_INDEX, segment) for segment in chain] + [(n, NO_INDEX)])
    return ChainSteps.build(steps, device)


def _steps_to_segments(chains: Sequence[range], device: torch.device) -> ChainSteps:
    """Steps ``(target, map)`` that write the state before segment p to index p of the
    output. The map of a chain's last segment is not applied. A chain has a sequence's
    segments in the order in which their maps are applied."""
    steps = []
    for chain in chains:
        writes = [(segment, segment) for segment in chain[:-1]]
        steps.append(writes + [(chain[-1], NO_INDEX)])
    return ChainSteps.build(steps, device)


def compose(local: Tensor, through: Tensor, segments: Segments) -> StateMap:
    """The state maps of the sequences, composed of their segments' maps.

    ``local [P, H, K, V]`` and ``through [P, H, K, K]`` are the maps of the segments.
    """
    if segments.are_sequences:
        return StateMap(local, through)
    _, H, K, V = local.shape
    N = len(segments.to_final_states.chains)
    maps = local.new_empty(N, H, K, V + K)  # ``local`` and ``through`` side by side
    follow_chains(local, through, segments.to_final_states, maps, compose=True)
    return StateMap(maps[..., :V], maps[..., V:])


def entering_states(
    local: Tensor, through: Tensor, segments: Segments, initial: Tensor | None
) -> Tensor | None:
    """The state that enters each segment, ``[P, H, K, V]``; None means zeros.

    Args:
        local, through: the maps of the segments, ``[P, H, K, V]`` and ``[P, H, K, K]``.
        initial: the initial states of the sequences, ``[N, H, K, V]``, contiguous;
            None: zeros.
    """
    if segments.are_sequences:
        return initial
    if initial is not None:
        initial = initial.to(local.dtype)
    states = local.new_empty(local.shape)
    return follow_chains(
        local, through, segments.to_entering_states, states, start=initial
    )


def leaving_gradients(
    d_local: Tensor | None,
    through: Tensor | None,
    segments: Segments,
    d_final: Tensor | None,
) -> Tensor | None:
    """The gradient of the state that leaves each segment, ``[P, H, K, V]``; None means
    zeros.

        dS_in = through^T dS_out + d_local      the last segment of a sequence first

    Args:
        d_local: ``[P, H, K, V]``, the dS_in of each segment if its dS_out is 0.
        through: ``[P, H, K, K]``, from the segments' maps. ``d_local`` and ``through``
            may be None if no sequence is cut.
        d_final: ``[N, H, K, V]``, the gradients of the final states, contiguous; None:
            zeros.
    """
    if segments.are_sequences:
        return d_final
    assert d_local is not None and through is not None
    if d_final is not None:
        d_final = d_final.to(d_local.dtype)
    gradients = d_local.new_empty(d_local.shape)
    return follow_chains(
        d_local, through.mT, segments.to_leaving_gradients, gradients, start=d_final
    )


def initial_gradients(
    d_local: Tensor, through: Tensor | None, segments: Segments
) -> Tensor:
    """The gradient of the initial states ``[N, H, K, V]`` if the final states have
    gradient 0.

    ``d_local [P, H, K, V]``: the gradient of the state that enters each segment, if the
    gradient of the state that leaves it is 0. ``through [P, H, K, K]``: from the
    segments' maps.
    """
    if segments.are_sequences:
        return d_local
    assert through is not None
    steps = segments.to_initial_gradients
    gradients = d_local.new_empty((len(steps.chains),) + d_local.shape[1:])
    return follow_chains(d_local, through.mT, steps, gradients)

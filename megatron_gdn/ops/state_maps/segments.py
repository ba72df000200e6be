"""Sequences cut into segments that a rule computes in parallel, so that one sequence can
fill a GPU.

Each segment is an affine map of its initial state, ``S_out = through @ S_in + local``, and
the maps of one sequence form a chain. In fixed buffers the host does not know the
chains, so callers must not cut sequences with initial states. P is the number of segments;
N, H, K, V are as in :mod:`.state_map`.
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
from .state_map import NONE, StateMap, Steps, follow_chains

CHUNK = 64
# The aim for (segments of a sequence) * heads: about the 132 multiprocessors of an H200.
# The number is the same on every GPU, because the cut decides rounding.
PROGRAMS_OF_A_FULL_GPU = 128
_FEWEST_CHUNKS = 32


class Cut(NamedTuple):
    """The segments of N sequences, cut at multiples of 64 tokens from the start of each
    sequence.

    In fixed buffers P is the largest number of segments that any documents could have;
    unused segments are empty segments of the last sequence.
    """

    # int32 [P + 1], the first token of every segment, and the end of the last segment
    offsets: Tensor
    first: Tensor  # int32 [N + 1], the first part of every sequence, and P


def one_segment_per_sequence(documents: Documents) -> Cut:
    """The cut in which every sequence is one segment."""
    starts = documents.starts
    return Cut(
        starts, torch.arange(len(starts), dtype=torch.int32, device=starts.device)
    )


def cut_at(documents: Documents, offsets: Sequence[int]) -> Cut:
    """The cut into segments that begin at ``offsets``, which include the starts of all
    sequences."""
    starts = documents.starts
    found = torch.tensor(offsets, dtype=torch.int32, device=starts.device)
    return Cut(found, torch.searchsorted(found, starts, out_int32=True))


def cut_by_length(
    documents: Documents, value_heads: int, longest_segment: int | None = None
) -> Cut:
    """Cut every sequence; the cut depends only on the sequence's length and the number
    of heads.

    A sequence is cut into as many segments as fill the GPU. But a segment has at least 32
    chunks, because other sequences also fill the GPU. If ``value_heads`` is less than
    32, a segment has at least ``value_heads`` chunks, and at least 8. ``longest_segment``: a
    segment's most tokens, divisible by 64.
    """
    starts = documents.starts
    most, fewest = _most_segments_and_fewest_chunks(value_heads)
    chunks = ceil_div(starts.diff(), CHUNK)
    step = ceil_div(chunks, most).clamp(min=fewest)
    if longest_segment is not None:
        step = step.clamp(max=longest_segment // CHUNK)
    count = ceil_div(chunks, step)
    if documents.known_on_host:
        P = int(count.sum())
    else:  # the empty last sequence of fixed buffers has a segment too
        P = documents.sequences + largest_number_of_cuts(documents, value_heads)
    # Segments follow each other in a sequence as chunks do, so chunk_places gives their
    # places too.
    first, indices = chunk_places(count, P)
    owner, place = indices.unbind(1)
    start = torch.minimum(
        starts[owner] + place * step[owner] * CHUNK, starts[owner + 1]
    )
    # The last sequence, which is empty in fixed buffers, gets the unused segments.
    first = torch.cat([first[:-1], first.new_full((1,), P)])
    return Cut(torch.cat([start, starts[-1:]]), first)


def largest_number_of_cuts(documents: Documents, value_heads: int) -> int:
    """The largest number of cuts that :func:`cut_by_length` makes in a buffer of T
    tokens.

    A document of c chunks has more than 64 * (c - 1) tokens. If each of its segments has
    at least ``fewest`` chunks, the document has at most (c - 1) // fewest cuts.
    """
    most, fewest = _most_segments_and_fewest_chunks(value_heads)
    return min(
        documents.total_tokens // (CHUNK * fewest), documents.max_filled * (most - 1)
    )


def _most_segments_and_fewest_chunks(value_heads: int) -> tuple[int, int]:
    """The largest number of segments of a sequence, and the smallest number of chunks of a
    segment."""
    return max(1, PROGRAMS_OF_A_FULL_GPU // value_heads), max(
        8, min(_FEWEST_CHUNKS, value_heads)
    )


@dataclass(frozen=True, eq=False)
class Segments:
    """Tables of N sequences cut into P segments."""

    # int32 [N + 1], the first token of every sequence, and the end of the last
    sequences: Tensor
    # int32 [P + 1], the first token of every segment, and the end of the last
    offsets: Tensor
    first: Tensor  # int32 [N + 1], the number of every sequence's first segment, and P
    owner: Tensor  # int32 [P], the sequence of every segment
    opens: Tensor  # bool [P], whether the segment is the first of its sequence
    closes: Tensor  # bool [P], whether the segment is the last of its sequence
    no_segment: Tensor  # bool [P], False everywhere: a mask that selects no segment
    chunks: Tensor  # int32 [P, 1], chunks of 64 tokens per segment, rounded up
    # bool [P, 1], whether the segment ends inside a chunk; None if no segment does
    ragged: Tensor | None
    places: ChunkPlaces  # of each chunk of 64 tokens: its segment, its number in the segment
    whole: Steps  # these steps write the final state of each sequence
    entering: Steps  # these steps write the state that enters each segment
    # from last to first segment, these steps write the gradient of each initial state
    opening: Steps
    # from last to first segment: the gradient of the state that leaves each segment
    leaving: Steps

    @property
    def are_sequences(self) -> bool:
        """Whether no sequence is cut."""
        return len(self.owner) == len(self.first) - 1

    @staticmethod
    def of[*Arguments](
        documents: Documents,
        cut: Callable[[Documents, *Arguments], Cut],
        *arguments: *Arguments,
    ) -> Segments:
        """The segments of ``cut(documents, *arguments)``, kept on ``documents``."""
        return documents.keep(_build_segments, cut, *arguments)


def _build_segments(
    documents: Documents, cut: Callable[..., Cut], *arguments: object
) -> Segments:
    """Compute the tables for the segments of ``cut(documents, *arguments)``."""
    made = documents.keep_tensors(_compute_tables, cut, *arguments, move=False)
    *tables, ragged, first_chunks, indices = (
        to_device(x, documents.device) for x in made
    )
    chains: list[range] = []
    if documents.known_on_host:
        chains = [range(a, b) for a, b in pairwise(made[1].tolist())]
        if not made[-3].any():
            ragged = None
    backwards = [chain[::-1] for chain in chains]
    device = documents.device
    return Segments(
        documents.cu_seqlens,
        *tables,
        ragged=ragged,
        places=ChunkPlaces(first_chunks, indices),
        whole=_steps_to_final_states(chains, device),
        entering=_steps_to_segment_states(chains, device),
        opening=_steps_to_final_states(backwards, device),
        leaving=_steps_to_segment_states(backwards, device),
    )


def _compute_tables(
    documents: Documents, cut: Callable[..., Cut], *arguments: object
) -> tuple[Tensor, ...]:
    """The fields of :class:`Segments` from ``offsets`` to ``ragged``, and
    ``places``."""
    offsets, first = cut(documents, *arguments)
    starts = documents.starts
    number = torch.arange(len(offsets) - 1, dtype=torch.int32, device=starts.device)
    owner = torch.searchsorted(
        first[1:].contiguous(), number, right=True, out_int32=True
    )
    owner = owner.clamp(max=documents.sequences - 1)
    opens = offsets[:-1] == starts[owner]
    closes = offsets[1:] == starts[owner + 1]
    no_segment = torch.zeros_like(owner, dtype=torch.bool)
    length = offsets.diff()
    chunks = ceil_div(length, CHUNK)
    ragged = length[:, None] % CHUNK != 0
    places = chunk_places(chunks, documents.max_chunks(CHUNK))
    return (
        offsets,
        first,
        owner,
        opens,
        closes,
        no_segment,
        chunks[:, None],
        ragged,
        *places,
    )


def _steps_to_final_states(chains: Sequence[range], device: torch.device) -> Steps:
    """Steps that write the state at the end of the n-th chain to index n of the
    output."""
    return Steps.build(
        [
            [(NONE, segment) for segment in chain] + [(n, NONE)]
            for n, chain in enumerate(chains)
        ],
        device,
    )


def _steps_to_segment_states(chains: Sequence[range], device: torch.device) -> Steps:
    """Steps that write the state before each segment to the segment's index in the output."""
    return Steps.build(
        [
            [(segment, segment) for segment in chain[:-1]] + [(chain[-1], NONE)]
            for chain in chains
        ],
        device,
    )


def compose(local: Tensor, through: Tensor, segments: Segments) -> StateMap:
    """The maps of whole sequences from the segments' ``local`` and ``through``
    ``[P, H, K, .]``."""
    if segments.are_sequences:
        return StateMap(local, through)
    _, H, K, V = local.shape
    N = len(segments.whole.chains)
    whole = local.new_empty(N, H, K, V + K)
    follow_chains(local, through, segments.whole, whole, compose=True)
    return StateMap(whole[..., :V], whole[..., V:])


def entering_states(
    local: Tensor, through: Tensor, segments: Segments, initial: Tensor | None
) -> Tensor | None:
    """From the segments' maps ``[P, H, K, .]`` and the sequences' ``initial`` states
    ``[N, H, K, V]``: the state that enters each segment, ``[P, H, K, V]``.

    None, given or returned, means zeros.
    """
    if segments.are_sequences:
        if initial is None:
            return None
        return initial.contiguous()
    if initial is not None:
        initial = initial.to(local.dtype).contiguous()
    return follow_chains(
        local, through, segments.entering, local.new_empty(local.shape), initial
    )


def leaving_gradients(
    d_local: Tensor | None,
    through: Tensor | None,
    segments: Segments,
    d_final: Tensor | None,
) -> Tensor | None:
    """The gradient of the state that leaves every segment, ``[P, H, K, V]``; None: all are
    zero.

    Computes ``dS_in = through^T dS_out + d_local`` from the last part of a sequence to
    the first; ``d_local`` is the dS_in that a segment has if its dS_out is 0. ``d_local``
    and ``through`` may be None if no sequence is cut. ``d_final``: the gradients of the
    final states; None: all are zero.
    """
    if segments.are_sequences:
        if d_final is None:
            return None
        return d_final.contiguous()
    assert d_local is not None and through is not None
    if d_final is not None:
        d_final = d_final.to(d_local.dtype).contiguous()
    return follow_chains(
        d_local, through.mT, segments.leaving, d_local.new_empty(d_local.shape), d_final
    )


def initial_gradients(
    d_local: Tensor, through: Tensor | None, segments: Segments
) -> Tensor:
    """The gradient of the initial states ``[N, H, K, V]`` if the final states have
    gradient 0."""
    if segments.are_sequences:
        return d_local
    assert through is not None
    out = d_local.new_empty((len(segments.opening.chains),) + d_local.shape[1:])
    return follow_chains(d_local, through.mT, segments.opening, out)

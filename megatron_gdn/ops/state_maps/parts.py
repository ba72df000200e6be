"""Sequences cut into parts, so that one long sequence can occupy a whole GPU.

A rule runs the parts side by side. Each part is an affine map of the state that enters it, and
:mod:`.fold` chains the maps of one sequence.

Legend: N sequences, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import torch
from torch import Tensor

from ..host_tables import to_device
from .steps import NONE, Steps

CHUNK = 64
# One sequence alone is cut so that its parts times its heads fill about one H200 of 132
# multiprocessors. The number does not depend on the GPU at hand, because the cut decides rounding.
FULL_GPU = 128
_FEWEST_CHUNKS = 32


@dataclass(frozen=True, eq=False)
class Parts:
    """Tables of N sequences cut into P parts, at multiples of 64 tokens from a sequence's start.

    Attributes:
        sequences: int32 ``[N + 1]``, where sequences begin, and the end.
        offsets: int32 ``[P + 1]``, where parts begin, and the end.
        first: int32 ``[N + 1]``, the first part of every sequence, and P.
        owner: int32 ``[P]``, the sequence of every part.
        opens, closes: bool ``[P]``, whether the part is the first or the last of its sequence.
        chunks: int32 ``[P, 1]``, chunks of 64 tokens per part, rounded up.
        ragged: bool ``[P, 1]``, whether the part ends inside a chunk; None if no part does.
        nowhere: bool ``[P]``, all false.
        whole: steps that write the final state of each sequence.
        entering: steps that write the state that enters each part.
        opening: steps from the last part to the first that write dS_in of each sequence.
        leaving: steps from the last part to the first that write dS_out of each part.
    """

    sequences: Tensor
    offsets: Tensor
    first: Tensor
    owner: Tensor
    opens: Tensor
    closes: Tensor
    chunks: Tensor
    ragged: Tensor | None
    nowhere: Tensor
    whole: Steps
    entering: Steps
    opening: Steps
    leaving: Steps

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

    A sequence is cut into as many parts as fill a GPU of 128 multiprocessors. But no part is cut
    shorter than 32 chunks, or ``value_heads`` chunks (at least 8) if these are fewer: other
    sequences fill the GPU too. No part has more than ``longest`` tokens (a multiple of 64).
    """
    most, fewest = most_parts_and_fewest_chunks(value_heads)
    offsets: list[int] = []
    for start, end in pairwise(sequences):
        chunks = -(-(end - start) // CHUNK)
        step = max(-(-chunks // most), fewest) * CHUNK
        step = step if longest is None else min(step, longest)
        offsets.extend(range(start, end, step))
    return [*offsets, sequences[-1]]

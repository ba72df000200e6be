"""Sequences cut into parts, so that one long sequence can occupy a whole GPU.

A core runs the parts side by side. What a part does to the state that enters it is an affine map,
and :mod:`.fold` chains the maps of one sequence.

Legend: N sequences, P parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..host_tables import to_device
from .chains import NONE, Steps

CHUNK = 64
# One sequence alone is cut so that its parts times its heads fill about one H200 of 132
# multiprocessors. A constant, not the count of the GPU at hand: the cut decides rounding.
FULL_GPU = 128
_FEWEST_CHUNKS = 32


@dataclass(frozen=True, eq=False)
class Parts:
    """Tables of N sequences cut into P parts; every cut lies a multiple of 64 tokens into its
    sequence.

    Attributes:
        sequences: int32 ``[N + 1]``, where sequences begin, and the end.
        offsets: int32 ``[P + 1]``, where parts begin, and the end.
        first: int32 ``[N + 1]``, the first part of every sequence, and P.
        owner: int32 ``[P]``, the sequence of every part.
        opens, closes: bool ``[P]``, whether the part is the first or last of a sequence of more
            than one part; both true for the only part of a sequence.
        chunks: int32 ``[P, 1]``, chunks of 64 tokens per part, rounded up.
        ragged: bool ``[P, 1]``, whether the part ends inside a chunk; None where none does.
        nowhere: bool ``[P]``, false.
        whole: follows the parts of every sequence and writes what comes out.
        entering: follows them and writes what enters every part.
        opening, leaving: the same from the last part to the first, for gradients: what the first
            part hands back, and what every part gets.
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

    @property
    def are_sequences(self) -> bool:
        """No sequence is cut."""
        return len(self.owner) == len(self.first) - 1

    @classmethod
    def build(cls, sequences: Sequence[int], offsets: Sequence[int], device: torch.device) -> Parts:
        """From the offsets of sequences (none empty) and of parts (every sequence's included)."""
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
    """Write the state that leaves the n-th chain to n."""
    return Steps.build(
        [[*((NONE, part) for part in chain), (n, NONE)] for n, chain in enumerate(chains)], device
    )


def _each_of(chains: Sequence[range], device: torch.device) -> Steps:
    """Write the state that enters a part to its own place."""
    return Steps.build(
        [[*((part, part) for part in chain[:-1]), (chain[-1], NONE)] for chain in chains], device
    )


def parts_by_length(
    sequences: Sequence[int], value_heads: int, longest: int | None = None
) -> list[int]:
    """Part offsets where the cut of a sequence depends on its length and the heads alone.

    A sequence alone is cut into as many parts as fill a GPU of 128 multiprocessors; parts shorter
    than 32 chunks (fewer where heads are so few that even more parts leave the GPU empty) are not
    worth their cost, since neighbours fill the GPU as well. No part has more than ``longest``
    tokens (a multiple of 64) where given.
    """
    most = max(1, FULL_GPU // value_heads)
    fewest = max(8, min(_FEWEST_CHUNKS, value_heads))
    offsets: list[int] = []
    for start, end in pairwise(sequences):
        chunks = -(-(end - start) // CHUNK)
        step = max(-(-chunks // most), fewest) * CHUNK
        step = step if longest is None else min(step, longest)
        offsets.extend(range(start, end, step))
    return [*offsets, sequences[-1]]

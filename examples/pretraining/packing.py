"""From a token stream to micro-batches of a fixed size, packed or dense.

Packed (the default): a document becomes consecutive pieces of at most ``seq_length``
tokens. Every piece is a sequence of its own, padded to a multiple that context
parallelism can cut. Pieces fill buffers of ``micro_batch_size * seq_length`` tokens; a
piece that does not fit goes into the next buffer. The rest of a buffer is padding of
its last piece.

Dense: the stream is cut every ``seq_length`` tokens, so a row may hold the end of one
document and the start of the next.

Pieces (or rows) have a seeded order, a new one every epoch, or the corpus's order
without shuffling. The last micro-batch of an epoch is padded to its full size. Padding
has loss mask 0. In one epoch every byte is a label once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from pretraining.corpus import END_OF_DOCUMENT, TokenStream


@dataclass(frozen=True)
class Piece:
    """Labels ``start + 1 .. start + length`` of the stream, padded to ``padded``
    tokens."""

    start: int
    length: int
    padded: int


@dataclass(frozen=True)
class MicroBatch:
    """The tokens that the ranks of a context-parallel group share.

    Attributes:
        tokens, labels, position_ids: int64 ``[rows, width]``; padding is the
            end-of-document id.
        loss_mask: float32 ``[rows, width]``, 0 on padding.
        lengths: real tokens of each packed piece; empty when dense.
        padded_lengths: tokens of each piece in the buffer, summing to ``width``; empty
            when dense.
    """

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    lengths: tuple[int, ...] = ()
    padded_lengths: tuple[int, ...] = ()


def pieces_of(stream: TokenStream, seq_length: int, multiple: int) -> Iterator[Piece]:
    """Cut every document into consecutive pieces of at most ``seq_length`` tokens."""
    ends = list(stream.starts[1:]) + [stream.num_labels]
    for first, end in zip(stream.starts, ends, strict=True):
        for start in range(first, end, seq_length):
            length = min(seq_length, end - start)
            yield Piece(start, length, -(-length // multiple) * multiple)


def visiting_order(count: int, seed: int, epoch: int) -> list[int]:
    """A permutation of ``0 .. count - 1`` that depends on nothing but its arguments."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    return torch.randperm(count, generator=generator).tolist()


def plan_packs(pieces: Sequence[Piece], capacity: int) -> list[tuple[Piece, ...]]:
    """Distribute the pieces over buffers of ``capacity`` tokens, in order."""
    packs: list[tuple[Piece, ...]] = []
    current: list[Piece] = []
    used = 0
    for piece in pieces:
        assert piece.padded <= capacity, (piece, capacity)
        if used + piece.padded > capacity:
            packs.append(tuple(current))
            current = []
            used = 0
        current.append(piece)
        used += piece.padded
    packs.append(tuple(current))
    return packs


def packed_micro_batch(
    stream: TokenStream, pack: tuple[Piece, ...], capacity: int
) -> MicroBatch:
    """Lay the pieces of one pack out in a ``[1, capacity]`` buffer."""
    padded = [piece.padded for piece in pack]
    padded[-1] += capacity - sum(padded)
    batch = _empty(1, capacity)
    for piece, offset in zip(pack, accumulate(padded, initial=0), strict=False):
        _fill(batch, 0, offset, stream, piece.start, piece.length)
        span = slice(offset, offset + piece.length)
        batch.position_ids[0, span] = torch.arange(piece.length)
    return MicroBatch(
        batch.tokens,
        batch.labels,
        batch.loss_mask,
        batch.position_ids,
        lengths=tuple(piece.length for piece in pack),
        padded_lengths=tuple(padded),
    )


def dense_micro_batch(
    stream: TokenStream, starts: Sequence[int], seq_length: int, rows: int
) -> MicroBatch:
    """Rows of ``seq_length`` tokens from these positions; fewer than ``rows`` leave
    padding."""
    batch = _empty(rows, seq_length)
    batch.position_ids[:] = torch.arange(seq_length)
    for row, start in enumerate(starts):
        _fill(batch, row, 0, stream, start, min(seq_length, stream.num_labels - start))
    return batch


def _empty(rows: int, width: int) -> MicroBatch:
    return MicroBatch(
        tokens=torch.full((rows, width), END_OF_DOCUMENT),
        labels=torch.full((rows, width), END_OF_DOCUMENT),
        loss_mask=torch.zeros(rows, width),
        position_ids=torch.zeros(rows, width, dtype=torch.int64),
    )


def _fill(
    batch: MicroBatch,
    row: int,
    offset: int,
    stream: TokenStream,
    start: int,
    length: int,
) -> None:
    span = slice(offset, offset + length)
    batch.tokens[row, span] = stream.tokens[start : start + length].long()
    batch.labels[row, span] = stream.tokens[start + 1 : start + 1 + length].long()
    batch.loss_mask[row, span] = 1.0

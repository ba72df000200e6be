"""Feeds each rank its micro-batches: data-parallel ranks take turns, context-parallel
ranks share.

The position in the data is one number, the micro-batches that all data-parallel ranks
have consumed. With `Feed.identity` it determines every token that follows, so a
checkpoint stores both.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from megatron_gdn.context_parallel.layouts import local_indices
from pretraining.corpus import Corpus, token_stream
from pretraining.packing import (
    MicroBatch,
    dense_micro_batch,
    packed_micro_batch,
    pieces_of,
    plan_packs,
    visiting_order,
)


@dataclass(frozen=True)
class LocalBatch:
    """This rank's part of a micro-batch, on its device, as `HybridModel` takes it."""

    tokens: Tensor
    labels: Tensor
    loss_mask: Tensor
    position_ids: Tensor
    packed_seq_params: Any = None


@dataclass
class Feed:
    """An endless iterator of `LocalBatch` for one rank.

    Args:
        corpus: the documents.
        seed: with the epoch number it decides the order of pieces or rows.
        seq_length: tokens of a row, or the longest packed piece.
        micro_batch_size: rows, or packed tokens in units of ``seq_length``.
        packing: packed pieces or dense rows.
        multiple: packed pieces are padded to multiples of this,
            ``2 * context_parallel_size``.
        cp_size, cp_rank, dp_size, dp_rank: this rank's place.
        device: where the batches go.
        consumed: micro-batches already used by all data-parallel ranks.
    """

    corpus: Corpus
    seed: int
    seq_length: int
    micro_batch_size: int
    packing: bool
    multiple: int
    cp_size: int
    cp_rank: int
    dp_size: int
    dp_rank: int
    device: torch.device
    shuffle: bool = True
    consumed: int = 0
    _epoch: int = field(default=-1, init=False)
    _first: int = field(default=0, init=False)
    _plan: Sequence[Any] = field(default=(), init=False)

    @classmethod
    def of(
        cls, args: Any, corpus: Corpus, device: torch.device, shuffle: bool = True
    ) -> Feed:
        """The feed of this rank's place in Megatron's parallel state."""
        from megatron.core import parallel_state

        return cls(
            corpus,
            seed=args.seed,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            packing=args.packing,
            multiple=args.pad_multiple,
            cp_size=args.context_parallel_size,
            cp_rank=parallel_state.get_context_parallel_rank(),
            dp_size=args.data_parallel_size,
            dp_rank=parallel_state.get_data_parallel_rank(),
            device=device,
            shuffle=shuffle,
        )

    def __post_init__(self) -> None:
        self._stream = token_stream(self.corpus)
        self._units: Sequence[Any] = range(0, self._stream.num_labels, self.seq_length)
        if self.packing:
            self._units = list(pieces_of(self._stream, self.seq_length, self.multiple))

    def __iter__(self) -> Iterator[LocalBatch]:
        return self

    def __next__(self) -> LocalBatch:
        index = self.consumed + self.dp_rank
        self.consumed += self.dp_size
        return self._local(self._micro_batch(index))

    @property
    def epoch(self) -> int:
        """How many times the corpus has been read to its end."""
        return max(self._epoch, 0)

    @property
    def micro_batches_per_epoch(self) -> int:
        """Of all data-parallel ranks together, in the first epoch."""
        return len(self._plan_of_epoch(0))

    def identity(self) -> dict[str, Any]:
        """What the meaning of ``consumed`` depends on."""
        return {
            "corpus": self.corpus.fingerprint(),
            "seed": self.seed,
            "seq_length": self.seq_length,
            "micro_batch_size": self.micro_batch_size,
            "packing": self.packing,
            "shuffle": self.shuffle,
            "multiple": self.multiple if self.packing else None,
        }

    def _micro_batch(self, index: int) -> MicroBatch:
        while index >= self._first + len(self._plan):
            self._first += len(self._plan)
            self._epoch += 1
            self._plan = self._plan_of_epoch(self._epoch)
        rows = self.micro_batch_size
        width = self.seq_length
        members = self._plan[index - self._first]
        if self.packing:
            return packed_micro_batch(self._stream, members, rows * width)
        return dense_micro_batch(self._stream, members, width, rows)

    def _plan_of_epoch(self, epoch: int) -> Sequence[Any]:
        """The pieces, or starts of rows, that each micro-batch of the epoch holds."""
        units = self._units
        rows = self.micro_batch_size
        if self.shuffle:
            units = [units[i] for i in visiting_order(len(units), self.seed, epoch)]
        if self.packing:
            return plan_packs(units, rows * self.seq_length)
        return [units[i : i + rows] for i in range(0, len(units), rows)]

    def _local(self, batch: MicroBatch) -> LocalBatch:
        lengths = batch.padded_lengths or (self.seq_length,)
        mine = local_indices(lengths, self.cp_size, self.cp_rank)

        def share(whole: Tensor) -> Tensor:
            """This rank's columns of ``whole``."""
            return whole[:, mine].contiguous().to(self.device)

        return LocalBatch(
            share(batch.tokens),
            share(batch.labels),
            share(batch.loss_mask),
            share(batch.position_ids),
            packed_seq_params=self._packed_seq_params(batch) if batch.lengths else None,
        )

    def _packed_seq_params(self, batch: MicroBatch):
        from megatron.core.packed_seq_params import PackedSeqParams

        def offsets(lengths: tuple[int, ...]) -> Tensor:
            return torch.tensor(
                list(accumulate(lengths, initial=0)),
                dtype=torch.int32,
                device=self.device,
            )

        real = offsets(batch.lengths)
        padded = offsets(batch.padded_lengths)
        longest = max(batch.padded_lengths)
        return PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=real,
            cu_seqlens_kv=real,
            cu_seqlens_q_padded=padded,
            cu_seqlens_kv_padded=padded,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )

"""Causal attention in plain torch, over packed documents and with context parallelism.

For machines without Transformer Engine, and on a GPU as the slow twin of its attention.

Legend: S tokens of the whole buffer in sequence order, s this rank's share of them in its order,
B batch (1 when packed), H query heads and G key heads of this tensor-parallel rank, D head size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ...context_parallel.layouts import SequenceLayout, positions, rank_order_of_sequence
from ...ops.documents import Documents
from ...ops.static_documents import StaticDocuments
from ...ops.trees import TreeDocuments
from ..arguments import require_causal
from ..loader_layout import AUTO, FollowsLoader, LoaderLayout
from ..packing import context_parallel_group_of, resolve_packed_seq_params

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)


class TorchAttention(FollowsLoader, DotProductAttention):
    """Softmax attention for the ``core_attention`` place of Megatron's ``SelfAttention``.

        o_t = sum_j p_tj v_j,   p_t = softmax_j(scale q_t . k_j),   j <= t in t's document

    A batch that is not packed, on one context-parallel rank, goes to Megatron's DotProductAttention
    with all its options. With packed documents or context parallelism, every rank gathers the keys
    and values of all ranks and attends with its own queries, document by document. So the number of
    heads does not limit the number of ranks.

    Constructor arguments are those of DotProductAttention, and ``cp_layout``: how sequences were
    cut for context parallelism, as in `GatedDeltaNet`.

    Raises:
        NotImplementedError: context parallelism with a window, a softmax other than ``"vanilla"``,
            or attention that is not causal self-attention.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *args: Any,
        pg_collection: ProcessGroupCollection | None = None,
        cp_layout: str | SequenceLayout = AUTO,
        **kwargs: Any,
    ) -> None:
        if pg_collection is None:
            pg_collection = ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"])
        # DotProductAttention refuses any other context_parallel_size.
        super().__init__(_of_one_rank(config), *args, pg_collection=pg_collection, **kwargs)
        self.config = config
        self.loader_layout = LoaderLayout(cp_layout, config)
        self._whole = False  # whether queries and keys are of whole sequences, on every rank
        if config.context_parallel_size > 1:
            self._require_plain(f"context_parallel_size={config.context_parallel_size}")

    @property
    def cp_group(self) -> Any:
        """``pg_collection.cp``: either may be set, and the next forward uses the later value."""
        return self.pg_collection.cp

    @cp_group.setter
    def cp_group(self, group: Any) -> None:
        if group is not self.pg_collection.cp:
            self.pg_collection = copy.copy(self.pg_collection)  # others hold that one
            self.pg_collection.cp = group

    @contextmanager
    def on_whole_sequences(self) -> Iterator[None]:
        """Inside, inputs are whole sequences: in generation every rank has all tokens."""
        self._whole = True
        try:
            yield
        finally:
            self._whole = False

    @contextmanager
    def _config_of_one_rank(self) -> Iterator[None]:
        """Inside, Megatron's forward gathers no keys: that of its dev branch does by the config."""
        config = self.config
        if config.context_parallel_size > 1:
            self.config = _of_one_rank(config)
        try:
            yield
        finally:
            self.config = config

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend with this rank's queries to the keys of all ranks.

        Args:
            query: ``[s, B, H, D]``, or ``[s, H, D]`` when packed.
            key, value: likewise with G heads; in generation of all tokens so far, of which the
                queries are the last.
            attention_mask: None or causal; any that DotProductAttention takes, where that runs.
            packed_seq_params: global boundaries of packed documents (``qkv_format="thd"``), and the
                context-parallel group of this micro-batch if it has its own.

        Returns:
            ``[s, B, H * D]``, or ``[s, H * D]`` when packed, in the dtype of ``query``.

        Raises:
            ValueError: boundaries or lengths that do not fit.
            NotImplementedError: packed documents with a setting that context parallelism refuses;
                an attention bias; a mask that is not causal.
        """
        group = None if self._whole else self.cp_group
        micro_batch = MicroBatchShare.of(
            packed_seq_params, group, self.loader_layout.of, query.shape[0], query.device
        )
        if micro_batch.documents is None and micro_batch.size == 1:
            if self.config.batch_invariant_mode and attention_mask is None:
                return self._query_by_query(query, key, value)
            if attention_mask is None and 1 < query.shape[0] < key.shape[0]:
                attention_mask = _future_of_last(query.shape[0], key.shape[0], query.device)
            with self._config_of_one_rank():
                return super().forward(
                    query, key, value, attention_mask, attn_mask_type, attention_bias
                )
        packed = micro_batch.documents is not None
        self._require_plain("packed documents" if packed else "context parallelism", attn_mask_type)
        if attention_bias is not None:
            raise NotImplementedError("TorchAttention adds no attention_bias; pass None.")
        rows, tokens = 1 if packed else query.shape[1], query.shape[0] * micro_batch.size
        require_causal(attention_mask, rows, tokens, lambda: micro_batch.positions)
        without_rows = query.dim() == 3  # Megatron takes the row of a batch off "thd" queries
        if without_rows:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        key, value = micro_batch.gather(key), micro_batch.gather(value)
        exact = self.config.batch_invariant_mode and micro_batch.size == 1
        attended = (self._attend(x, query, key, value, exact) for x in micro_batch.spans)
        out_sBHD = torch.cat([*attended])
        return out_sBHD.flatten(1 if without_rows else 2)

    def _attend(
        self, span: Span, query_sBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, exact: bool
    ) -> Tensor:
        """One document's queries on this rank, over its keys up to the last of them."""
        query = query_sBHD[span.first : span.last]
        key, value = (x[span.start : span.end] for x in (key_SBGD, value_SBGD))
        if exact:
            return self._query_by_query(query, key, value).unflatten(-1, (query.shape[2], -1))
        position, before = span.position, 0
        if span.before:
            before = sum(keys.stop - keys.start for keys in span.before)
            key, value = (
                torch.cat([*(whole[keys] for keys in span.before), own])
                for whole, own in ((key_SBGD, key), (value_SBGD, value))
            )
            if position is None:
                position = torch.arange(len(query), device="cpu")
        shared_by = query.shape[2] // key.shape[2]
        if shared_by > 1:
            key, value = (x.repeat_interleave(shared_by, dim=2) for x in (key, value))
        mask = None
        if position is not None:
            position = position.to(query.device, non_blocking=True) + before
            mask = position[:, None] >= torch.arange(len(key), device=query.device)
        rate = self.attention_dropout.p if self.training else 0.0
        # Where tensor-parallel ranks hold different heads, they draw from their own generator.
        own = rate and not self.config.sequence_parallel
        tracker: Any = tensor_parallel.get_cuda_rng_tracker() if own else None
        with tracker.fork() if own else nullcontext():
            out_BHsD = F.scaled_dot_product_attention(
                *(x.permute(1, 2, 0, 3) for x in (query, key, value)),
                attn_mask=mask,
                dropout_p=rate,
                is_causal=mask is None,
                scale=self.softmax_scale * (self.scale_mask_softmax.scale or 1.0),
            )
        return out_BHsD.permute(2, 0, 1, 3)

    def _query_by_query(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Each query over the keys up to its own, which alone set its bits; slow."""
        self._require_plain("batch_invariant_mode")
        before, shared_by = key.shape[0] - query.shape[0], query.shape[2] // key.shape[2]
        scale = self.softmax_scale * (self.scale_mask_softmax.scale or 1.0)
        rows = []
        for s in range(query.shape[0]):
            for b in range(query.shape[1]):
                k, v = (
                    x[: before + s + 1, b].repeat_interleave(shared_by, dim=1).transpose(0, 1)
                    for x in (key, value)
                )
                q = query[s, b][:, None]
                scores = (q * k.contiguous()).sum(-1, keepdim=True) * scale
                rows.append((scores.softmax(1) * v.contiguous()).sum(1).flatten())
        return torch.stack(rows).view(*query.shape[:2], -1)

    def _require_plain(self, what: str, mask_type: AttnMaskType | None = None) -> None:
        mask_type = self.attn_mask_type if mask_type is None else mask_type
        refused = {
            f"window_size={self.config.window_size}": self.scale_mask_softmax.window_size,
            f"softmax_type={self.config.softmax_type!r}": self.config.softmax_type != "vanilla",
            f"attn_mask_type={mask_type}": mask_type not in _CAUSAL,
            f"attention_type={self.attention_type!r}": self.attention_type != "self",
        }
        for setting, is_set in refused.items():
            if is_set:
                raise NotImplementedError(
                    f"TorchAttention cannot combine {what} with {setting}: there it is causal "
                    "self-attention with a plain softmax and no window. Change the setting, or use "
                    "Transformer Engine's attention."
                )


def _future_of_last(queries: int, keys: int, device: torch.device) -> Tensor:
    """bool ``[1, 1, queries, keys]``: True where a key comes after one of the last queries."""
    position = torch.arange(keys - queries, keys, device=device)
    return (torch.arange(keys, device=device) > position[:, None])[None, None]


def _of_one_rank(config: TransformerConfig) -> TransformerConfig:
    alone = copy.copy(config)
    alone.context_parallel_size = 1
    return alone


class Span(NamedTuple):
    """The rows ``first:last`` of this rank, which are of one document, and the keys they see."""

    first: int
    last: int
    start: int  # of the document's keys in sequence order
    end: int  # of those that any row sees
    position: Tensor | None  # int64, of each row, from start; None: the rows are start:end in order
    before: tuple[slice, ...] = ()  # keys of documents that this one continues; all rows see them


class MicroBatchShare(NamedTuple):
    """What a rank holds of a micro-batch."""

    documents: Documents | None
    group: Any
    layout: SequenceLayout
    lengths: tuple[int, ...]

    @classmethod
    def of(
        cls,
        packed: PackedSeqParams | None,
        group: Any,
        layout_of: Callable[[PackedSeqParams | None], SequenceLayout],
        tokens: int,
        device: torch.device,
    ) -> MicroBatchShare:
        """The share of ``tokens`` local tokens, in the micro-batch's group or else ``group``.

        ``layout_of`` gives how several ranks' micro-batch was cut; called with None if not packed.
        Boundaries in fixed buffers are read by the host, which a capture refuses (RuntimeError).
        """
        group = context_parallel_group_of(packed, group)
        total = tokens * (1 if group is None else group.size())
        documents = resolve_packed_seq_params(packed, total, device)
        if isinstance(documents, StaticDocuments):
            documents = documents.on_host()
        layout = SequenceLayout.ZIGZAG  # any: one rank holds all tokens in order
        if total != tokens:
            layout = layout_of(None if documents is None else packed)
        return cls(documents, group, layout, Documents.lengths_of(documents, total))

    @property
    def size(self) -> int:
        return 1 if self.group is None else self.group.size()

    @property
    def rank(self) -> int:
        return 0 if self.group is None else self.group.rank()

    @property
    def positions(self) -> Tensor:
        """Positions in the sequence of this rank's tokens; int64 ``[s]`` on the host."""
        return positions(self.lengths, self.size, self.layout)[self.rank]

    @property
    def spans(self) -> tuple[Span, ...]:
        """This rank's rows by document, in order; empty documents are left out."""
        spans = _spans(self.lengths, self.size, self.rank, self.layout)
        if not isinstance(self.documents, TreeDocuments):
            return spans
        return tuple(x._replace(before=self.documents.tokens_before(x.start)) for x in spans)

    def gather(self, x: Tensor) -> Tensor:
        """``[s, ...] -> [S, ...]``, all ranks' rows in sequence order; gradients are summed."""
        return gather_in_order(x, self.group, self.lengths, self.layout)


def gather_in_order(
    x: Tensor, group: Any, lengths: tuple[int, ...], layout: SequenceLayout
) -> Tensor:
    """``[s, ...] -> [S, ...]``: the rows of all ranks, cut by ``layout``, in sequence order."""
    if group is None or group.size() == 1:
        return x
    rank_order = tensor_parallel.gather_from_sequence_parallel_region(x.contiguous(), group=group)
    place = rank_order_of_sequence(lengths, group.size(), layout)
    return rank_order.index_select(0, place.to(x.device, non_blocking=True))


@lru_cache(maxsize=16)
def _spans(
    lengths: tuple[int, ...], size: int, rank: int, layout: SequenceLayout
) -> tuple[Span, ...]:
    # In every layout a rank holds its tokens in sequence order, so a document's are neighbours.
    held = positions(lengths, size, layout)[rank]
    offsets = torch.tensor((0, *lengths), device="cpu").cumsum(0)
    cuts = torch.searchsorted(held, offsets).tolist()
    spans = []
    for start, first, last in zip(offsets.tolist(), cuts, cuts[1:], strict=False):
        if first < last:
            position = held[first:last] - start
            seen = int(position[-1]) + 1
            whole = seen == last - first
            spans.append(Span(first, last, start, start + seen, None if whole else position))
    return tuple(spans)

"""The documents and padding of one forward, for every linear-attention layer of a model.

The text model's forward resolves them once, so all layers, and their recomputation in the backward,
see the same boundaries.

Legend: B batch, S tokens of a row (this rank's, with context parallelism), T tokens that are not
padding, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ...context_parallel import SequenceLayout
from ...mixers.padding import Take, TakeRows, read_mask
from ...ops.documents import Documents
from ...ops.host_tables import to_device
from .place import RowExchange, group_of, in_order, place_of, positions_of, require_agreement
from .sources import Sources, document_ids

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class ModelBatch:
    """One forward of a model.

    ``packed`` are the documents' boundaries over all ranks, ``ids`` int64 ``[B, S]`` on the host
    those of all ranks' tokens in sequence order, 0 at padding; both None when every row is one
    sequence. ``keep``, bool ``[B, S]``, is False at padding, where the output is exactly zero.
    """

    packed: PackedSeqParams | None = None
    ids: Tensor | None = None
    keep: Tensor | None = None
    group: ProcessGroup | None = None  # of context-parallel ranks
    layout: SequenceLayout = SequenceLayout.CONTIGUOUS  # of the rows that the mixer is given
    own: Tensor | None = None  # int64 [S] on the host: positions of this rank's tokens
    # To the mixer's rows and back, where some are dropped or lie on other ranks.
    moves: tuple[Take, Take] | tuple[RowExchange, RowExchange] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether transformers computes the same: whole sequences on one rank."""
        return self.packed is None and self.group is None

    def enter(self, x_BSH: Tensor) -> Tensor:
        """Hidden states to rows for the mixer: ``[1, T, H]`` when packed, else ``[B, S, H]``."""
        if self.packed is not None and self.group is None:
            return self.move(x_BSH.flatten(0, 1)).unsqueeze(0)
        return self.move(self._blank(x_BSH))

    def leave(self, y: Tensor, like_BSH: Tensor) -> Tensor:
        """The inverse of :meth:`enter`; padding is exactly zero."""
        if self.packed is not None and self.group is None:
            return self.move_back(y.squeeze(0)).unflatten(0, like_BSH.shape[:2])
        return self._blank(self.move_back(y))

    def move(self, x: Tensor) -> Tensor:
        return x if self.moves is None else TakeRows.apply(x, *self.moves)

    def move_back(self, y: Tensor) -> Tensor:
        return y if self.moves is None else TakeRows.apply(y, *reversed(self.moves))

    def _blank(self, x_BSH: Tensor) -> Tensor:
        """Set padding to zero; its gradient is zero too."""
        return x_BSH if self.keep is None else x_BSH.masked_fill(~self.keep[..., None], 0)


def resolve_call(
    options: Any, sources: Sources, x_BSH: Tensor, seq_index: Tensor | None, cache: Any = None
) -> ModelBatch | None:
    """Resolve one forward; None if it continues from a cache, by transformers' own forward.

    ``x_BSH`` may be token ids ``[B, S]``. With context parallelism masks, ids and positions are of
    this rank's tokens (all ranks are given the same kinds of them), offsets of the whole buffer.
    """
    (rows, tokens), device, group = x_BSH.shape[:2], x_BSH.device, group_of(options.cp_mesh)
    if group is not None:
        layout = SequenceLayout.parse(options.cp_layout)
        return _resolve_shared(sources, x_BSH, seq_index, group, layout)
    if cache is not None and cache.get_seq_length() > 0:
        _refuse_documents_after_cache(sources, seq_index)
        return None
    if seq_index is not None and not _is_straight(seq_index, tokens):
        raise ValueError(
            f"seq_index of shape {tuple(seq_index.shape)} without context-parallel ranks: one "
            f"rank holds the whole sequence, whose {tokens} tokens must be in order."
        )
    ids = document_ids(sources, rows, tokens)
    if ids is None:
        return ModelBatch()
    token_T, _, lengths = read_mask(ids)
    keep = moves = None
    if len(token_T) < rows * tokens:
        back = torch.full((rows * tokens,), -1, device="cpu")
        back[token_T] = torch.arange(len(token_T), device="cpu")
        moves = Take.along(token_T, device), Take.along(back, device)
        keep = to_device(ids > 0, device)
    return ModelBatch(_packed(lengths), ids, keep, moves=moves)


def _resolve_shared(
    sources: Sources,
    x_BSH: Tensor,
    seq_index: Tensor | None,
    group: ProcessGroup,
    layout: SequenceLayout,
) -> ModelBatch:
    (rows, tokens), device = x_BSH.shape[:2], x_BSH.device
    mask, offsets = sources.attention_mask, sources.cu_seqlens
    if offsets is not None:
        offsets = torch.as_tensor(offsets, device="cpu").detach().long()
        sources = sources._replace(cu_seqlens=offsets)
    require_agreement(sources, x_BSH.shape, seq_index, group, device)
    by_document = offsets is not None
    layout, positions, moves = place_of(group, layout, tokens, device, seq_index, by_document)
    if sources.indices is not None:
        raise ValueError(
            f"indices of {sources.indices.numel()} tokens with context parallelism: offsets count "
            f"the tokens of the whole buffer, padding included. Give this rank's ids of documents "
            f"as attention_mask instead, 0 at padding."
        )
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"an attention_mask of shape {tuple(mask.shape)} says nothing about the tokens of "
            f"other context-parallel ranks; name the documents by cu_seq_lens_q (of the whole "
            f"buffer) or by this rank's _packed_seq_ids."
        )
    everywhere = in_order(sources, x_BSH.shape[:2], device, group, layout, positions)
    total = tokens * group.size()
    ids = document_ids(everywhere, rows, total)
    padded = everywhere.attention_mask
    if ids is None and padded is not None and bool((padded == 0).any()):
        ids = (padded != 0).long()
    lengths = (total,)
    if ids is not None:
        read_mask(ids)  # raises the errors of one rank
        if offsets is not None:
            lengths = Documents.from_cu_seqlens(offsets, total).lengths
    if positions is None:
        positions = positions_of(lengths, group.size(), layout)
    own = positions[group.rank()]
    batch = partial(ModelBatch, group=group, layout=layout, own=own, moves=moves)
    if ids is None:
        return batch()
    keep = None if bool((ids > 0).all()) else to_device(ids[:, own] > 0, device)
    one_each = bool((ids.amax(-1) <= 1).all())
    if one_each and not bool((ids[:, 1:] > ids[:, :-1]).any()):  # padding at the end, or none
        return batch(ids=ids, keep=keep)
    if rows > 1:
        what = "padding before tokens" if one_each else "packed documents"
        raise ValueError(
            f"context parallelism takes {what} in one row only, got {rows} rows. Lay the rows end "
            f"to end (megatron_gdn.hf.PackingCollator does)."
        )
    # A stretch of padding is a document of its own, so its state reaches no other.
    changes = (ids[0].diff() != 0).nonzero().flatten() + 1
    ends = [0, *changes.tolist(), ids.shape[1]]
    if offsets is not None:  # keep empty documents: the layout may cut by them
        ends = sorted([*offsets.tolist(), *set(ends).difference(offsets.tolist())])
    lengths = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
    return batch(_packed(lengths), ids, keep)


def _packed(lengths: tuple[int, ...]) -> PackedSeqParams:
    """Boundaries of documents, on the host: no layer has to wait for a device to read them."""
    ends = torch.tensor((0, *(lengths or (0,))), device="cpu")
    offsets = ends.cumsum(0).to(torch.int32)
    longest = max(lengths, default=0)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _is_straight(seq_index: Tensor, tokens: int) -> bool:
    """Whether every row is 0, 1, ... in order."""
    if seq_index.dim() not in (1, 2) or seq_index.shape[-1] != tokens:
        return False
    index = seq_index.detach().to("cpu", torch.int64)
    return not bool((index != torch.arange(tokens, device="cpu")).any())


def _refuse_documents_after_cache(sources: Sources, seq_index: Tensor | None) -> None:
    """Refuse anything but a mask and positions: a cache has one sequence per row."""
    told = {
        "_packed_seq_ids": sources.packed_seq_ids,
        "cu_seqlens or cu_seq_lens_q": sources.cu_seqlens,
        "indices": sources.indices,
        "seq_index": seq_index,
    }
    given = [name for name, x in told.items() if x is not None]
    if given:
        raise ValueError(
            f"{', '.join(given)} with a batch that goes on from a cache: it holds one sequence "
            f"per row, in order. Leave it out, or pass no past_key_values."
        )

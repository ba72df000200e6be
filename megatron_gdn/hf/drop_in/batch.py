"""The documents and padding of one forward, for every linear-attention layer of a model.

The text model's forward resolves them once and passes them to the layers. So conv and rule of all
layers, and their recomputation in the backward, see the same boundaries.

Legend: B batch, S tokens of a row (this rank's, with context parallelism), T tokens that are not
padding, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from ...context_parallel import SequenceLayout
from ...mixers.padding import Take, TakeRows, read_mask
from ...ops.host_tables import to_device
from .place import Place
from .sources import Sources, document_ids

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class ModelBatch:
    """One forward of a model.

    Attributes:
        packed: the documents' boundaries, over all ranks; None when every row is one sequence.
        ids: int64 ``[B, S]`` on the host, document ids of all ranks' tokens in sequence order, 0 at
            padding; None when every row is one sequence.
        keep: bool ``[B, S]``, False at padding, where the output is exactly zero; None without
            padding.
        take: tables that lay the kept tokens end to end and back; None if no row is dropped.
        place: what this rank holds; None on one rank.
    """

    packed: PackedSeqParams | None = None
    ids: Tensor | None = None
    keep: Tensor | None = None
    take: tuple[Take, Take] | None = None
    place: Place | None = None

    @property
    def is_plain(self) -> bool:
        """Whether transformers computes the same: whole sequences on one rank."""
        return self.packed is None and self.place is None

    @property
    def group(self) -> ProcessGroup | None:
        return None if self.place is None else self.place.group

    @property
    def layout(self) -> SequenceLayout:
        return SequenceLayout.CONTIGUOUS if self.place is None else self.place.layout

    def enter(self, x_BSH: Tensor) -> Tensor:
        """Hidden states to rows for the mixer: ``[1, T, H]`` when packed, else ``[B, S, H]``."""
        if self.place is not None:
            return self.place.enter(self._blank(x_BSH))
        if self.packed is None:
            return self._blank(x_BSH)
        rows = x_BSH.flatten(0, 1)
        if self.take is not None:
            rows = TakeRows.apply(rows, *self.take)
        return rows.unsqueeze(0)

    def leave(self, y: Tensor, like_BSH: Tensor) -> Tensor:
        """The inverse of :meth:`enter`; padding is exactly zero."""
        if self.place is not None:
            return self._blank(self.place.leave(y))
        if self.packed is None:
            return self._blank(y)
        rows = y.squeeze(0)
        if self.take is not None:
            rows = TakeRows.apply(rows, *reversed(self.take))
        return rows.unflatten(0, like_BSH.shape[:2])

    def _blank(self, x_BSH: Tensor) -> Tensor:
        """Set padding to zero; its gradient is zero too."""
        return x_BSH if self.keep is None else x_BSH.masked_fill(~self.keep[..., None], 0)


PLAIN = ModelBatch()


def resolve_batch(
    sources: Sources, rows: int, tokens: int, device: torch.device, place: Place | None = None
) -> ModelBatch:
    """Resolve the sources of ``rows`` rows of ``tokens`` tokens on this rank.

    Args:
        sources: with context parallelism masks, ids and positions of this rank's tokens (all
            ranks must be given the same kinds of them), and offsets of the whole buffer.
        place: what this rank holds of the sequence; None on one rank.

    Raises:
        ValueError: what :func:`.sources.document_ids` refuses; with context parallelism also
            packed documents in several rows, 4-D masks, ``indices``, padding before tokens, and
            sources that do not suffice for a layout that cuts every document by itself.
    """
    if place is not None:
        return _resolve_shared(sources, rows, tokens, device, place)
    ids = document_ids(sources, rows, tokens) if sources.given() else None
    if ids is None:
        return PLAIN
    token_T, _, lengths = read_mask(ids)
    keep = take = None
    if len(token_T) < rows * tokens:
        back = torch.full((rows * tokens,), -1, device="cpu")
        back[token_T] = torch.arange(len(token_T), device="cpu")
        take = Take.along(token_T, device), Take.along(back, device)
        keep = to_device(ids > 0, device)
    return ModelBatch(packed_of(lengths), ids, keep, take)


def packed_of(lengths: tuple[int, ...]) -> PackedSeqParams:
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


def _resolve_shared(
    sources: Sources, rows: int, tokens: int, device: torch.device, place: Place
) -> ModelBatch:
    mask = sources.attention_mask
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
    everywhere = place.in_sequence_order(sources, rows, tokens, device)
    ids = document_ids(everywhere, rows, tokens * place.size)
    padded = everywhere.attention_mask
    if ids is None and padded is not None and bool((padded == 0).any()):
        ids = (padded != 0).long()
    if ids is None:
        return ModelBatch(place=place.of_documents((tokens * place.size,)))
    read_mask(ids)  # raises the errors of one rank
    local = place.local(ids, everywhere.cu_seqlens)
    keep = None if bool((ids > 0).all()) else to_device(local > 0, device)
    one_each = bool((ids.amax(-1) <= 1).all())
    if one_each and not bool((ids[:, 1:] > ids[:, :-1]).any()):  # padding at the end, or none
        return ModelBatch(ids=ids, keep=keep, place=place)
    if rows > 1:
        what = "padding before tokens" if one_each else "packed documents"
        raise ValueError(
            f"context parallelism takes {what} in one row only, got {rows} rows. Lay the rows end "
            f"to end (megatron_gdn.hf.PackingCollator does)."
        )
    # A stretch of padding is a document of its own, so its state reaches no other.
    changes = (ids[0].diff() != 0).nonzero().flatten() + 1
    ends = [0, *changes.tolist(), ids.shape[1]]
    if everywhere.cu_seqlens is not None:  # keep empty documents: the layout may cut by them
        offsets = everywhere.cu_seqlens.tolist()
        ends = sorted([*offsets, *set(ends).difference(offsets)])
    lengths = tuple(b - a for a, b in zip(ends, ends[1:], strict=False))
    return ModelBatch(packed_of(lengths), ids, keep, place=place.of_documents(lengths))

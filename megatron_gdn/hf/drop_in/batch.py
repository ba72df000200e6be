"""The batch of one forward: where documents, padding and each rank's tokens lie.

The text model's forward resolves the batch once, so all layers and recomputations see the same
boundaries.

Legend: B batch, S tokens of the whole sequence, s this rank's share (S on one rank), H hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...context_parallel import SequenceLayout, local_indices
from ...context_parallel.layouts import positions as positions_of
from ...mixers.padding import read_mask
from ...ops.documents import Documents
from ...ops.host_tables import to_device
from .sources import Ranks, Sources, document_ids, starts_of

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")


def group_of(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """The process group of a one-dimensional device mesh; None without mesh or with one rank."""
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.ndim != 1:
        raise ValueError(
            f"cp_mesh has the dimensions {mesh.mesh_dim_names or mesh.ndim}; context parallelism "
            f"runs over one. Pass that one: mesh['cp']."
        )
    return mesh.get_group()


@dataclass(frozen=True, eq=False)
class ModelBatch:
    """One forward of a model.

    ``packed`` holds the boundaries of the documents of all ranks. ``ids``, int64 ``[B, S]`` on the
    host, are the documents' numbers at all ranks' tokens in sequence order, 0 at padding. Both are
    None when every row is one sequence. ``keep``, bool ``[B, s]``, is False at padding, where the
    output is exactly zero.
    """

    packed: Any = None
    ids: Tensor | None = None
    keep: Tensor | None = None
    group: Any = None  # process group of the context-parallel ranks
    layout: SequenceLayout = SequenceLayout.CONTIGUOUS  # how ranks share the sequence
    own_positions: Tensor | None = None  # int64 [s] on the host: where this rank's tokens lie

    @property
    def is_plain(self) -> bool:
        """Whether each row is one sequence on one rank, as transformers' own forward needs."""
        return self.packed is None and self.group is None

    @property
    def kind(self) -> str:
        """What transformers' own forward cannot run in this batch, as messages name it."""
        return "packed documents" if self.group is None else "context parallelism"

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of every document over all ranks; if not packed, tokens of a whole row."""
        if self.packed is not None:
            return tuple(self.packed.cu_seqlens_q.diff().tolist())
        assert self.own_positions is not None
        return (len(self.own_positions) * self.group.size(),)

    @property
    def positions(self) -> Tensor:
        """int64 ``[B or 1, s]`` on the host: tokens' positions in their documents, 0 at padding."""
        ids, own = self.ids, self.own_positions
        if ids is None or self.packed is None:
            assert own is not None
            return own[None]
        column = torch.arange(ids.shape[1], device="cpu").expand_as(ids)
        start = column.masked_fill(~starts_of(ids), 0).cummax(-1).values
        found = (column - start).masked_fill(ids == 0, 0)
        return found if own is None else found[:, own]

    def enter(self, x_BsH: Tensor) -> Tensor:
        """Shape hidden states as mixer rows: ``[1, B s, H]`` if packed, else ``[B, s, H]``."""
        x_BsH = self._zero_padding(x_BsH)
        return x_BsH if self.packed is None else x_BsH.flatten(0, 1).unsqueeze(0)

    def leave(self, y: Tensor, like_BsH: Tensor) -> Tensor:
        """The inverse of :meth:`enter`; padding is exactly zero."""
        return self._zero_padding(y.reshape(*like_BsH.shape[:2], -1))

    def _zero_padding(self, x_BsH: Tensor) -> Tensor:
        """Set padding to zero; its gradient is zero too."""
        return x_BsH if self.keep is None else x_BsH.masked_fill(~self.keep[..., None], 0)


def resolve_call(
    options: Any, sources: Sources, x_BsH: Tensor, cache: Any, fills_cache: bool = False
) -> ModelBatch | None:
    """Resolve one forward's batch; None if transformers' own forward continues from a cache.

    ``x_BsH`` may be token ids ``[B, s]``. With context parallelism, masks, ids and positions are
    those of this rank's tokens, and all ranks must give the same kinds of sources; offsets are
    those of the whole buffer.
    """
    (rows, tokens), device, group = x_BsH.shape[:2], x_BsH.device, group_of(options.cp_mesh)
    if group is not None:
        layout = SequenceLayout.parse(options.cp_layout)
        batch = _resolve_over_ranks(sources, Ranks(group, device, rows, tokens), layout)
    elif cache is not None and cache.get_seq_length() > 0:
        told = {
            "_packed_seq_ids": sources.packed_seq_ids,
            "cu_seqlens or cu_seq_lens_q": sources.cu_seqlens,
            "indices": sources.indices,
            "seq_index": sources.seq_index,
        }
        if given := [name for name, x in told.items() if x is not None]:
            raise ValueError(
                f"{', '.join(given)} with a batch that goes on from a cache, which holds one "
                f"sequence per row. Leave these arguments out, or pass no past_key_values."
            )
        return None
    else:
        batch = _resolve_on_one_rank(sources, device, rows, tokens)
    if (cache is not None or fills_cache) and not batch.is_plain:
        raise ValueError(
            f"a cache cannot be filled with {batch.kind}: it holds one state per row. Pass "
            f"use_cache=False and no past_key_values; generate on one rank, one sequence per row."
        )
    return batch


def _resolve_on_one_rank(
    sources: Sources, device: torch.device, rows: int, tokens: int
) -> ModelBatch:
    index = sources.seq_index
    if index is not None:
        in_order = torch.arange(tokens, device="cpu").expand(index.shape[:-1] + (tokens,))
        if index.dim() not in (1, 2) or not torch.equal(index.cpu().long(), in_order):
            raise ValueError(
                f"seq_index of shape {tuple(index.shape)} without context-parallel ranks: one "
                f"rank holds the whole sequence, so its {tokens} tokens must be in order."
            )
    ids = document_ids(sources, rows, tokens)
    if ids is None:
        return ModelBatch()
    read_mask(ids)  # refuses padding inside a document, and documents out of order
    return ModelBatch(_packed_boundaries(ids), ids, _not_padding(ids, device))


def _not_padding(ids: Tensor, device: torch.device) -> Tensor | None:
    """bool ``[B, S]``, False at padding; None if no token is padding."""
    return None if bool((ids > 0).all()) else to_device(ids > 0, device)


def _packed_boundaries(ids: Tensor, offsets: Tensor | None = None) -> SimpleNamespace:
    """Boundaries of all documents, under the names of Megatron's PackedSeqParams, on the host.

    A run of padding counts as a document, so its state reaches no other document. Empty documents
    of ``offsets`` are kept, because the layout may cut document by document.
    """
    kept = [0] if offsets is None else offsets.tolist()
    ends = {*starts_of(ids).flatten().nonzero().flatten().tolist(), ids.numel()}.difference(kept)
    offsets = torch.tensor(sorted([*kept, *ends]), dtype=torch.int32, device="cpu")
    return SimpleNamespace(
        qkv_format="thd",
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=None,
        cu_seqlens_kv_padded=None,
        cp_group=None,
        local_cp_size=None,
    )


def _resolve_over_ranks(sources: Sources, ranks: Ranks, layout: SequenceLayout) -> ModelBatch:
    mask, offsets, indices = sources.attention_mask, sources.cu_seqlens, sources.indices
    if offsets is not None:
        offsets = torch.as_tensor(offsets, device="cpu").detach().long()
        sources = sources._replace(cu_seqlens=offsets)
    ranks.require_agreement(sources)
    if indices is not None:
        raise ValueError(
            f"indices of {indices.numel()} tokens with context parallelism: offsets count the "
            f"tokens of the whole buffer, padding included. Give this rank's ids of documents as "
            f"attention_mask instead, 0 at padding."
        )
    layout, positions = _layout_and_positions(sources, ranks, layout)
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"an attention_mask of shape {tuple(mask.shape)} says nothing about the tokens of "
            f"other context-parallel ranks; name the documents by cu_seq_lens_q (of the whole "
            f"buffer) or by this rank's _packed_seq_ids."
        )
    everywhere = ranks.in_sequence_order(sources, layout, positions)
    ids, mask = document_ids(everywhere, ranks.rows, ranks.total), everywhere.attention_mask
    if ids is None and mask is not None and bool((mask == 0).any()):
        ids = (mask != 0).long()
    own = positions[ranks.group.rank()]
    batch = partial(ModelBatch, group=ranks.group, layout=layout, own_positions=own)
    if ids is None:
        return batch()
    read_mask(ids)  # raises the same errors as on one rank
    keep = _not_padding(ids[:, own], ranks.device)
    one_each = bool((ids.amax(-1) <= 1).all())
    if one_each and not bool((ids.diff() > 0).any()):  # whole rows, or rows with padding at the end
        return batch(ids=ids, keep=keep)
    if ranks.rows > 1:
        what = "padding before tokens" if one_each else "packed documents"
        raise ValueError(
            f"context parallelism takes {what} in one row only, got {ranks.rows} rows. Lay the "
            f"rows end to end (megatron_gdn.hf.PackingCollator does)."
        )
    return batch(_packed_boundaries(ids, offsets), ids, keep)


def _layout_and_positions(
    sources: Sources, ranks: Ranks, layout: SequenceLayout
) -> tuple[SequenceLayout, Tensor]:
    """How ranks share the sequence, and where all ranks' tokens lie: ``[cp, s]`` on the host."""
    size, tokens, total, index = ranks.group.size(), ranks.tokens, ranks.total, sources.seq_index
    whole, documents = (total,), None
    if sources.cu_seqlens is not None and ranks.rows == 1:
        documents = Documents.from_cu_seqlens(sources.cu_seqlens, total).lengths
    if index is None:
        if sources.cu_seqlens is None and layout is SequenceLayout.ZIGZAG:
            layout = SequenceLayout.ZIGZAG_BUFFER
        by_document = documents is not None and layout is SequenceLayout.ZIGZAG
        return layout, positions_of(documents if by_document else whole, size, layout)
    if index.dim() not in (1, 2) or index.shape[-1] != tokens:
        raise ValueError(
            f"seq_index has shape {tuple(index.shape)}; it must be [{tokens}] or "
            f"[rows, {tokens}], the sequence positions of this rank's {tokens} tokens."
        )
    index = index.detach().long().reshape(-1, tokens)
    if bool((index != index[:1]).any()):
        raise ValueError(
            "the rows of seq_index differ; all rows of a batch must be cut alike for context "
            "parallelism. Pass one row."
        )
    positions = ranks.gather(index[0])
    legal: list[tuple[SequenceLayout, tuple[int, ...], int]] = [
        (SequenceLayout.ZIGZAG_BUFFER, whole, 2 * size),
        (SequenceLayout.CONTIGUOUS, whole, size),
    ]
    if documents is not None:
        legal.append((SequenceLayout.ZIGZAG, documents, 2 * size))
    for one, lengths, multiple in legal:
        even = not any(length % multiple for length in lengths)
        if even and torch.equal(positions, positions_of(lengths, size, one)):
            return one, positions
    raise ValueError(
        f"seq_index {positions[ranks.group.rank()].tolist()[:8]} ... is no share of {total} tokens "
        f"in zigzag of the row (two of {2 * size} pieces), in zigzag of every document of "
        f"cu_seq_lens_q, or contiguous (one of {size}). Cut the row by "
        f"megatron_gdn.hf.context_parallel_share."
    )


def context_parallel_share(
    batch: Mapping[str, Any],
    cp_mesh: Any,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER,
) -> dict[str, Any]:
    """Cut this rank's share from a packed batch: its columns of every tensor over tokens.

    Args:
        batch: as :class:`.training.PackingCollator` makes it, the same on all ranks. Tensors
            ``[1, S]``, ``[1, S, ...]`` and ``[n, 1, S]`` (positions of a vision-language model)
            are cut along S; offsets and values without S are not cut.
        cp_mesh, layout: as given to :func:`.patching.patch`.

    Raises:
        ValueError: the layout cannot cut the tokens evenly; pad with ``pad_to_multiple_of``.
    """
    if "input_ids" not in batch:
        raise ValueError(f"the batch has no input_ids to be cut by; it has {', '.join(batch)}.")
    rows, tokens = batch["input_ids"].shape[:2]
    layout = SequenceLayout.parse(layout)
    lengths = [tokens]
    if layout is SequenceLayout.ZIGZAG and "cu_seq_lens_q" in batch:
        lengths = batch["cu_seq_lens_q"].diff().tolist()
    own = local_indices(lengths, cp_mesh.size(), cp_mesh.get_local_rank(), layout)
    share = {}
    for name, x in batch.items():
        if not isinstance(x, Tensor) or name in _OFFSETS or tokens not in x.shape:
            share[name] = x
        elif x.shape[:2] == (rows, tokens):
            share[name] = x[:, own.to(x.device)]
        elif x.dim() == 3 and x.shape[1:] == (rows, tokens):
            share[name] = x[..., own.to(x.device)]
        else:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} beside input_ids [{rows}, {tokens}]: it is not "
                f"known how ranks share it. Leave it out, or cut it and add it to the share."
            )
    return share

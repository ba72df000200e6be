"""The batch of one forward: where documents, padding and each rank's tokens lie.

The text model's forward computes a :class:`ModelBatch` once (resolves the batch), so
all layers and recomputations see the same boundaries.

Legend: B batch, S tokens of the whole sequence, s this rank's share (S on one rank), H
hidden size.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...context_parallel import SequenceLayout, local_indices
from ...context_parallel.layouts import check_lengths
from ...context_parallel.layouts import positions as positions_of
from ...mixers.packing import MicroBatchShare
from ...mixers.padding import read_mask
from ...ops.documents import Documents
from ...ops.host_tables import to_device
from ...ops.layout import SizeError
from .sources import Sources, document_ids, starts_of, text_positions, to_host

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")


def group_of(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """The process group of a one-dimensional device mesh; None without mesh or with one
    rank."""
    if mesh is not None and not hasattr(mesh, "get_group"):
        raise ValueError(
            f"cp_mesh={mesh!r} is no device mesh; give the one-dimensional DeviceMesh "
            "of the context-parallel ranks "
            "(torch.distributed.device_mesh.init_device_mesh), or None."
        )
    if mesh is None or mesh.size() == 1:
        return None
    if mesh.ndim != 1:
        raise ValueError(
            f"cp_mesh has the dimensions {mesh.mesh_dim_names or mesh.ndim}; context "
            "parallelism runs over one. Pass that one: mesh['cp']."
        )
    return mesh.get_group()


@dataclass(frozen=True, eq=False)
class ModelBatch:
    """The documents and the padding in the batch of one forward.

    ``share.documents`` are the documents of all ranks' tokens, row after row; None:
    each row is one sequence. Padding counts as a document, so its state reaches no
    other document. ``ids``, int64 ``[B, S]`` on the host: the document number of every
    token of all ranks; 0 is padding. ``keep``, bool ``[B, s]``, is False at padding,
    where the output is exactly zero.
    """

    share: MicroBatchShare
    ids: Tensor | None = None
    keep: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether each row is one sequence on one rank, as transformers' own forward
        needs."""
        return self.share.documents is None and self.share.group is None

    @property
    def kind(self) -> str:
        """The feature of this batch that transformers' own forward lacks, for error
        messages."""
        if self.share.group is None:
            return "packed documents"
        return "context parallelism"

    @property
    def positions(self) -> Tensor:
        """Positions of tokens in documents, 0 at padding; int64 ``[B or 1, s]`` on the
        host."""
        documents = self.share.documents
        ids = self.ids
        if documents is None or ids is None:
            return self.share.positions[None]
        positions = documents.position_T.long().view_as(ids).masked_fill(ids == 0, 0)
        if self.share.group is None:
            return positions
        return positions[:, self.share.positions]

    def enter(self, x_BsH: Tensor) -> Tensor:
        """Reshape hidden states for the mixer: ``[1, B s, H]`` if packed, else
        ``[B, s, H]``."""
        x_BsH = self._zero_padding(x_BsH)
        if self.share.documents is None:
            return x_BsH
        return x_BsH.flatten(0, 1).unsqueeze(0)

    def leave(self, y: Tensor, like_BsH: Tensor) -> Tensor:
        """Undo :meth:`enter`: reshape ``y`` like ``like_BsH``; padding is exactly
        zero."""
        return self._zero_padding(y.reshape(like_BsH.shape[:2] + (-1,)))

    def _zero_padding(self, x_BsH: Tensor) -> Tensor:
        """Set padding tokens to zero; their gradients are zero too."""
        if self.keep is None:
            return x_BsH
        # a model's layers may lie on several devices
        padding = ~self.keep.to(x_BsH.device)
        return x_BsH.masked_fill(padding[..., None], 0)


@torch.compiler.disable  # the host reads boundaries
def resolve_batch(
    options: Any, sources: Sources, x_BsH: Tensor, cache: Any, fills_cache: bool = False
) -> ModelBatch | None:
    """Resolve one forward's batch; None if transformers' own forward continues from a
    cache.

    ``x_BsH`` may be token ids ``[B, s]``; ``cache`` is transformers'; ``fills_cache``:
    the forward makes a new cache. With context parallelism, ``sources`` has masks, ids
    and positions of this rank's tokens and offsets of the whole buffer; all ranks must
    give the same kinds of sources.
    """
    rows, tokens = x_BsH.shape[:2]
    group = group_of(options.cp_mesh)
    if group is None and cache is not None and cache.get_seq_length() > 0:
        names = ("packed_seq_ids", "cu_seqlens", "indices", "seq_index")
        if given := [name for name in names if getattr(sources, name) is not None]:
            raise ValueError(
                f"{', '.join(given)} with a batch that goes on from a cache, which "
                "holds one sequence per row. Leave these arguments out, or pass no "
                "cache."
            )
        return None
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    whole = (tokens * size,)
    layout = options.cp_layout
    share = MicroBatchShare(None, group, size, rank, layout, whole, x_BsH.device)
    batch = _find_documents(sources, rows, share)
    if (cache is not None or fills_cache) and not batch.is_plain:
        raise ValueError(
            f"a cache cannot be filled with {batch.kind}: it holds one state per row. "
            "Pass use_cache=False and no cache; generate on one rank, one sequence per "
            "row."
        )
    return batch


def _find_documents(sources: Sources, rows: int, share: MicroBatchShare) -> ModelBatch:
    """Find documents and padding of ``rows`` rows; this rank's ``share`` has no
    documents yet."""
    _require_agreement(sources, rows, share)
    share = _with_layout(sources, rows, share)
    sources = _in_sequence_order(sources, rows, share)
    ids = document_ids(sources, rows, sum(share.lengths))
    mask = sources.attention_mask
    if (
        share.group is not None
        and ids is None
        and mask is not None
        and bool((mask == 0).any())
    ):
        ids = (mask != 0).long()
    if ids is None:
        padded = share.group is None and mask is not None and mask.dim() == 2
        return ModelBatch(share, keep=mask != 0 if padded else None)
    read_mask(ids)  # raises if padding is inside a document or ids decrease
    if share.group is None:
        own_Bs = ids
    else:
        own_Bs = ids[:, share.positions]
    if bool((ids > 0).all()):
        keep = None
    else:
        keep = to_device(own_Bs > 0, share.device)
    if share.group is not None:
        one_each = bool((ids.amax(-1) <= 1).all())
        # each row: one document, then padding
        if one_each and not bool((ids.diff() > 0).any()):
            return ModelBatch(share, ids, keep)
        if rows > 1:
            if one_each:
                refused = "padding before tokens"
            else:
                refused = "packed documents"
            raise ValueError(
                f"context parallelism takes {refused} in one row only, got {rows} "
                "rows. Lay the rows end to end (megatron_gdn.hf.PackingCollator does)."
            )
    starts = starts_of(ids).flatten().nonzero().flatten().tolist()
    documents = Documents.from_cu_seqlens(starts + [ids.numel()], ids.numel())
    return ModelBatch(
        share._replace(documents=documents, lengths=documents.lengths), ids, keep
    )


def _require_agreement(sources: Sources, rows: int, share: MicroBatchShare) -> None:
    """Raise on every rank if a data loader gave the ranks different batches."""
    if share.group is None:
        return
    if sources.cu_seqlens is None:
        offsets = b""
    else:
        offsets = sources.cu_seqlens.long().numpy().tobytes()
    facts = {"rows": rows, "tokens": sum(share.lengths)}
    for name, x in sources._asdict().items():
        facts[f"kinds of {name}"] = x.dim() if isinstance(x, Tensor) else 0
    facts |= {"numbers of offsets": len(offsets), "offsets": zlib.crc32(offsets)}
    all_cT = _gather(torch.tensor(list(facts.values()), device="cpu"), share)
    differs = (all_cT != all_cT[0]).any(0).tolist()
    if any(differs):
        raise ValueError(
            f"the {share.size} context-parallel ranks were given different "
            f"{', '.join(compress(facts, differs))}: they must have shares of one "
            "batch. Give all of them the same batches "
            "(megatron_gdn.hf.ContextParallelTrainerMixin does in transformers' "
            "Trainer) and cut each by context_parallel_share."
        )
    if sources.indices is not None:
        raise ValueError(
            f"indices of {sources.indices.numel()} tokens with context parallelism: "
            "offsets count the tokens of the whole buffer, padding included. Give this "
            "rank's ids of documents as attention_mask instead, 0 at padding."
        )


def _gather(tensor: Tensor, share: MicroBatchShare) -> Tensor:
    """Gather all ranks' tensors, which have one shape, into ``[cp, ...]`` on the
    host."""
    if share.group is None:
        return tensor[None].cpu()
    tensor = tensor[None].to(share.device).contiguous()
    gathered = tensor.new_empty((share.size,) + tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor, group=share.group)
    return gathered.cpu()


def _with_layout(
    sources: Sources, rows: int, share: MicroBatchShare
) -> MicroBatchShare:
    """``share`` with its layout (from any ``seq_index``) and the lengths that this
    layout cuts."""
    whole = share.lengths
    total = sum(share.lengths)
    index = sources.seq_index
    tokens = total // share.size
    cut = {SequenceLayout.ZIGZAG_BUFFER: whole, SequenceLayout.CONTIGUOUS: whole}
    if sources.cu_seqlens is not None and sources.indices is None and rows == 1:
        documents = Documents.from_cu_seqlens(sources.cu_seqlens, total)
        cut[SequenceLayout.ZIGZAG] = documents.lengths
    if index is None:
        if share.layout in cut:
            layout = share.layout
        else:
            layout = SequenceLayout.ZIGZAG_BUFFER
        check_lengths(cut[layout], share.size, layout)
        return share._replace(layout=layout, lengths=cut[layout])
    if index.dim() not in (1, 2) or index.shape[-1] != tokens:
        raise ValueError(
            f"seq_index has shape {tuple(index.shape)}; it must be [{tokens}] or "
            f"[rows, {tokens}], the sequence positions of this rank's {tokens} tokens."
        )
    index = index.detach().long().reshape(-1, tokens)
    if bool((index != index[:1]).any()):
        raise ValueError(
            "the rows of seq_index differ; all rows of a batch must be cut alike for "
            "context parallelism. Pass one row."
        )
    positions = _gather(index[0], share)
    for layout, lengths in cut.items():
        # positions_of raises if the layout cannot cut the lengths
        with suppress(SizeError):
            if torch.equal(positions, positions_of(lengths, share.size, layout)):
                return share._replace(layout=layout, lengths=lengths)
    raise ValueError(
        f"seq_index {positions[share.rank].tolist()[:8]} ... is no share of {total} "
        f"tokens in zigzag of the row (two of {2 * share.size} pieces), in zigzag of "
        f"every document of cu_seq_lens_q, or contiguous (one of {share.size}). Cut "
        "the row by megatron_gdn.hf.context_parallel_share."
    )


def _in_sequence_order(sources: Sources, rows: int, share: MicroBatchShare) -> Sources:
    """Gather all ranks' masks, ids and positions in sequence order; offsets do not
    change."""
    if share.group is None:
        return sources
    mask, ids, offsets, position_ids = sources[:4]
    tokens = sum(share.lengths) // share.size
    text_position = text_positions(position_ids)
    if mask is not None and mask.dim() != 2:
        raise ValueError(
            f"an attention_mask of shape {tuple(mask.shape)} says nothing about the "
            "tokens of other context-parallel ranks; name the documents by "
            "cu_seq_lens_q (of the whole buffer) or by this rank's _packed_seq_ids."
        )
    if position_ids is not None and text_position is None:
        raise ValueError(
            f"position_ids of shape {tuple(position_ids.shape)} with context "
            "parallelism: this rank's tokens are too few to compute them. Compute "
            "them from the whole sequence and give this rank's columns as "
            f"[4, {rows}, {tokens}], text positions first."
        )
    if offsets is not None:
        text_position = None
    elif text_position is not None and text_position.shape[0] == 1:
        text_position = text_position.expand(rows, -1)
    tables = {
        "attention_mask": mask,
        "_packed_seq_ids": ids,
        "position_ids": text_position,
    }
    for name, x_Bs in tables.items():
        if x_Bs is None:
            continue
        if share.layout is SequenceLayout.ZIGZAG:
            raise ValueError(
                f"cp_layout={share.layout.value!r} cuts every document by itself, so a "
                f"rank's {name} cannot be put in order without the documents: give "
                "cu_seq_lens_q of the whole buffer, or cut the buffer as "
                "'zigzag_buffer' or 'contiguous'."
            )
        own_sB = to_host(name, x_Bs, rows, tokens).long().T
        tables[name] = share.gather(own_sB.to(share.device)).T.cpu()
    mask, ids, position_BS = tables.values()
    if position_BS is not None:
        position = position_BS[:, :-1]
        next_position = position_BS[:, 1:]
        wrong = ((next_position != position + 1) & (next_position != 0)).nonzero()
        if len(wrong):
            row, token = wrong[0].tolist()
            raise ValueError(
                f"in sequence order position_ids go from {position[row, token]} to "
                f"{next_position[row, token]} at token {token + 1} of row {row}: they "
                f"neither go on nor start again at 0. Cut them as the tokens, by "
                f"{share.layout.value!r} (or name another cp_layout), or give "
                "seq_index (docs/transformers.md)."
            )
    return Sources(mask, ids, offsets, position_BS)


def context_parallel_share(
    batch: Mapping[str, Any],
    cp_mesh: Any,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER,
) -> dict[str, Any]:
    """Cut a packed batch to this rank's tokens: every tensor keeps only these tokens'
    columns.

    Args:
        batch: as :class:`.training.PackingCollator` makes it, the same on all ranks.
            Tensors ``[1, S]``, ``[1, S, ...]`` and ``[n, 1, S]`` (positions of a
            vision-language model) are cut along S; offsets and values without S are not
            cut.
        cp_mesh, layout: mesh of the ranks and how to cut the row, as in
            :func:`.patching.patch`.

    Raises:
        ValueError: the layout cannot cut the tokens evenly; pad with
            ``pad_to_multiple_of``.
    """
    if "input_ids" not in batch:
        raise ValueError(
            f"the batch has no input_ids to be cut by; it has {', '.join(batch)}."
        )
    rows, tokens = batch["input_ids"].shape[:2]
    layout = SequenceLayout.parse(layout)
    lengths = [tokens]
    if layout is SequenceLayout.ZIGZAG and "cu_seq_lens_q" in batch:
        lengths = batch["cu_seq_lens_q"].diff().tolist()
    own_indices = local_indices(
        lengths, cp_mesh.size(), cp_mesh.get_local_rank(), layout
    )
    share = {}
    for name, x in batch.items():
        if not isinstance(x, Tensor) or name in _OFFSETS or tokens not in x.shape:
            share[name] = x
        elif x.shape[:2] == (rows, tokens):
            share[name] = x[:, own_indices.to(x.device)]
        elif x.dim() == 3 and x.shape[1:] == (rows, tokens):
            share[name] = x[..., own_indices.to(x.device)]
        else:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} beside input_ids [{rows}, "
                f"{tokens}]: it is not known how ranks share it. Leave it out, or cut "
                "it and add it to the share."
            )
    return share

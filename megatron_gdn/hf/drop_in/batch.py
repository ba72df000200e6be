"""Finds the documents, the padding and each rank's tokens in the batch of one forward.

The text model's forward makes one :class:`ModelBatch` (:func:`resolve_batch`) for all
layers, so that layers and recomputations see the same boundaries.

Legend: B batch rows (``rows`` in the code), S tokens of the whole sequence, s this rank's
share (S on one rank), H hidden size.
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
from ...ops.autograd import uncompiled
from ...ops.documents import Documents
from ...ops.host_tables import to_device
from ...ops.layout import SizeError
from .sources import (
    BoundarySources,
    copy_to_host,
    document_ids,
    document_starts,
    text_positions,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

_OFFSET_NAMES = ("cu_seq_lens_q", "cu_seq_lens_k")


def group_of(mesh: DeviceMesh | None) -> ProcessGroup | None:
    """The process group of the device mesh ``mesh``; None if there is no mesh or it has
    one rank.

    A ValueError is raised if ``mesh`` is no device mesh or has several dimensions.
    """
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

    ``share.documents`` are the documents of all ranks' tokens, row after row. They are
    None if each row is one sequence. Among packed documents a stretch of padding counts
    as a document, so that no state of padding reaches another document.
    """

    share: MicroBatchShare
    # int64 [B, S] on the host: document ids of all ranks' tokens, 0 at padding. None
    # only if each row is one sequence.
    document_ids: Tensor | None = None
    # bool [B, s]: False at padding, where the output is exactly zero; None: no padding
    is_token: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether transformers' own forward can run the batch: one rank, and each row is
        one sequence."""
        return self.share.documents is None and self.share.group is None

    @property
    def unsupported_feature(self) -> str:
        """The feature that this batch needs and transformers' own forward lacks, as
        errors name it. The batch must not be plain."""
        if self.share.group is None:
            return "packed documents"
        return "context parallelism"

    @property
    def positions(self) -> Tensor:
        """The position of each of this rank's tokens in its document, or in its row if
        each row is one sequence; int64 ``[B or 1, s]`` on the host.

        Packed documents have 0 at padding; else the numbers go on through padding.
        """
        documents = self.share.documents
        if documents is None:
            return self.share.positions[None]
        ids = self.document_ids
        assert ids is not None
        positions_BS = documents.position_T.long().view_as(ids)
        positions_BS = positions_BS.masked_fill(ids == 0, 0)
        if self.share.group is None:
            return positions_BS
        return positions_BS[:, self.share.positions]

    def to_mixer_rows(self, x_BsH: Tensor) -> Tensor:
        """Hidden states in the shape for the mixer, with zeros at padding:
        ``[1, B s, H]`` if documents are packed, else ``[B, s, H]``."""
        x_BsH = self._with_zeros_at_padding(x_BsH)
        if self.share.documents is None:
            return x_BsH
        return x_BsH.flatten(0, 1).unsqueeze(0)

    def from_mixer_rows(self, y: Tensor, like_BsH: Tensor) -> Tensor:
        """Undo :meth:`to_mixer_rows`: ``y`` as ``[B, s, H]``, with B and s of
        ``like_BsH`` and zeros at padding."""
        return self._with_zeros_at_padding(y.reshape(like_BsH.shape[:2] + y.shape[-1:]))

    def _with_zeros_at_padding(self, x_BsH: Tensor) -> Tensor:
        """``x_BsH`` with zeros at padding; gradients are zero there too."""
        if self.is_token is None:
            return x_BsH
        # a model's layers may be on several devices
        padding = ~self.is_token.to(x_BsH.device)
        return x_BsH.masked_fill(padding[..., None], 0)


@uncompiled  # the host reads boundaries
def resolve_batch(
    options: Any,
    sources: BoundarySources,
    x_BsH: Tensor,
    cache: Any,
    fills_cache: bool = False,
) -> ModelBatch | None:
    """The :class:`ModelBatch` of one forward; None if transformers' own forward continues
    from a cache.

    Args:
        options: the `DropInOptions` of the model.
        sources: what the caller gave. With context parallelism, masks, ids and
            positions are those of this rank's tokens; offsets are those of the whole
            buffer. All ranks must give the same kinds of sources.
        x_BsH: hidden states ``[B, s, H]`` or token ids ``[B, s]``.
        cache: transformers' cache, or None.
        fills_cache: whether the forward makes a new cache.

    Raises:
        ValueError: a source does not fit the batch, two sources contradict each other,
            ranks have different batches, or a cache comes with packed documents or
            context parallelism.
    """
    rows, tokens = x_BsH.shape[:2]
    group = group_of(options.cp_mesh)
    if group is None and cache is not None and cache.get_seq_length() > 0:
        # attention_mask and position_ids come with every step of a generation
        names = ("packed_seq_ids", "cu_seqlens", "indices", "seq_index")
        if given := [name for name in names if getattr(sources, name) is not None]:
            raise ValueError(
                f"{', '.join(given)} with a batch that goes on from a cache, which "
                "holds one sequence per row. Leave these arguments out, or pass no "
                "cache."
            )
        return None
    size = 1
    rank = 0
    if group is not None:
        size = group.size()
        rank = group.rank()
    share = MicroBatchShare(
        documents=None,
        group=group,
        size=size,
        rank=rank,
        layout=options.cp_layout,
        lengths=(tokens * size,),
        device=x_BsH.device,
    )
    batch = _find_documents(sources, rows, share)
    if (cache is not None or fills_cache) and not batch.is_plain:
        raise ValueError(
            f"a cache cannot be filled with {batch.unsupported_feature}: it holds one "
            "state per row. Pass use_cache=False and no cache; generate on one rank, "
            "one sequence per row."
        )
    return batch


def _find_documents(
    sources: BoundarySources, rows: int, share: MicroBatchShare
) -> ModelBatch:
    """The :class:`ModelBatch` of ``rows`` rows; ``sources`` give its documents.

    The argument ``share`` has no documents yet, and the sequence layout of the options.
    The result's share has the documents and the layout that were found. Its documents
    are None if each row is one sequence.

    On one rank a 0/1 mask gives padding only, no document ids. Under context
    parallelism it gives document ids, 0 at padding, so that each rank has the padding
    of all ranks.
    """
    _require_one_batch(sources, rows, share)
    share = _with_sequence_layout(sources, rows, share)
    sources = _gather_sources(sources, rows, share)
    ids = document_ids(sources, rows, sum(share.lengths))
    mask = sources.attention_mask
    if ids is None and share.group is not None and mask is not None and mask.numel():
        ids = (mask != 0).long()
    if ids is None:
        is_token = None
        if share.group is None and mask is not None and mask.dim() == 2:
            is_token = mask != 0
        return ModelBatch(share, is_token=is_token)
    read_mask(ids)  # raises if padding is inside a document or ids decrease
    if share.group is None:
        own_ids_Bs = ids
    else:
        own_ids_Bs = ids[:, share.positions]
    if bool((ids > 0).all()):
        is_token = None
    else:
        is_token = to_device(own_ids_Bs > 0, share.device)
    if share.group is not None:
        one_document_per_row = bool((ids.amax(-1) <= 1).all())
        padding_before_tokens = bool((ids.diff() > 0).any())
        if one_document_per_row and not padding_before_tokens:
            return ModelBatch(share, ids, is_token)
        if rows > 1:
            if one_document_per_row:
                refused = "padding before tokens"
            else:
                refused = "packed documents"
            raise ValueError(
                f"context parallelism takes {refused} in one row only, got {rows} "
                "rows. Lay the rows end to end (megatron_gdn.hf.PackingCollator does)."
            )
    starts = document_starts(ids).flatten().nonzero().flatten().tolist()
    documents = Documents.from_cu_seqlens(starts + [ids.numel()], ids.numel())
    share = share._replace(documents=documents, lengths=documents.lengths)
    return ModelBatch(share, ids, is_token)


def _require_one_batch(
    sources: BoundarySources, rows: int, share: MicroBatchShare
) -> None:
    """Raise a ValueError on every rank if the ranks were not given shares of one batch.

    The ranks compare their numbers of rows and tokens, the number of dimensions of each
    source, and the offsets. ``indices`` raise a ValueError too.
    """
    if share.group is None:
        return
    if sources.cu_seqlens is None:
        offsets = b""
    else:
        offsets = sources.cu_seqlens.long().numpy().tobytes()
    compared = {"rows": rows, "tokens": sum(share.lengths)}
    for name, source in sources._asdict().items():
        dimensions = 0
        if isinstance(source, Tensor):
            dimensions = source.dim()
        compared[f"kinds of {name}"] = dimensions
    compared["numbers of offsets"] = len(offsets)
    compared["offsets"] = zlib.crc32(offsets)  # a checksum of all offsets
    # [cp, number of compared values]
    own = torch.tensor(list(compared.values()), dtype=torch.int64, device="cpu")
    of_ranks = _gather_to_host(own, share)
    differs = (of_ranks != of_ranks[0]).any(0).tolist()
    if any(differs):
        raise ValueError(
            f"the {share.size} context-parallel ranks were given different "
            f"{', '.join(compress(compared, differs))}: they must have shares of one "
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


def _gather_to_host(tensor: Tensor, share: MicroBatchShare) -> Tensor:
    """All ranks' tensors as ``[cp, ...]`` on the host; they must have one shape."""
    if share.group is None:
        return tensor[None].cpu()
    tensor = tensor[None].to(share.device).contiguous()
    gathered = tensor.new_empty((share.size,) + tensor.shape[1:])
    dist.all_gather_into_tensor(gathered, tensor, group=share.group)
    return gathered.cpu()


def _with_sequence_layout(
    sources: BoundarySources, rows: int, share: MicroBatchShare
) -> MicroBatchShare:
    """``share`` with the sequence layout in which the row was cut, and with the lengths
    that this layout cuts.

    ``zigzag`` cuts each document, so it has one length for each document. The other
    layouts cut the whole row, so they keep the lengths of ``share``: the tokens of one
    row.

    The layout is found by ``sources.seq_index``. Without it, the layout of the options is
    taken; ``zigzag`` without the offsets of documents becomes ``zigzag_buffer``.
    """
    total = sum(share.lengths)
    index = sources.seq_index
    tokens = total // share.size
    lengths_of_layout = {
        SequenceLayout.ZIGZAG_BUFFER: share.lengths,
        SequenceLayout.CONTIGUOUS: share.lengths,
    }
    if sources.cu_seqlens is not None and sources.indices is None and rows == 1:
        documents = Documents.from_cu_seqlens(sources.cu_seqlens, total)
        lengths_of_layout[SequenceLayout.ZIGZAG] = documents.lengths
    if index is None:
        if share.layout in lengths_of_layout:
            layout = share.layout
        else:
            layout = SequenceLayout.ZIGZAG_BUFFER
        lengths = lengths_of_layout[layout]
        check_lengths(lengths, share.size, layout)
        return share._replace(layout=layout, lengths=lengths)
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
    index_of_ranks = _gather_to_host(index[0], share)  # [cp, s]
    for layout, lengths in lengths_of_layout.items():
        # positions_of raises if the layout cannot cut the lengths
        with suppress(SizeError):
            if torch.equal(index_of_ranks, positions_of(lengths, share.size, layout)):
                return share._replace(layout=layout, lengths=lengths)
    raise ValueError(
        f"seq_index {index_of_ranks[share.rank].tolist()[:8]} ... is no share of {total} "
        f"tokens in zigzag of the row (two of {2 * share.size} pieces), in zigzag of "
        f"every document of cu_seq_lens_q, or contiguous (one of {share.size}). Cut "
        "the row by megatron_gdn.hf.context_parallel_share."
    )


def _gather_sources(
    sources: BoundarySources, rows: int, share: MicroBatchShare
) -> BoundarySources:
    """The sources of all ranks' tokens: masks, ids and positions ``[B, s]`` of each rank
    become ``[B, S]`` in sequence order.

    Offsets stay, since they are those of the whole buffer. Three sources are left out:
    `_require_one_batch` has refused ``indices``, `_with_sequence_layout` has read
    ``seq_index``, and masks of other layers are read on one rank only.
    """
    if share.group is None:
        return sources
    mask = sources.attention_mask
    position_ids = sources.position_ids
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
    if sources.cu_seqlens is not None:
        text_position = None  # the offsets give the documents
    elif text_position is not None and text_position.shape[0] == 1:
        text_position = text_position.expand(rows, -1)
    gathered = {
        "attention_mask": mask,
        "_packed_seq_ids": sources.packed_seq_ids,
        "position_ids": text_position,
    }
    for name, own_Bs in gathered.items():
        if own_Bs is None:
            continue
        if share.layout is SequenceLayout.ZIGZAG:
            raise ValueError(
                f"cp_layout={share.layout.value!r} cuts every document by itself, so a "
                f"rank's {name} cannot be put in order without the documents: give "
                "cu_seq_lens_q of the whole buffer, or cut the buffer as "
                "'zigzag_buffer' or 'contiguous'."
            )
        own_sB = copy_to_host(name, own_Bs, rows, tokens).long().T
        gathered[name] = share.gather(own_sB.to(share.device)).T.cpu()
    position_BS = gathered["position_ids"]
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
    return BoundarySources(
        attention_mask=gathered["attention_mask"],
        packed_seq_ids=gathered["_packed_seq_ids"],
        cu_seqlens=sources.cu_seqlens,
        position_ids=position_BS,
    )


def context_parallel_share(
    batch: Mapping[str, Any],
    cp_mesh: Any,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER,
) -> dict[str, Any]:
    """Cut a packed batch to this rank's tokens.

    Args:
        batch: as :class:`.training.PackingCollator` makes it, the same on all ranks.
            Tensors ``[1, S]``, ``[1, S, ...]`` and ``[n, 1, S]`` (positions of a
            vision-language model) are cut along S; offsets and values without S are not
            cut.
        cp_mesh: one-dimensional device mesh of the ranks, as in :func:`.patching.patch`.
        layout: how the row is cut, as ``cp_layout`` in :func:`.patching.patch`.

    Returns:
        A batch with the same names.

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
    for name, value in batch.items():
        is_offsets = name in _OFFSET_NAMES
        if not isinstance(value, Tensor) or is_offsets or tokens not in value.shape:
            share[name] = value
        elif value.shape[:2] == (rows, tokens):
            share[name] = value[:, own_indices.to(value.device)]
        elif value.shape[1:] == (rows, tokens):
            share[name] = value[..., own_indices.to(value.device)]
        else:
            raise ValueError(
                f"{name} of shape {tuple(value.shape)} beside input_ids [{rows}, "
                f"{tokens}]: it is not known how ranks share it. Leave it out, or cut "
                "it and add it to the share."
            )
    return share

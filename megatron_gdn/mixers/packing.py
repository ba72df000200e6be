"""Packed micro-batches: Megatron's ``PackedSeqParams`` become one checked
``Documents``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

from ..context_parallel.gathered import (
    LocalDocument,
    gather_in_order,
    local_documents_of,
)
from ..context_parallel.layouts import SequenceLayout, positions
from ..ops.documents import Documents, changed_boundaries_message, offsets_of, shortened
from ..ops.host_tables import stream_of_tables, to_device
from ..ops.static_documents import StaticDocuments
from ..ops.trees import TreeDocuments

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams
    from torch.distributed import ProcessGroup

# Attributes of a PackedSeqParams: the `_ResolvedDocuments` that the first layer stored,
# and the parents of a tree's documents.
_RESOLVED_ATTRIBUTE = "_megatron_gdn_documents"
PARENTS_ATTRIBUTE = "_megatron_gdn_parents"
# The attribute of a checkpoint's autograd context: stamps of the documents that the
# checkpoint's forward has read.
_STAMPS_ATTRIBUTE = "_megatron_gdn_stamps"
# The qkv_format of trees of documents. It is not "thd", so that layers without support
# for trees raise an error.
TREE_FORMAT = "thd_tree"
_BOUNDARY_FIELDS = (
    "cu_seqlens_q_padded",
    "cu_seqlens_q",
    "cu_seqlens_kv_padded",
    "cu_seqlens_kv",
)
_UNPACKED_FORMATS = ("sbhd", "bshd")


class _ResolvedDocuments(NamedTuple):
    """The boundaries that a micro-batch's first layer read, stored for the later
    layers."""

    # format, parents, numbers of tokens, device, ids of seq_idx and the offsets
    key: tuple
    # the tensors of offsets, one for each name in _BOUNDARY_FIELDS; kept alive, so that
    # no new tensor gets the id of one of them
    offset_tensors: tuple[Tensor | None, ...]
    # the result of :func:`_versions_of` for ``offset_tensors``
    versions: list[object]
    documents: Documents
    # for each CUDA stream, its own copy of ``documents``
    documents_by_stream: dict[int, Documents]


def _versions_of(offset_tensors: Sequence[Tensor | None]) -> list[object]:
    """For each tensor of offsets, a value that changes if the tensor is written to.

    For a CPU tensor it is the list of offsets. For a GPU tensor it is torch's version
    counter, which the host reads without waiting.
    """
    values: list[object] = []
    for offsets in offset_tensors:
        if offsets is None:
            values.append(None)
        elif offsets.is_cuda:
            values.append(offsets._version)
        else:
            values.append(offsets.tolist())
    return values


def resolve_packed_seq_params(
    params: PackedSeqParams | None, total_tokens: int, device: torch.device
) -> Documents | None:
    """The documents of a packed micro-batch; None if the micro-batch is not packed.

    The first layer of a micro-batch reads ``cu_seqlens`` from the device, checks the
    offsets and stores the documents on ``params``. Later layers and recomputations
    check that the offsets are the same: on the CPU by value, on a GPU by torch's
    version counter. Collectives and writes to ``.data`` do not change this counter, so
    every micro-batch must have new tensors of offsets.

    Boundaries are ``cu_seqlens_q_padded`` if given, else ``cu_seqlens_q``: global
    offsets, before any context-parallel split, up to ``total_tokens`` of all ranks.
    Padding is at the end of a document's slot, so no token of a causal layer sees
    padding. Rows of padding must be finite, since weights get gradients from all rows
    and 0 * NaN is NaN; the loss must mask these rows. The fields ``total_tokens`` and
    ``seq_idx``, which Megatron's Mamba layers read, must fit the boundaries.

    Raises:
        RuntimeError: a recomputed forward finds other boundaries than its own first
            forward.
        TypeError, ValueError: boundaries or a ``qkv_format`` that this layer cannot
            run.
        NotImplementedError: a CUDA graph is being captured, and the boundaries are not
            those of :func:`.graphs.static_packed_seq_params`.
    """
    if params is None:
        documents = None
    else:
        documents = _resolve(params, total_tokens, device)
    if documents is not None:
        _check_recomputation(documents)
    return documents


def _resolve(
    params: PackedSeqParams, total_tokens: int, device: torch.device
) -> Documents | None:
    """The documents of ``params``, read now or by an earlier layer of the micro-batch;
    None if ``params`` is not packed.

    ``total_tokens`` are the tokens of all context-parallel ranks. The documents are
    stored on ``params``, with one copy for each CUDA stream.
    """
    fixed = static_documents_of(params)
    if fixed is not None:
        _is_packed(params)  # raises for a format that contradicts the boundaries
        documents = _checked_buffers(fixed, total_tokens, device)
        _require_same_tokens(params, documents)
        return documents
    is_capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    offset_tensors = tuple(getattr(params, name) for name in _BOUNDARY_FIELDS)
    parents = params.__dict__.get(PARENTS_ATTRIBUTE)
    key = (
        params.qkv_format,
        parents,
        total_tokens,
        device,
        params.total_tokens,
        id(params.seq_idx),
        tuple(map(id, offset_tensors)),
    )
    # what an earlier layer stored
    known: _ResolvedDocuments | None = None
    if not is_capturing:
        known = params.__dict__.get(_RESOLVED_ATTRIBUTE)
    if (
        known is not None
        and known.key == key
        and known.versions == _versions_of(offset_tensors)
    ):
        stream = stream_of_tables()
        if stream not in known.documents_by_stream:
            # The copy has no tables yet. Tables of another stream may not be ready.
            known.documents_by_stream[stream] = replace(known.documents)
        return known.documents_by_stream[stream]
    if not _is_packed(params):
        return None
    if is_capturing:
        raise NotImplementedError(
            "packed documents cannot be captured in a CUDA graph: a replay would use "
            "the boundaries of the captured micro-batch. Pass "
            "megatron_gdn.static_packed_seq_params(...) (docs/cuda_graphs.md), leave "
            "this layer out of the graphs, or train on unpacked sequences."
        )
    for name, offsets in zip(_BOUNDARY_FIELDS, offset_tensors, strict=True):
        if offsets is not None and not isinstance(offsets, Tensor):
            raise TypeError(
                f"packed_seq_params.{name} is a {type(offsets).__name__}; it must be a "
                f"1-D int32 tensor of global cumulative lengths: torch.tensor({name}, "
                "dtype=torch.int32)."
            )
    documents = _read_documents(
        params.qkv_format, parents, offset_tensors, total_tokens, device
    )
    _require_same_tokens(params, documents)
    if any(source is not None and source.is_inference() for source in offset_tensors):
        # not stored, since torch does not count writes to inference tensors
        return documents
    if known is not None and _is_recomputed():
        before = known.documents
    else:
        before = documents
    if not torch.equal(documents.stamp, before.stamp):
        change = f"{shortened(documents.offsets)} after {shortened(before.offsets)}"
        raise RuntimeError(changed_boundaries_message(change))
    documents_by_stream = {stream_of_tables(): documents}
    params.__dict__[_RESOLVED_ATTRIBUTE] = _ResolvedDocuments(
        key,
        offset_tensors,
        _versions_of(offset_tensors),
        documents,
        documents_by_stream,
    )
    return documents


def _is_recomputed() -> bool:
    """Whether this forward is a recomputation, which runs inside a backward. If no
    backward runs, torch's number of the running backward is -1."""
    return torch._C._current_graph_task_id() != -1


def _require_same_tokens(params: PackedSeqParams, documents: Documents) -> None:
    """Raise if ``total_tokens`` or ``seq_idx`` of ``params`` contradicts the documents'
    boundaries.

    ``seq_idx`` is Megatron's tensor with a number for each token, which changes where a
    document begins.
    """
    given = params.total_tokens
    tokens = documents.total_tokens
    seq_idx = params.seq_idx
    if given is not None and given != tokens:
        raise ValueError(
            f"packed_seq_params has total_tokens={given}, and its documents have "
            f"{tokens} tokens over all context-parallel ranks. Give this number, or "
            "None."
        )
    if seq_idx is None:
        return
    if not documents.known_on_host:
        raise ValueError(
            "packed_seq_params with fixed buffers has a seq_idx, which set_documents "
            "would not change. Leave total_tokens and seq_idx None."
        )
    # entry i: whether token i + 1 begins a document
    changes = seq_idx.flatten().diff() != 0
    starts = torch.tensor(
        documents.filled_offsets[1:-1], dtype=torch.int64, device="cpu"
    )
    expected = torch.zeros(max(tokens - 1, 0), dtype=torch.bool, device="cpu")
    expected[starts - 1] = True
    if seq_idx.numel() != tokens or not torch.equal(
        changes, to_device(expected, seq_idx.device)
    ):
        raise ValueError(
            f"packed_seq_params has a seq_idx of shape {tuple(seq_idx.shape)} whose "
            "documents are not those of cu_seqlens, "
            f"{shortened(documents.offsets)}. Make it [1, {tokens}] with another number "
            "in each document (Megatron does if total_tokens is given), or None."
        )


def _check_recomputation(documents: Documents) -> None:
    """In a checkpoint's first run, store the stamp of ``documents``; in its
    recomputation, raise a RuntimeError if ``documents`` have no stored stamp.

    A stamp is a tensor on the host with numbers that tell the boundaries.

    Other micro-batches may run between a forward and its recomputation, and a reentrant
    checkpoint passes no saved tensor to the recomputation. But both runs can find the
    checkpoint's autograd context, which stores the stamps. In the first run, the
    context is the argument ``ctx`` of the checkpoint's forward, which is running. In
    the recomputation, it is the autograd node whose backward is running.
    """
    node = torch._C._current_autograd_node()
    stamps = getattr(node, _STAMPS_ATTRIBUTE, None)
    if stamps and not any(documents.has_stamp(stamp) for stamp in stamps):
        raise RuntimeError(documents.changed_message(stamps[-1]))
    # Stamps are stored only in the first forward of a reentrant checkpoint. This
    # forward runs without gradients, but not in inference mode. Other forwards return
    # here, since the search through the callers takes some 0.4 microseconds per frame.
    if torch.is_grad_enabled() or torch.is_inference_mode_enabled():
        return
    for context in _contexts_of_callers():
        stamps = vars(context).setdefault(_STAMPS_ATTRIBUTE, [])
        if not any(documents.has_stamp(stamp) for stamp in stamps):
            stamps.append(documents.stamp)


def _contexts_of_callers() -> Iterator[FunctionCtx]:
    """The contexts of the autograd functions whose forward or backward runs at the
    moment.

    torch has no list of them, so this function searches the callers' frames for
    functions whose first argument is called ``ctx``.
    """
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_varnames[:1] == ("ctx",):
            # None before the variable's first value, and after del
            context = frame.f_locals.get("ctx")
            if isinstance(context, FunctionCtx):
                yield context
        frame = frame.f_back


def static_documents_of(params: PackedSeqParams) -> StaticDocuments | None:
    """The documents in the fixed buffers of ``params``; None if ``params`` has no fixed
    buffers."""
    buffers = params.__dict__.get("buffers")
    if buffers is None:
        return None
    return buffers.documents


def _checked_buffers(
    documents: StaticDocuments, total_tokens: int, device: torch.device
) -> StaticDocuments:
    """Return ``documents``.

    Raise if they do not fit the layer's tokens and device. Also raise if a recomputed
    forward finds buffers that were filled again.
    """
    if documents.total_tokens != total_tokens or documents.device != device:
        raise ValueError(
            f"packed_seq_params has fixed buffers for {documents.total_tokens} tokens "
            f"on {documents.device}, and the layer has {total_tokens} tokens (over all "
            f"context-parallel ranks) on {device}; make buffers of this size on this "
            "device with megatron_gdn.static_packed_seq_params."
        )
    documents.store_or_check_stamp(_is_recomputed())
    return documents


def _is_packed(params: PackedSeqParams) -> bool:
    """Whether ``params`` has packed documents.

    Raises a ValueError for an unknown ``qkv_format``, and for boundaries in a format
    that is not packed.
    """
    qkv_format = params.qkv_format
    if qkv_format in ("thd", TREE_FORMAT):
        return True
    if qkv_format is not None and qkv_format not in _UNPACKED_FORMATS:
        raise ValueError(
            f"packed_seq_params has qkv_format={qkv_format!r}; legal are 'thd' (packed "
            "documents, with cu_seqlens_q), 'sbhd' and 'bshd' (not packed), and None "
            "(packed if there are cu_seqlens_*)."
        )
    given = [name for name in _BOUNDARY_FIELDS if getattr(params, name) is not None]
    if given and qkv_format is not None:
        raise ValueError(
            f"packed_seq_params has qkv_format={qkv_format!r}, which is not packed, "
            f"and gives {', '.join(given)}. Set qkv_format='thd' to keep the documents "
            "apart, or leave the boundaries None."
        )
    if not given and params.seq_idx is not None:
        raise ValueError(
            "packed_seq_params gives seq_idx but no cu_seqlens_q, from which this "
            "layer reads the documents' boundaries. Set qkv_format='thd' and "
            "cu_seqlens_q."
        )
    return bool(given)


def _read_documents(
    qkv_format: str | None,
    parents: tuple[int, ...] | None,
    offset_tensors: Sequence[Tensor | None],
    total_tokens: int,
    device: torch.device,
) -> Documents:
    """Read and check the offsets, and make the documents.

    ``offset_tensors`` has a tensor of offsets, or None, for each name in
    _BOUNDARY_FIELDS.
    ``parents`` has the index of each document's parent if the documents are a tree.
    """
    # Each tensor is read once, since the host waits for each read from a GPU. Most
    # fields have the same tensor.
    offsets_by_id = {id(x): offsets_of(x) for x in offset_tensors if x is not None}
    q_padded, q, kv_padded, kv = (
        None if x is None else offsets_by_id[id(x)] for x in offset_tensors
    )
    if q_padded is None:
        boundaries = q
    else:
        boundaries = q_padded
    if boundaries is None:
        raise ValueError(
            "packed_seq_params has neither cu_seqlens_q_padded nor cu_seqlens_q, so "
            "the documents' boundaries are unknown."
        )
    documents = Documents.from_cu_seqlens(boundaries, total_tokens, device=device)
    slots = lengths = documents.lengths

    if kv_padded is not None and q_padded is None:
        q_padded = q  # the slots of keys must equal those of queries
    for name, queries, keys in (("_padded", q_padded, kv_padded), ("", q, kv)):
        if queries is None or keys is None or queries == keys:
            continue
        raise ValueError(
            f"packed_seq_params gives cu_seqlens_q{name}={shortened(queries)} and "
            f"cu_seqlens_kv{name}={shortened(keys)}; this layer reads and writes one "
            "sequence, so the two must be equal."
        )
    name, unpadded = ("q", q) if q is not None else ("kv", kv)
    if q_padded is not None and unpadded is not None:
        lengths = Documents(unpadded, documents.device).lengths
        if len(lengths) != len(slots) or not all(
            length <= slot for length, slot in zip(lengths, slots, strict=True)
        ):
            raise ValueError(
                f"cu_seqlens_{name} gives documents of {shortened(lengths)} tokens, "
                f"cu_seqlens_q_padded slots of {shortened(slots)}; there must be one "
                "slot "
                "per document, at least as long as the document."
            )
    if (parents is not None) != (qkv_format == TREE_FORMAT):
        if parents is None:
            has = "no parents"
        else:
            has = "parents of its documents"
        raise ValueError(
            f"packed_seq_params has qkv_format={qkv_format!r} and {has}. Documents "
            f"that continue others have qkv_format={TREE_FORMAT!r} and come from "
            "megatron_gdn.tree_packed_seq_params; copies made with dataclasses.replace "
            "lose the parents."
        )
    if parents is None:
        return documents
    return TreeDocuments(documents.offsets, documents.device, parents, lengths)


def context_parallel_group_of(
    packed: PackedSeqParams | None, group: ProcessGroup | None
) -> ProcessGroup | None:
    """The context-parallel group of a micro-batch; None: one rank.

    It is the group that ``packed`` names by ``cp_group`` and ``local_cp_size``, else
    ``group``. Raises a ValueError if these two fields contradict each other.
    """
    if packed is None or (packed.cp_group is None and packed.local_cp_size is None):
        return group
    group = packed.cp_group
    size = packed.local_cp_size
    if size is not None and size != (1 if group is None else group.size()):
        if group is None:
            given = "no cp_group"
        else:
            given = f"a cp_group of {group.size()} ranks"
        raise ValueError(
            f"packed_seq_params has local_cp_size={size} and {given}; the size must be "
            "the group's (a size of 1 needs no group)."
        )
    return group


class MicroBatchShare(NamedTuple):
    """The tokens of a micro-batch that one context-parallel rank holds, for attention
    layers."""

    documents: Documents | None  # with boundaries on the host; None: not packed
    group: ProcessGroup | None  # the context-parallel group
    size: int  # the number of the group's ranks
    rank: int
    layout: SequenceLayout  # how the loader cut the documents over the ranks
    # the number of tokens of each document with its padding; if the batch is not
    # packed, the number of tokens of one row
    lengths: tuple[int, ...]
    device: torch.device  # of the layer's rows

    @classmethod
    def of(
        cls,
        packed: PackedSeqParams | None,
        group: ProcessGroup | None,
        layout_of: Callable[[PackedSeqParams | None], SequenceLayout],
        tokens: int,
        device: torch.device,
    ) -> MicroBatchShare:
        """The share of a rank that holds ``tokens`` tokens.

        ``layout_of(packed)`` returns how the loader cut the micro-batch; it is called
        only if there are several ranks.
        """
        group = context_parallel_group_of(packed, group)
        size = 1
        rank = 0
        if group is not None:
            size = group.size()
            rank = group.rank()
        total = tokens * size
        documents = resolve_packed_seq_params(packed, total, device)
        if documents is not None:
            documents = documents.on_host()  # raises while a CUDA graph is captured
        layout = SequenceLayout.ZIGZAG  # on one rank all layouts are equal
        if total != tokens:
            layout = layout_of(None if documents is None else packed)
        if documents is None:
            lengths = (total,)
        else:
            lengths = documents.lengths
        return cls(documents, group, size, rank, layout, lengths, device)

    @property
    def positions(self) -> Tensor:
        """Positions of this rank's tokens in the buffer; int64 ``[s]`` on the host."""
        return positions(self.lengths, self.size, self.layout)[self.rank]

    @property
    def local_documents(self) -> tuple[LocalDocument, ...]:
        """The documents with tokens on this rank: their rows on this rank, and the keys
        that these rows attend to."""
        found = local_documents_of(self.lengths, self.size, self.rank, self.layout)
        documents = self.documents
        if documents is None:
            return found
        # in a tree, rows also attend to the tokens of their document's ancestors
        return tuple(
            x._replace(earlier_keys=documents.ancestor_slices(x.first_key))
            for x in found
        )

    def gather(self, x: Tensor) -> Tensor:
        """Gather the ranks' shares ``[s, ...]`` to ``[S, ...]`` in sequence order.

        The backward sums the gradients of all ranks.
        """
        return gather_in_order(x, self.group, self.lengths, self.layout)

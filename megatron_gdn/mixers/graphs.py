"""CUDA graphs: packed documents that a graph can replay, and Megatron's own graphs of
layers.

Under ``cuda_graph_impl="local"`` Megatron copies each dataclass argument of a layer,
and fills the tensors of the copy before each replay. It refuses a step in which a field
that is no tensor has changed. Documents in other buffers change the field ``buffers``
of `StaticPackedSeqParams`, so Megatron refuses them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, ClassVar, cast

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from ..ops.static_documents import StaticDocuments
from .packing import static_documents_of

# The config field by which each micro-batch gets a context-parallel group of its own:
# its name up to Megatron 0.20, then its name in Megatron-LM's dev.
_CP_GROUP_PER_BATCH_FIELDS = ("hybrid_context_parallel", "dynamic_context_parallel")

_LEAVE_OUT_ADVICE = (
    "leave the layer out of the graphs (cuda_graph_modules without 'attn'), or train "
    "on unpacked sequences."
)
_buffer_numbers = count()


@dataclass(frozen=True, init=False, eq=False)
class FixedBuffers:
    """Documents in fixed buffers. Every object of this class has its own ``number``,
    which Megatron compares."""

    number: int
    # not a field, because Megatron compares all fields
    documents: ClassVar[StaticDocuments]

    def __init__(self, documents: StaticDocuments) -> None:
        # a frozen dataclass refuses ``self.documents = documents``
        vars(self).update(documents=documents, number=next(_buffer_numbers))


@dataclass
class StaticPackedSeqParams(PackedSeqParams):
    """The result of :func:`static_packed_seq_params`; a copy refers to the same
    buffers."""

    buffers: FixedBuffers | None = None

    def __setattr__(self, name: str, value: object) -> None:
        """Set a field. Raise a ValueError for boundaries outside of the fixed
        buffer."""
        fields = {**vars(self), name: value}
        buffers: FixedBuffers | None = fields.get("buffers")
        # While capturing, Megatron sets ``cu_seqlens_*`` to descriptions, then to graph
        # tensors.
        if buffers is not None and not is_graph_capturing():
            boundaries = buffers.documents.boundaries
            for side in ("q", "kv"):
                # the field from which the layers read boundaries
                field = f"cu_seqlens_{side}"
                if fields[f"{field}_padded"] is not None:
                    field = f"{field}_padded"
                given = fields[field]
                # the boundaries of keys may be left out
                missing = given is None and side == "q"
                if missing or (isinstance(given, Tensor) and given is not boundaries):
                    raise ValueError(
                        f"packed_seq_params.{field} must stay the fixed buffer that "
                        "these packed_seq_params were made with: a graph would replay "
                        "that buffer. Write boundaries with "
                        "megatron_gdn.set_documents, or make another PackedSeqParams."
                    )
        super().__setattr__(name, value)


def static_packed_seq_params(
    total_tokens: int,
    max_documents: int,
    *,
    max_seqlen: int | None = None,
    device: torch.device | str = "cuda",
) -> PackedSeqParams:
    """Boundaries of packed documents in fixed buffers, so that a CUDA graph can be
    captured.

    Every replay uses the boundaries that :func:`set_documents` wrote last; before the
    first call the documents have ``max_seqlen`` tokens each. ``docs/cuda_graphs.md``
    has an example.

    Args:
        total_tokens: tokens of the packed buffer over all context-parallel ranks; the
            same for every micro-batch (make padding at the end a document of its own).
        max_documents: the largest number of documents of a micro-batch. Kernels run for
            this number of documents and skip the empty ones.
        max_seqlen: ``max_seqlen_q`` and ``max_seqlen_kv``, which attention layers and
            rotary embeddings read on the host; no document may be longer. None means
            ``total_tokens``.
        device: the device of the layers.

    Returns:
        ``PackedSeqParams``: ``cu_seqlens_q`` and ``cu_seqlens_kv`` are one int32 tensor
        ``[max_documents + 1]``, whose unused entries are ``total_tokens``.

    Raises:
        ValueError: an argument is below 1, or
            ``max_documents * max_seqlen < total_tokens``.
    """
    documents = StaticDocuments(total_tokens, max_documents, device, max_seqlen)
    if max_seqlen is None:
        longest = total_tokens
    else:
        longest = max_seqlen
    return StaticPackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=documents.boundaries,
        cu_seqlens_kv=documents.boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        buffers=FixedBuffers(documents),
    )


def set_documents(params: PackedSeqParams, cu_seqlens: Tensor | Sequence[int]) -> None:
    """Write new boundaries into the buffers of :func:`static_packed_seq_params`.

    The host does not wait for the GPU. One set of buffers serves one micro-batch at a
    time, since the micro-batch's backward reads the buffers too. Call this function on
    the stream of the replay. A call inside the captured region is legal too, if
    ``cu_seqlens`` is a fixed buffer on the GPU.

    Args:
        cu_seqlens: int ``[m + 1]``, m up to ``max_documents``: global offsets from 0 to
            ``total_tokens``; padded offsets if documents have padded slots.

    Raises:
        TypeError: ``params`` has no fixed buffers.
        ValueError: documents are too many or too long, or the offsets are not valid. An
            assertion on the GPU checks the offsets of a ``cu_seqlens`` on the GPU.
    """
    documents = static_documents_of(params)
    if documents is None:
        raise TypeError(
            "these packed_seq_params have no fixed buffers; make them with "
            "megatron_gdn.static_packed_seq_params(total_tokens, max_documents)."
        )
    documents.fill(cu_seqlens)


def _captures_mixers(config: TransformerConfig) -> bool:
    """Whether Megatron captures mixers in CUDA graphs of layers.

    If ``cuda_graph_modules`` is empty, Megatron captures whole layers. But with "local"
    and the inference scope "block" it captures no layer.
    """
    if config.cuda_graph_impl not in ("local", "transformer_engine"):
        return False
    modules = {module.name for module in cast(Iterable[Any], config.cuda_graph_modules)}
    if not modules and config.cuda_graph_impl == "local":
        return cast(Any, config.inference_cuda_graph_scope).name != "block"
    return not modules or "attn" in modules


def check_layer_graph(config: TransformerConfig) -> None:
    """Raise a ValueError if Megatron captures mixers while each micro-batch has its own
    context-parallel group. A graph replays one group."""
    own_group_field = next(
        (name for name in _CP_GROUP_PER_BATCH_FIELDS if getattr(config, name, False)),
        None,
    )
    if own_group_field and _captures_mixers(config):
        raise ValueError(
            f"cuda_graph_impl={config.cuda_graph_impl!r} captures this layer, and "
            f"{own_group_field} packs documents, with a group of ranks for each "
            "micro-batch; a graph would replay the documents and the group of the "
            f"first micro-batch; {_LEAVE_OUT_ADVICE}"
        )


def refuse_replayed_boundaries(
    config: TransformerConfig, packed: PackedSeqParams
) -> None:
    """Raise if a graph of the layer would replay the boundaries of ``packed``.

    Only documents in fixed buffers, under ``cuda_graph_impl="local"``, may change
    between replays.
    """
    check_layer_graph(config)
    if not _captures_mixers(config):
        return
    impl = config.cuda_graph_impl
    if impl == "transformer_engine":
        raise NotImplementedError(
            f"packed_seq_params with cuda_graph_impl={impl!r}: Megatron passes only "
            "tensors to these graphs of a layer, and no boundaries. Use "
            "cuda_graph_impl='local' with megatron_gdn.static_packed_seq_params "
            f"(docs/cuda_graphs.md); or {_LEAVE_OUT_ADVICE}"
        )
    if static_documents_of(packed) is None:
        raise NotImplementedError(
            f"packed_seq_params with cuda_graph_impl={impl!r}: a graph would replay "
            "the boundaries of the first micro-batch. Make packed_seq_params with "
            "megatron_gdn.static_packed_seq_params, and write each micro-batch's "
            "boundaries with set_documents (docs/cuda_graphs.md); or "
            f"{_LEAVE_OUT_ADVICE}"
        )


def leave_attention_out_of_graphs(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Let layers with softmax attention run eagerly under ``cuda_graph_impl="local"``.

    Unless ``apply_rope_fusion`` is on, the rotary embedding of packed documents reads
    boundaries on the host, which a graph cannot capture. Megatron's setting
    ``cuda_graph_modules`` cannot leave out only these layers. Call this function before
    the first step; it returns the layers that now run eagerly.
    """
    left_out = [
        layer
        for layer in model.modules()
        if hasattr(layer, "cudagraph_manager")
        and isinstance(getattr(layer, "self_attention", None), Attention)
    ]
    for layer in left_out:
        # Megatron runs a layer without this attribute eagerly
        del layer.cudagraph_manager
    return left_out

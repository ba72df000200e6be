"""Megatron's ``PackedSeqParams`` with documents in fixed buffers, also in its graphs of layers.

``cuda_graph_impl="local"`` gives a layer's capture a copy of each argument that is a dataclass. The
copy has the fields of the original; its tensors are the graph's own, filled with zeros. Before each
replay Megatron copies the tensors of the step into them, and refuses a step whose other fields
differ from those at the capture. So a field holds the documents here: a captured layer reads their
buffers, and documents in other buffers are refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.cuda_graphs import is_graph_capturing
from torch import Tensor

from ..ops.static_documents import StaticDocuments

_numbers = count()


class _OfDocuments:
    documents: StaticDocuments  # no field, so that Megatron does not compare the documents' own


@dataclass(frozen=True, init=False, eq=False)
class FixedBuffers(_OfDocuments):
    """Documents as Megatron compares them: by the number of their buffers."""

    number: int

    def __init__(self, documents: StaticDocuments) -> None:
        vars(self).update(documents=documents, number=next(_numbers))


@dataclass
class StaticPackedSeqParams(PackedSeqParams):
    """Made by :func:`.graphs.static_packed_seq_params`; copies share its buffers.

    Raises:
        ValueError: the fields that say where documents lie get another tensor than the fixed
            buffer.
    """

    buffers: FixedBuffers | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        fields = {**vars(self), name: value}
        buffers: FixedBuffers | None = fields.get("buffers")
        # Megatron puts descriptions of tensors and then the graph's own tensors in their place.
        if buffers is not None and not is_graph_capturing():
            for slot in _slots_of(fields):
                if fields[slot] is not buffers.documents.boundaries and _is_given(fields[slot]):
                    raise ValueError(
                        f"packed_seq_params.{slot} must stay the fixed buffer that these "
                        f"packed_seq_params were made with: a graph would replay that one. Write "
                        f"boundaries with megatron_gdn.set_documents, or make another "
                        f"PackedSeqParams."
                    )
        super().__setattr__(name, value)


def _slots_of(fields: dict[str, Any]) -> tuple[str, ...]:
    """The fields that say where documents lie in the buffer."""
    if fields["cu_seqlens_q_padded"] is not None:
        queries, keys = "cu_seqlens_q_padded", "cu_seqlens_kv_padded"
    else:
        queries = "cu_seqlens_q"
        keys = "cu_seqlens_kv" if fields["cu_seqlens_kv_padded"] is None else "cu_seqlens_kv_padded"
    return (queries,) if fields[keys] is None else (queries, keys)


def _is_given(boundaries: Any) -> bool:
    return boundaries is None or isinstance(boundaries, Tensor)

"""FlashQLA's plan of documents in fixed buffers, for CUDA graphs.

FlashQLA's grids have one block of threads per part (or sequence) and head, or per chunk; a block
without tokens writes nothing. The host knows the largest number of each, and the tables on the
device say which tokens a block has. A sequence is cut by its own length and the number of heads,
also without ``batch_invariant``: FlashQLA's own cut for a whole batch is chosen on the host.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...state_maps.static_parts import most_cuts, static_parts, uncut_parts
from ...static_documents import ChunkPlaces, StaticDocuments
from .plan import Plan, stages


def static_plan_of(
    documents: StaticDocuments, value_heads: int, batch_invariant: bool, states: bool
) -> Plan:
    """The plan of these documents; its tables are written again by every fill.

    ``states``: these enter the documents, which then are not cut.

    Raises:
        NotImplementedError: a buffer of less than a chunk.
    """
    key = (Plan, states) if states else (Plan, value_heads, batch_invariant)
    if key not in documents.plans:
        documents.plans[key] = _plan(documents, value_heads, batch_invariant, states)
    return documents.plans[key]


def _plan(
    documents: StaticDocuments, value_heads: int, batch_invariant: bool, states: bool
) -> Plan:
    size = stages().CHUNK_SIZE
    if documents.total_tokens < size:
        # A block without tokens looks at the 64 tokens before the end.
        raise NotImplementedError(
            f"flash_qla takes documents in fixed buffers of at least {size} tokens per rank, not "
            f"{documents.total_tokens}; use backend='fla' or larger buffers."
        )
    if states:
        uncut = uncut_parts(documents)
        _give_chunks(uncut.sequences, documents.chunks(size), size)
        return Plan(stages().FlashQLACPContext(cu_seqlens=uncut.sequences), uncut)
    parts = static_parts(documents, value_heads)
    _give_chunks(parts.sequences, documents.chunks(size), size)
    if not (batch_invariant or most_cuts(documents, value_heads)):
        whole = parts._replace(offsets=parts.sequences)
        return Plan(stages().FlashQLACPContext(cu_seqlens=parts.sequences), whole)
    _give_chunks(parts.offsets, parts.chunks, size)
    context: Any = stages().FlashQLACPContext(
        is_intra=True, cu_seqlens=parts.sequences, intra_cp_cu_seqlens=parts.offsets,
        seq_map_r2c=parts.first, seq_map_c2r=parts.owner, ht_mask=parts.closes,
        ht_mask_bwd=parts.opens,
    )  # fmt: skip
    return Plan(context, parts)


def _give_chunks(offsets: Tensor, chunks: ChunkPlaces, size: int) -> None:
    """Store the chunks of ``offsets`` where FlashQLA looks before it counts them on the host.

    FlashQLA's ``prepare_varlen_metadata`` stores the same four values; these are fixed buffers.
    """
    offsets._flash_qla_prepared_varlen = (  # pyright: ignore[reportAttributeAccessIssue]
        size, chunks.offsets, len(chunks.indices), chunks.indices
    )  # fmt: skip

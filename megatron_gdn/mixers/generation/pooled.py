"""Requests in a :class:`...ops.generation.requests.RequestPool`: prefill, chunks and steps.

Legend: s tokens, B batch rows, P projection width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...ops.documents import Documents
from ...ops.generation.aligned import decode_on_grid
from ...ops.generation.slots import decode_slots
from ...ops.generation.step import decode, prefill
from ...ops.parts import Parts
from ...ops.trees import TreeDocuments
from ..packing import resolve_packed_seq_params

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def mix_requests(
    proj: Tensor,
    parts: Parts,
    context: Any,
    number: int,
    packed: PackedSeqParams | None,
) -> Tensor:
    """Mix the next tokens of requests in a pool, and update their carries.

    Args:
        proj: ``[s, B, P]``, a batch row for each request, or all end to end in one.
        context: a :class:`megatron_gdn.inference.context.RequestsContext`.
        number: of the layer.
        packed: boundaries of the requests.

    Raises:
        ValueError: unequal numbers of sequences and requests, padding between requests; and see
            :class:`...ops.generation.requests.RequestPool`.
    """
    s, B = proj.shape[:2]
    pool, requests = context.pool, context.requests
    if context.slots is not None:
        return decode_slots(proj, parts, pool.in_slots(number), context.slots)
    documents = _boundaries(packed, s, proj.device)
    lengths = (s,) * B if documents is None else documents.lengths
    if len(lengths) != len(requests):
        what = f"{B} rows" if documents is None else f"{len(lengths)} packed sequences"
        raise ValueError(f"{what} for {len(requests)} requests; give one for each, in their order.")
    pool.check(number, requests, lengths)
    stands = pool.stands(number, requests)
    if parts.aligned and documents is None and s == 1 and not context.keep_steps:
        slots = [request.slot for request in requests]
        mixed = decode_on_grid(proj, parts, pool.in_slots(number), stands, slots)
        pool.count(number, requests, lengths)
        return mixed
    carry = pool.read(number, requests)
    if documents is None and (s == 1 or context.keep_steps):
        mixed, after = decode(proj, parts, carry, stands=stands)
        kept = after if context.keep_steps else ()
        pool.write(number, requests, after[-1], lengths, kept)
        return mixed
    mixed, carry = prefill(proj, parts, carry, documents, stands=stands)
    pool.write(number, requests, carry, lengths)
    return mixed


def _boundaries(
    packed: PackedSeqParams | None, tokens: int, device: torch.device
) -> Documents | None:
    documents = resolve_packed_seq_params(packed, tokens, device)
    if packed is None or documents is None:
        return None
    if isinstance(documents, TreeDocuments):
        raise NotImplementedError(
            "generation takes requests that do not continue each other; give each request its own "
            "tokens, or fork a request."
        )
    padded, real = packed.cu_seqlens_q_padded, packed.cu_seqlens_q
    if padded is not None and real is not None and not torch.equal(padded, real):
        raise ValueError(
            f"cu_seqlens_q={real.tolist()} and cu_seqlens_q_padded={padded.tolist()} leave padding "
            f"after some request, which would enter its state. Pack requests without padding."
        )
    return documents

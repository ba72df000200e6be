"""Softmax attention of a transformers model under context parallelism, packed or not.

Every rank gathers the keys and values of all ranks; their gradients are summed and scattered. It
attends with its own queries, document by document, through torch's
``scaled_dot_product_attention``. Works on any device, number of ranks and layout.

Legend: B batch, S tokens of the whole sequence, s this rank's, H query heads, G key heads, D dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat.megatron_on_cpu import run_megatron_on_cpu
from ...mixers.attention.attention import MicroBatchShare, Span

if TYPE_CHECKING:
    from .batch import ModelBatch

GATHERED = "megatron_gdn_gathered"


def register_gathered_attention() -> None:
    """Make :func:`gathered_attention` known to transformers by the name ``GATHERED``."""
    from transformers import AttentionInterface

    run_megatron_on_cpu()  # Megatron's gather asks for a GPU; nothing changes if there is one
    AttentionInterface.register(GATHERED, gathered_attention)


def gathered_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    gdn_batch: ModelBatch | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Causal attention as transformers calls it.

    Args:
        query, key, value: ``[B, H, s, D]``, ``[B, G, s, D]``.
        gdn_batch: where the tokens lie, from a patched model.

    Returns:
        ``[B, s, H, D]`` and no weights.

    Raises:
        ValueError: a mask (documents come in ``gdn_batch``), or no ``gdn_batch``.
    """
    if attention_mask is not None or gdn_batch is None:
        raise ValueError(
            f"{GATHERED!r} attention runs inside a model that megatron_gdn.hf.patch has patched "
            f"for context parallelism, and takes no attention_mask."
        )
    place = gdn_batch.place
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if place is not None and place.exchange is not None:
        q, k, v = (place.enter(x.flatten(2)).unflatten(2, x.shape[2:]) for x in (q, k, v))
    layout = gdn_batch.layout
    share = MicroBatchShare.of(
        gdn_batch.packed, gdn_batch.group, lambda _: layout, q.shape[1], q.device
    )
    keys, values = (share.gather(x.transpose(0, 1)).transpose(0, 1) for x in (k, v))
    spans = [_attend(span, q, keys, values, scaling, dropout) for span in share.spans]
    out = torch.cat(spans, dim=1)
    if place is not None and place.exchange is not None:
        out = place.leave(out.flatten(2)).unflatten(2, out.shape[2:])
    return out.contiguous(), None


def _attend(
    span: Span, q_BsHD: Tensor, k_BSGD: Tensor, v_BSGD: Tensor, scale: float | None, dropout: float
) -> Tensor:
    """One document's queries on this rank, over its keys up to the last query."""
    q = q_BsHD[:, span.first : span.last].transpose(1, 2)
    k, v = (x[:, span.start : span.end].transpose(1, 2) for x in (k_BSGD, v_BSGD))
    mask = None
    if span.position is not None:
        position = span.position.to(q.device, non_blocking=True)
        mask = position[:, None] >= torch.arange(span.end - span.start, device=q.device)
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None, scale=scale,
        enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    return out.transpose(1, 2)

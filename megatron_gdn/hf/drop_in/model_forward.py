"""What a patched text model does around its own forward: batch, positions, masks and attention.

The batch is resolved before the forward and passed to layers and attention. Under context
parallelism softmax attention gathers the keys and values of all ranks (their gradients are summed
and scattered) and attends with its own queries, document by document, through torch's
``scaled_dot_product_attention``. Works on any device, number of ranks and layout.

Legend: B batch, S tokens of the whole sequence, s this rank's, H query heads, G key heads, D dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...compat.one_process import run_megatron_on_cpu
from ...mixers.attention.attention import MicroBatchShare, Span
from ...ops.host_tables import to_device
from .batch import ModelBatch, resolve_call
from .families import linear_attention_of
from .layer import DropInOptions
from .sources import Sources, as_attention_reads, offsets_of, text_positions

GATHERED = "megatron_gdn_gathered"


def prepare_forward(text: Any, options: DropInOptions, given: dict[str, Any]) -> dict:
    """The keywords of the text model's forward, given by name, with the resolved batch added."""
    kwargs = dict(given)
    seq_index = kwargs.pop("seq_index", None)
    kwargs.pop("gdn_batch", None)
    mask = kwargs.get("attention_mask")
    sources = Sources(
        mask.get("linear_attention") if isinstance(mask, dict) else mask,
        kwargs.pop("_packed_seq_ids", None),
        offsets_of(kwargs.pop("cu_seqlens", None), kwargs.get("cu_seq_lens_q")),
        kwargs.get("position_ids"),
        kwargs.pop("indices", None),
    )
    mask = kwargs["attention_mask"] = as_attention_reads(text, mask)
    x, cache = kwargs.get("input_ids"), kwargs.get("past_key_values")
    x = kwargs.get("inputs_embeds") if x is None else x
    if x is None:
        return kwargs  # the model's forward raises and names what is missing
    batch = resolve_call(options, sources, x, seq_index, cache)
    if batch is None:
        return kwargs
    kwargs["gdn_batch"] = batch
    if batch.is_plain:
        return kwargs
    if cache is not None or kwargs.get("use_cache"):
        what = "packed documents" if batch.group is None else "context parallelism"
        raise ValueError(
            f"a cache cannot be filled with {what}: it holds one state per row. Pass "
            f"use_cache=False and no past_key_values; generate on one rank, one sequence per row."
        )
    kwargs["use_cache"] = False
    if kwargs.get("position_ids") is None:
        kwargs["position_ids"] = _positions(batch, len(x), x.device)
    _refuse_mixing_elsewhere(text.config, batch)
    kinds = set(text.config.layer_types) - {"linear_attention"}
    kind = kinds.pop() if len(kinds) == 1 else "full_attention"
    if isinstance(mask, dict):
        of_attention = mask[kind]
    else:
        of_attention = _attention_mask(text, batch, x, kwargs["position_ids"], mask)
    kwargs["attention_mask"] = {kind: of_attention, "linear_attention": None}
    return kwargs


def _refuse_mixing_elsewhere(config: Any, batch: ModelBatch) -> None:
    """Refuse what other parts of a model than its layers here would let documents or ranks mix."""
    documents = batch.group is None
    if getattr(config, "ple_layer_ids", None):
        what = "packed documents" if documents else "context parallelism"
        raise NotImplementedError(
            f"{what} in a model with per-layer embeddings (ple_layer_ids={config.ple_layer_ids}): "
            f"their n-grams and convolution run over the whole row that a rank is given, across "
            f"documents. Give one document per row, on one rank."
        )
    if "indexed_attention" not in config.layer_types:
        return
    if documents and config.model_type.startswith("glm5_next"):
        raise NotImplementedError(
            "packed documents in a model of GLM 5 next: its indexed attention takes a mask of "
            "padding only, and reads across documents. Give one document per row; a layer of its "
            "own (CPAwareGatedDeltaNet) takes packed documents."
        )
    if not documents:
        raise NotImplementedError(
            "context parallelism in a model with indexed attention: its indexer ranks the keys of "
            "the tokens that a rank holds, not those of the sequence. Run it on one rank; a layer "
            "of its own (CPAwareGatedDeltaNet) takes context parallelism."
        )


def _positions(batch: ModelBatch, rows: int, device: torch.device) -> Tensor:
    """int64 ``[B, S]``: positions inside each document, 0 at padding."""
    ids, own = batch.ids, batch.own
    if ids is None or batch.packed is None:
        assert own is not None
        return to_device(own, device).expand(rows, -1)
    starts = torch.ones_like(ids, dtype=torch.bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    column = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    start = column.masked_fill(~starts, 0).cummax(-1).values
    position = (column - start).masked_fill(ids == 0, 0)
    if own is not None:
        position = position[:, own]
    return to_device(position.contiguous(), device)


def _attention_mask(
    text: Any, batch: ModelBatch, x: Tensor, position_ids: Tensor, mask: Tensor | None
) -> Any:
    """The mask that keeps documents apart, in the form that the attention takes."""
    implementation = text.config._attn_implementation
    if all(linear_attention_of(layer) is not None for layer in text.layers):
        return None
    if batch.group is not None:
        if batch.packed is not None and implementation != GATHERED:
            raise ValueError(
                f"documents are packed and the model's attention is {implementation!r}, which does "
                f"not take them under context parallelism. Patch with attention='gathered', or "
                f"pass attention_mask as a dict whose 'full_attention' is what your attention "
                f"takes."
            )
        return None
    assert batch.ids is not None
    if "flash" in implementation:  # it finds the documents of one row by their positions
        positions, starts = text_positions(position_ids), (batch.ids.diff(dim=-1) != 0).cpu()
        told = positions is not None and bool(((positions.cpu().diff(dim=-1) != 1) == starts).all())
        if len(batch.ids) > 1 or batch.keep is not None or not told:
            raise ValueError(
                f"{implementation!r} keeps packed documents apart only in one row without padding "
                f"whose position_ids start again at every document. Lay the rows end to end "
                f"(megatron_gdn.hf.PackingCollator does), or use attn_implementation='sdpa'."
            )
        return None
    if mask is not None and mask.dim() == 4:
        return mask
    from transformers.masking_utils import create_causal_mask, packed_sequence_mask_function

    weight = text.get_input_embeddings().weight
    shape = torch.empty(*x.shape[:2], 1, dtype=weight.dtype, device=x.device)
    return create_causal_mask(
        config=text.config,
        inputs_embeds=shape,
        attention_mask=batch.keep,
        past_key_values=None,
        and_mask_function=packed_sequence_mask_function(to_device(batch.ids, x.device)),
    )


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
    """Causal attention as transformers calls it: ``[B, H, s, D]`` in, ``[B, s, H, D]`` out."""
    if attention_mask is not None or gdn_batch is None:
        raise ValueError(
            f"{GATHERED!r} attention runs inside a model that megatron_gdn.hf.patch has patched "
            f"for context parallelism, and takes no attention_mask."
        )
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    if gdn_batch.moves is not None:
        q, k, v = (gdn_batch.move(x.flatten(2)).unflatten(2, x.shape[2:]) for x in (q, k, v))
    layout = gdn_batch.layout
    share = MicroBatchShare.of(
        gdn_batch.packed, gdn_batch.group, lambda _: layout, q.shape[1], q.device
    )
    keys, values = (share.gather(x.transpose(0, 1)).transpose(0, 1) for x in (k, v))
    spans = [_attend(span, q, keys, values, scaling, dropout) for span in share.spans]
    out = torch.cat(spans, dim=1)
    if gdn_batch.moves is not None:
        out = gdn_batch.move_back(out.flatten(2)).unflatten(2, out.shape[2:])
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

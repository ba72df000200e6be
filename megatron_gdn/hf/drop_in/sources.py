"""Reads document boundaries in any form that a trainer passes; makes one table of
document ids.

| source                                        | who gives it                                    |
|-----------------------------------------------|-------------------------------------------------|
| ``attention_mask`` ``[B, S]`` with ids > 1    | indexed masks of collators                      |
| ``_packed_seq_ids`` ``[B, S]``                | indexed masks beside a 4-D attention mask       |
| ``attention_mask`` ``[B, 1, S, S]``           | block-causal masks                              |
| ``attention_mask`` as a dict                  | masks of the two kinds of layers                |
| ``cu_seq_lens_q`` ``[N + 1]``                 | flash-attention kwargs, padding-free collators  |
| ``cu_seqlens`` with ``indices`` ``[T]``       | flash-attention kwargs without padding tokens   |
| ``position_ids`` ``[B, S]`` that start again  | TRL, veRL, transformers' flattening collator    |
| ``position_ids`` ``[3, B, S]``, all 0 again   | vision-language models                          |

Ids count documents from 1 along each row; 0 is padding. The table is on the host. A 4-D
mask is 1 or True where a token sees another token; a float mask, which is added to
scores, is 0 there.

Legend: B batch, S tokens of a row, N documents, T tokens without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ...ops.documents import Documents

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_BLOCKS = "attention_mask (4-D)"
# the entry of linear attentions in a dict of masks
_LINEAR_ATTENTION = "linear_attention"
# a score plus this number, or plus a lower one, gives the attention weight 0
_EXCLUDED = -1e4


class Sources(NamedTuple):
    """Arguments of one forward that give document boundaries or the places of a rank's
    tokens."""

    attention_mask: Tensor | None = None
    packed_seq_ids: Tensor | None = None
    # offsets of documents, in tokens of ``indices`` if given
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None
    # places of tokens in flattened [B * S]; other places are padding
    indices: Tensor | None = None
    seq_index: Tensor | None = None
    # the masks of other layers, if the model made a dict of masks
    other_masks: Mapping[str, Tensor] = {}

    @classmethod
    def from_keywords(cls, mask: Tensor | None, keywords: dict) -> Sources:
        """Read a forward's ``keywords``, and remove keywords that transformers does not
        take."""
        names = ("_packed_seq_ids", "cu_seqlens", "indices", "seq_index")
        ids, offsets, indices, seq_index = (keywords.pop(name, None) for name in names)
        same = keywords.get("cu_seq_lens_q")
        if (
            offsets is not None
            and same is not None
            and offsets.tolist() != same.tolist()
        ):
            raise ValueError(
                f"cu_seqlens={offsets.tolist()[:8]} and "
                f"cu_seq_lens_q={same.tolist()[:8]} differ; they are two names of one "
                "thing, the offsets. Give one of them."
            )
        if offsets is None:
            offsets = same
        if offsets is not None:
            offsets = torch.as_tensor(offsets, device="cpu").detach()
        return cls(mask, ids, offsets, keywords.get("position_ids"), indices, seq_index)


def split_masks(mask: object) -> tuple[Tensor | None, dict[str, Tensor]]:
    """The mask of linear attentions and the masks of the other layers, whether in a
    dict or not.

    A dict without a mask of linear attentions has the ``[B, S]`` mask of the other
    layers for them. torch's BlockMask becomes a 4-D bool mask.
    """
    if not isinstance(mask, dict):
        return _dense(mask), {}
    others = {
        kind: _dense(one) for kind, one in mask.items() if kind != _LINEAR_ATTENTION
    }
    of_linear = _dense(mask.get(_LINEAR_ATTENTION))
    if of_linear is None:
        two_dimensional = (
            x for x in others.values() if isinstance(x, Tensor) and x.dim() == 2
        )
        of_linear = next(two_dimensional, None)
    return of_linear, others


def _dense(mask: Any) -> Any:
    """``mask``, or a 4-D bool mask if it is torch's BlockMask."""
    if not hasattr(mask, "mask_mod"):
        return mask
    from torch.nn.attention.flex_attention import create_mask

    rows, heads = mask.kv_num_blocks.shape[:2]
    device = mask.kv_num_blocks.device.type
    return create_mask(mask.mask_mod, rows, heads, *mask.seq_lengths, device=device)


def cache_in(keywords: dict) -> Any:
    """transformers' cache among the ``keywords`` of a forward, under any of its names;
    or None.

    Models of transformers 5.24 take the cache as ``cache``; models of earlier versions
    take it as ``past_key_values``, and their linear attentions as ``cache_params``.
    """
    given = {
        name: keywords[name] for name in CACHE_NAMES if keywords.get(name) is not None
    }
    caches = list(given.values())
    if any(other is not caches[0] for other in caches[1:]):
        raise ValueError(
            f"{' and '.join(given)} are different caches; they are names of one thing. "
            "Give one."
        )
    if caches:
        return caches[0]
    return None


def is_indexed_packed_mask(mask: object) -> TypeGuard[Tensor]:
    """Whether a mask ``[B, S]`` holds document ids: some value is above 1. Waits for
    the GPU."""
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool or mask.dim() != 2:
        return False
    return bool((mask > 1).any())


def text_positions(position_ids: Tensor | None) -> Tensor | None:
    """Text positions ``[B or 1, S]``: 2-D ``position_ids``, table 0 of ``[4, B, S]``,
    or None."""
    if position_ids is None or position_ids.dim() == 2:
        return position_ids
    if position_ids.dim() == 3 and position_ids.shape[0] == 4:
        return position_ids[0]
    return None


def _positions_in_documents(position_ids: Tensor | None) -> Tensor | None:
    """:func:`text_positions`, or for ``[3, B, S]`` positions that start again where
    those do.

    Three equal tables are text positions. Three other tables are of images: a document
    starts where all three are 0, as only a document's first token has them.
    """
    if position_ids is None or position_ids.dim() != 3 or position_ids.shape[0] != 3:
        return text_positions(position_ids)
    first_table = position_ids[0]
    if bool((position_ids == first_table).all()):
        return first_table
    place = torch.arange(first_table.shape[-1], device=first_table.device)
    start = torch.where((position_ids == 0).all(0), place, 0).cummax(-1).values
    return place - start


def starts_of(ids_BS: Tensor) -> Tensor:
    """bool ``[B, S]``: True where a document of ``ids_BS`` or a run of padding
    begins."""
    starts = torch.ones_like(ids_BS, dtype=torch.bool)
    starts[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    return starts


def document_ids(sources: Sources, rows: int, tokens: int) -> Tensor | None:
    """Document ids, int64 ``[B, S]`` on the host; None when every row is one sequence.

    If no other source names documents, ``position_ids`` are read: a token whose
    position is not the previous token's plus 1 starts a document (as in transformers'
    attention masks). Tokens with 0 in a 0/1 ``attention_mask`` are padding, whichever
    source names the documents.
    """
    mask, packed_seq_ids, cu_seqlens, position_ids, indices, _, other_masks = sources
    ids_of: dict[str, Tensor] = {}
    if mask is not None and mask.dim() == 4:
        ids_of[_BLOCKS] = _ids_from_block_mask(mask, rows, tokens)
        mask = None
    elif mask is not None:
        mask = to_host("attention_mask", mask, rows, tokens)
        if is_indexed_packed_mask(mask):
            ids_of["attention_mask"] = mask.long()
    for kind, other in other_masks.items():
        name = f"attention_mask[{kind!r}]"
        if other.dim() == 4:
            ids = _ids_of_documents_kept_apart(other, mask, rows, tokens)
            ids_of |= {} if ids is None else {name: ids}
        elif is_indexed_packed_mask(other):
            ids_of[name] = to_host(name, other, rows, tokens).long()
    if packed_seq_ids is not None:
        ids = to_host("_packed_seq_ids", packed_seq_ids, rows, tokens)
        ids_of["_packed_seq_ids"] = ids.long()
    if cu_seqlens is not None:
        ids_of["cu_seq_lens_q"] = _ids_from_offsets(cu_seqlens, indices, rows, tokens)
    elif indices is not None:
        raise ValueError(
            f"indices of {indices.numel()} tokens without cu_seqlens, the offsets of "
            "documents among these tokens. Give both, or the ids of documents as "
            "attention_mask."
        )
    # A 4-D mask in which each row is one document names no boundaries, so positions are
    # read too.
    unnamed = set(ids_of) <= {_BLOCKS} and all(
        bool((ids <= 1).all()) for ids in ids_of.values()
    )
    positions = _positions_in_documents(position_ids)
    if unnamed and positions is not None:
        ids = _document_ids_from_positions(
            positions, ids_of.get(_BLOCKS, mask), rows, tokens
        )
        ids_of |= {} if ids is None else {"position_ids": ids}
    if not ids_of:
        return None
    (first, ids), *others = ids_of.items()
    for name, other_ids in others:
        if not torch.equal(_renumber(ids), _renumber(other_ids)):
            raise ValueError(
                f"{first} and {name} put the boundaries of documents in different "
                f"places: {_describe_documents(ids)} and "
                f"{_describe_documents(other_ids)}. Give one of them, or make them "
                "agree."
            )
    if mask is not None and "attention_mask" not in ids_of:
        padding_BS = mask == 0
        if indices is not None and not torch.equal(padding_BS, ids == 0):
            raise ValueError(
                f"the attention_mask keeps {int((~padding_BS).sum())} tokens, which "
                f"are not the {int((ids > 0).sum())} of indices. Give one of them, or "
                "make them agree."
            )
        ids = ids.masked_fill(padding_BS, 0)
    # Ids are needed if the mask gave them, or if a row has several documents or
    # padding.
    packed = "attention_mask" in ids_of or bool(
        ((ids == 0) | (ids != ids[:, :1])).any()
    )
    if packed:
        return ids
    return None


def _renumber(ids_BS: Tensor) -> Tensor:
    """Renumber ids to 1, 2, ... along each row; padding stays 0."""
    return (starts_of(ids_BS) & (ids_BS > 0)).cumsum(-1) * (ids_BS > 0)


def _describe_documents(ids_BS: Tensor) -> str:
    """The lengths of the documents of row 0, in words for error messages."""
    lengths = _renumber(ids_BS)[0].bincount()[1:].tolist()
    return (
        f"row 0 has documents of {lengths[:8]}{' ...' if len(lengths) > 8 else ''} "
        "tokens"
    )


def to_host(name: str, x: Tensor, rows: int, tokens: int) -> Tensor:
    """Copy ``x [rows, tokens]`` to the host; raise if the argument ``name`` has another
    shape."""
    if x.shape != (rows, tokens):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, the hidden states have {rows} rows of "
            f"{tokens} tokens; it must be [{rows}, {tokens}]."
        )
    return x.detach().cpu()


def _ids_from_offsets(
    cu_seqlens: Tensor, indices: Tensor | None, rows: int, tokens: int
) -> Tensor:
    """Document ids from ``cu_seqlens``, which counts tokens at ``indices`` (None: all
    tokens)."""
    slots = rows * tokens
    token_T = torch.arange(slots, device="cpu")
    if indices is not None:
        token_T = indices.detach().to("cpu", torch.int64)
        ends = [-1] + token_T.flatten().tolist() + [slots]
        if token_T.dim() != 1 or any(
            b <= a for a, b in zip(ends, ends[1:], strict=False)
        ):
            raise ValueError(
                f"indices of shape {tuple(token_T.shape)} must be [T] and increase "
                f"from 0 or more to at most {slots - 1}: the places of the tokens that "
                "are not padding, in the flattened rows (megatron_gdn.unpad_data makes "
                "them of a mask)."
            )
    documents = Documents.from_cu_seqlens(cu_seqlens, len(token_T), device="cpu")
    id_T = documents.document_T() + 1
    if tokens:
        row_T = token_T // tokens
    else:
        row_T = token_T
    if bool(((id_T[1:] == id_T[:-1]) & (row_T[1:] != row_T[:-1])).any()):
        raise ValueError(
            f"cu_seq_lens_q={list(documents.offsets)[:20]} has a document that goes on "
            f"from one row of {tokens} tokens into the next; each of {rows} rows must "
            "start a document."
        )
    ids = torch.zeros(slots, dtype=torch.int64, device="cpu")
    ids[token_T] = id_T
    return ids.view(rows, tokens)


def _document_ids_from_positions(
    positions: Tensor, keep: Tensor | None, rows: int, tokens: int
) -> Tensor | None:
    """Ids of documents, which start where ``positions`` jump; None if each row is one
    document."""
    if positions.shape[0] == 1:
        positions = positions.expand(rows, -1)
    position_BS = to_host("position_ids", positions, rows, tokens).long()
    if keep is None:
        keep_BS = torch.ones_like(position_BS, dtype=torch.bool)
    else:
        keep_BS = keep != 0
    row_T, column_T = keep_BS.nonzero(as_tuple=True)
    position_T = position_BS[row_T, column_T]
    starts = torch.ones_like(row_T, dtype=torch.bool)
    starts[1:] = (row_T[1:] != row_T[:-1]) | (position_T[1:] != position_T[:-1] + 1)
    if int(starts.sum()) == int(keep_BS.any(-1).sum()):
        return None
    ids = torch.zeros_like(position_BS)
    ids[row_T, column_T] = starts.cumsum(0)
    return ids


def _ids_of_documents_kept_apart(
    mask: Tensor, padding: Tensor | None, rows: int, tokens: int
) -> Tensor | None:
    """Ids from the mask ``[B, 1, S, S]`` of softmax attention; None if it keeps none
    apart.

    Such a mask may be of another kind (causal, a window, another treatment of padding).
    Only if no token from some place on sees a token before that place, it must be
    block-causal. Where ``padding`` ``[B, S]`` is 0, the mask is not read. Columns after
    the S-th are a cache's.
    """
    if mask.is_floating_point():
        sees = mask > _EXCLUDED
    else:
        sees = mask != 0
    sees = sees.any(1)[..., :tokens].cpu()
    if sees.shape[0] not in (1, rows) or sees.shape[1:] != (tokens, tokens):
        raise ValueError(
            f"a 4-D attention_mask of shape {tuple(mask.shape)} does not fit {rows} "
            f"rows of {tokens} tokens; it must be [{rows}, 1, {tokens}, {tokens}]."
        )
    sees = sees.expand(rows, -1, -1)
    if padding is not None and padding.dim() == 2:
        keep_BS = padding.cpu() != 0
        sees = sees & keep_BS[:, :, None] & keep_BS[:, None]
    place = torch.arange(tokens, device="cpu")
    keep_BS = sees.diagonal(dim1=-2, dim2=-1)
    first_seen_BS = torch.where(sees.any(-1), sees.int().argmax(-1), tokens)
    seen_later_BS = first_seen_BS.flip(-1).cummin(-1).values.flip(-1)
    starts_BS = (seen_later_BS >= place) & keep_BS
    padding_first = bool((keep_BS.diff(dim=-1, prepend=keep_BS[:, :1]) & keep_BS).any())
    if int(starts_BS.sum(-1).max()) < 2 and not (padding is None and padding_first):
        return None
    return _ids_from_block_mask(sees[:, None], rows, tokens)


def _ids_from_block_mask(mask: Tensor, rows: int, tokens: int) -> Tensor:
    """Ids from a mask ``[B, 1, S, S]``; a token that no token sees is padding, with id
    0."""
    if mask.shape[0] not in (1, rows) or mask.shape[1:] != (1, tokens, tokens):
        raise ValueError(
            f"a 4-D attention_mask of shape {tuple(mask.shape)} does not fit {rows} "
            f"rows of {tokens} tokens; it must be [{rows}, 1, {tokens}, {tokens}]."
        )
    sees = mask != 0
    if mask.is_floating_point():
        sees = mask == 0
        if not bool((sees | (mask <= _EXCLUDED)).all()):
            raise ValueError(
                f"a 4-D attention_mask of {mask.dtype} is added to scores: it holds 0 "
                f"where a token sees another, and {_EXCLUDED:g} or less where not; "
                f"this one has {mask[~sees & (mask > _EXCLUDED)][0].item()}. Pass a "
                "bool mask, True where a token sees another."
            )
    sees = sees[:, 0].expand(rows, -1, -1)
    keep_BS = sees.diagonal(dim1=-2, dim2=-1)
    token = torch.arange(tokens, device=mask.device)
    # A document's first token sees no earlier token.
    first_BS = (sees.int().argmax(-1) == token) & keep_BS
    ids = first_BS.cumsum(-1) * keep_BS
    expected = (ids[:, :, None] == ids[:, None]) & (token[:, None] >= token)
    wrong = torch.where(keep_BS, (sees != expected).any(-1), sees.any(-2)).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the 4-D attention_mask is not block-causal: token {token} of row {row} "
            "does not see exactly its document's tokens up to itself (inverted?). "
            "Give True where a token sees another (0 if added to scores), nothing at "
            "padding, or use _packed_seq_ids."
        )
    return ids.cpu()

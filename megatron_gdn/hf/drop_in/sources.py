"""Reads document boundaries in each form that a trainer may pass; makes one tensor of
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
| ``position_ids`` ``[3, B, S]``, 0 at starts   | vision-language models                          |

Ids are int64 ``[B, S]`` on the host. They increase from document to document in a row,
and 0 is padding. A 4-D mask is 1 or True at [.., i, j] if token i attends to token j. A
float mask is added to scores, so it is 0 there.

Legend: B batch rows, S tokens of a row (``rows`` and ``tokens`` in the code), N
documents, T tokens without padding.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ...ops.documents import Documents

CACHE_NAMES = ("cache", "past_key_values", "cache_params")
_BLOCK_MASK_NAME = "attention_mask (4-D)"
# the key of linear attentions in a dict of masks
_LINEAR_ATTENTION = "linear_attention"
# A float mask of this value or less, added to a score, makes the attention weight 0.
_EXCLUDED_SCORE = -1e4


class BoundarySources(NamedTuple):
    """The arguments of one forward that tell where documents start, or which tokens of
    the sequence a rank has. None: the argument is not given."""

    attention_mask: Tensor | None = None
    packed_seq_ids: Tensor | None = None
    # offsets of documents [N + 1]; with ``indices`` they count its T tokens
    cu_seqlens: Tensor | None = None
    position_ids: Tensor | None = None
    # [T]: numbers of the tokens that are not padding, in the flattened B * S tokens
    indices: Tensor | None = None
    # positions in the sequence of this rank's tokens, with context parallelism
    seq_index: Tensor | None = None
    # kind of layer -> its mask, for kinds other than linear attention
    other_masks: Mapping[str, Tensor] = {}

    @classmethod
    def from_keywords(cls, mask: Tensor | None, keywords: dict) -> BoundarySources:
        """The sources among a forward's ``keywords``, with ``mask`` as the attention
        mask. Keywords that transformers does not take are removed from ``keywords``."""
        packed_seq_ids = keywords.pop("_packed_seq_ids", None)
        offsets = keywords.pop("cu_seqlens", None)
        indices = keywords.pop("indices", None)
        seq_index = keywords.pop("seq_index", None)
        flash_offsets = keywords.get("cu_seq_lens_q")
        if offsets is None:
            offsets = flash_offsets
        elif flash_offsets is not None and offsets.tolist() != flash_offsets.tolist():
            raise ValueError(
                f"cu_seqlens={offsets.tolist()[:8]} and "
                f"cu_seq_lens_q={flash_offsets.tolist()[:8]} differ; they are two names "
                "of one thing, the offsets. Give one of them."
            )
        if offsets is not None:
            offsets = torch.as_tensor(offsets, device="cpu").detach()
        return cls(
            attention_mask=mask,
            packed_seq_ids=packed_seq_ids,
            cu_seqlens=offsets,
            position_ids=keywords.get("position_ids"),
            indices=indices,
            seq_index=seq_index,
        )


def split_masks(mask: object) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the mask of linear attentions, and a dict of the other layers' masks: kind
    of layer -> mask.

    ``mask``: one mask of all layers, or a dict: kind of layer -> mask. If the dict has no
    mask of linear attentions, they get the first ``[B, S]`` mask in it. torch's
    BlockMask becomes a 4-D bool mask.
    """
    if not isinstance(mask, dict):
        return _dense_mask(mask), {}
    linear_mask = _dense_mask(mask.get(_LINEAR_ATTENTION))
    other_masks = {}
    for kind, other in mask.items():
        if kind != _LINEAR_ATTENTION:
            other_masks[kind] = _dense_mask(other)
    if linear_mask is None:
        for other in other_masks.values():
            if isinstance(other, Tensor) and other.dim() == 2:
                return other, other_masks
    return linear_mask, other_masks


def _dense_mask(mask: Any) -> Any:
    """``mask``, or a 4-D bool mask if it is torch's BlockMask."""
    if not hasattr(mask, "mask_mod"):
        return mask
    from torch.nn.attention.flex_attention import create_mask

    rows, heads = mask.kv_num_blocks.shape[:2]
    device = mask.kv_num_blocks.device.type
    return create_mask(mask.mask_mod, rows, heads, *mask.seq_lengths, device=device)


def find_cache(keywords: dict) -> Any:
    """transformers' cache among the ``keywords`` of a forward; None if there is none.

    Models of transformers 5.24 take the cache as ``cache``. Models of earlier versions
    take it as ``past_key_values``, and their linear attentions as ``cache_params``. Two
    different caches raise a ValueError.
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
    """Whether ``mask`` is a mask ``[B, S]`` of document ids: some value is above 1. The
    host waits for the GPU."""
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool or mask.dim() != 2:
        return False
    return bool((mask > 1).any())


def text_positions(position_ids: Tensor | None) -> Tensor | None:
    """Text positions ``[B or 1, S]``: ``position_ids`` if 2-D. A vision-language model's
    ``[4, B, S]`` has them first, before three axes of positions. None for other
    shapes."""
    if position_ids is None or position_ids.dim() == 2:
        return position_ids
    if position_ids.dim() == 3 and position_ids.shape[0] == 4:
        return position_ids[0]
    return None


def _positions_in_documents(position_ids: Tensor | None) -> Tensor | None:
    """Positions ``[B or 1, S]`` that are 0 at the first token of each document; None for
    unknown shapes.

    ``position_ids`` ``[3, B, S]`` are three axes of positions. If all are equal, they
    are text positions. Otherwise the row has images. Then a document starts where all
    three axes are 0: no later token of a document has three zeros. Other shapes are read
    by :func:`text_positions`.
    """
    if position_ids is None or position_ids.dim() != 3 or position_ids.shape[0] != 3:
        return text_positions(position_ids)
    first_axis = position_ids[0]
    if bool((position_ids == first_axis).all()):
        return first_axis
    column = torch.arange(first_axis.shape[-1], device=first_axis.device)
    is_start = (position_ids == 0).all(0)
    document_start = torch.where(is_start, column, 0).cummax(-1).values
    return column - document_start


def document_starts(ids_BS: Tensor) -> Tensor:
    """bool ``[B, S]``: True at the first token of each document of ``ids_BS``, and at
    the first token of each stretch of padding."""
    starts = torch.ones_like(ids_BS, dtype=torch.bool)
    starts[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    return starts


def document_ids(sources: BoundarySources, rows: int, tokens: int) -> Tensor | None:
    """Document ids, int64 ``[B, S]`` on the host, of ``rows`` rows with ``tokens`` tokens
    each; None if every row is one sequence without padding.

    ``position_ids`` are read only if no other source gives documents: a token whose
    position is not the previous token's plus 1 starts a document (as in transformers'
    attention masks). A token with 0 in a 0/1 ``attention_mask`` is padding in every
    case.

    Raises:
        ValueError: a source has a wrong shape or content, or two sources differ.
    """
    mask = sources.attention_mask
    packed_seq_ids = sources.packed_seq_ids
    cu_seqlens = sources.cu_seqlens
    indices = sources.indices
    # name of a source -> the ids that it gives
    ids_of: dict[str, Tensor] = {}
    if mask is not None and mask.dim() == 4:
        ids_of[_BLOCK_MASK_NAME] = _ids_from_block_causal_mask(mask, rows, tokens)
        mask = None
    elif mask is not None:
        mask = copy_to_host("attention_mask", mask, rows, tokens)
        if is_indexed_packed_mask(mask):
            ids_of["attention_mask"] = mask.long()
    for kind, other in sources.other_masks.items():
        name = f"attention_mask[{kind!r}]"
        if other.dim() == 4:
            ids = _ids_from_softmax_mask(other, mask, rows, tokens)
            if ids is not None:
                ids_of[name] = ids
        elif is_indexed_packed_mask(other):
            ids_of[name] = copy_to_host(name, other, rows, tokens).long()
    if packed_seq_ids is not None:
        ids = copy_to_host("_packed_seq_ids", packed_seq_ids, rows, tokens)
        ids_of["_packed_seq_ids"] = ids.long()
    if cu_seqlens is not None:
        ids_of["cu_seq_lens_q"] = _ids_from_offsets(cu_seqlens, indices, rows, tokens)
    elif indices is not None:
        raise ValueError(
            f"indices of {indices.numel()} tokens without cu_seqlens, the offsets of "
            "documents among these tokens. Give both, or the ids of documents as "
            "attention_mask."
        )
    # Positions are read if no source gives boundaries. A 4-D mask gives no boundaries if
    # each of its rows is one document.
    other_sources = ids_of.keys() - {_BLOCK_MASK_NAME}
    mask_ids = ids_of.get(_BLOCK_MASK_NAME)
    mask_has_boundaries = mask_ids is not None and bool((mask_ids > 1).any())
    positions = _positions_in_documents(sources.position_ids)
    if not other_sources and not mask_has_boundaries and positions is not None:
        keep = mask if mask_ids is None else mask_ids
        ids = _ids_from_positions(positions, keep, rows, tokens)
        if ids is not None:
            ids_of["position_ids"] = ids
    if not ids_of:
        return None
    first = next(iter(ids_of))
    ids = ids_of[first]
    for name, other_ids in ids_of.items():
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
    if "attention_mask" in ids_of:
        return ids
    has_padding_or_boundary = (ids == 0) | (ids != ids[:, :1])
    if bool(has_padding_or_boundary.any()):
        return ids
    return None


def _renumber(ids_BS: Tensor) -> Tensor:
    """Renumber the ids of each row to 1, 2, ...; padding stays 0."""
    return (document_starts(ids_BS) & (ids_BS > 0)).cumsum(-1) * (ids_BS > 0)


def _describe_documents(ids_BS: Tensor) -> str:
    """A phrase for error messages: the lengths of the documents of row 0."""
    lengths = _renumber(ids_BS)[0].bincount()[1:].tolist()
    return (
        f"row 0 has documents of {lengths[:8]}{' ...' if len(lengths) > 8 else ''} "
        "tokens"
    )


def copy_to_host(name: str, x: Tensor, rows: int, tokens: int) -> Tensor:
    """Copy the argument ``name``, ``x [rows, tokens]``, to the host; raise a ValueError
    if it has another shape."""
    if x.shape != (rows, tokens):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, the hidden states have {rows} rows of "
            f"{tokens} tokens; it must be [{rows}, {tokens}]."
        )
    return x.detach().cpu()


def _ids_from_offsets(
    cu_seqlens: Tensor, indices: Tensor | None, rows: int, tokens: int
) -> Tensor:
    """Document ids ``[rows, tokens]`` from the offsets ``cu_seqlens``.

    The offsets count the tokens at ``indices``, or all tokens if ``indices`` is None.
    """
    total = rows * tokens
    token_T = torch.arange(total, device="cpu")
    if indices is not None:
        token_T = indices.detach().to("cpu", torch.int64)
        with_ends = [-1] + token_T.flatten().tolist() + [total]
        increases = all(left < right for left, right in pairwise(with_ends))
        if token_T.dim() != 1 or not increases:
            raise ValueError(
                f"indices of shape {tuple(token_T.shape)} must be [T] and increase "
                f"from 0 or more to at most {total - 1}: the places of the tokens that "
                "are not padding, in the flattened rows (megatron_gdn.unpad_data makes "
                "them of a mask)."
            )
    documents = Documents.from_cu_seqlens(cu_seqlens, len(token_T), device="cpu")
    id_T = documents.document_T() + 1
    row_T = token_T // tokens
    same_document = id_T[1:] == id_T[:-1]
    other_row = row_T[1:] != row_T[:-1]
    if bool((same_document & other_row).any()):
        raise ValueError(
            f"cu_seq_lens_q={list(documents.offsets)[:20]} has a document that goes on "
            f"from one row of {tokens} tokens into the next; each of {rows} rows must "
            "start a document."
        )
    ids = torch.zeros(total, dtype=torch.int64, device="cpu")
    ids[token_T] = id_T
    return ids.view(rows, tokens)


def _ids_from_positions(
    positions: Tensor, keep: Tensor | None, rows: int, tokens: int
) -> Tensor | None:
    """Document ids ``[rows, tokens]`` from ``positions`` ``[rows or 1, tokens]``; None if
    each row is one document.

    A token whose position is not the previous token's plus 1 starts a document. Tokens
    with 0 in ``keep`` ``[rows, tokens]`` are padding, and not read.
    """
    if positions.shape[0] == 1:
        positions = positions.expand(rows, -1)
    position_BS = copy_to_host("position_ids", positions, rows, tokens).long()
    if keep is None:
        keep_BS = torch.ones_like(position_BS, dtype=torch.bool)
    else:
        keep_BS = keep != 0
    row_T, column_T = keep_BS.nonzero(as_tuple=True)
    position_T = position_BS[row_T, column_T]
    other_row = row_T[1:] != row_T[:-1]
    jumps = position_T[1:] != position_T[:-1] + 1
    starts_T = torch.ones_like(row_T, dtype=torch.bool)
    starts_T[1:] = other_row | jumps
    rows_with_tokens = int(keep_BS.any(-1).sum())
    if int(starts_T.sum()) == rows_with_tokens:
        return None
    ids = torch.zeros_like(position_BS)
    ids[row_T, column_T] = starts_T.cumsum(0)
    return ids


def _ids_from_softmax_mask(
    mask: Tensor, padding: Tensor | None, rows: int, tokens: int
) -> Tensor | None:
    """Document ids from ``mask`` ``[B, 1, S, S]`` of softmax attention; None if the mask
    does not separate documents.

    A causal or a sliding-window mask, for example, has no boundaries. Token t starts a
    document if the tokens t, t + 1, ... attend to no token before t. If a batch row has
    two or more documents, the mask must be block-causal, else a ValueError is raised.
    The same holds if ``padding`` is None and the mask has padding before a token. The
    mask is not read at tokens where ``padding`` ``[B, S]`` is 0. Columns after the S-th
    are of a cache.
    """
    if mask.is_floating_point():
        sees = mask > _EXCLUDED_SCORE
    else:
        sees = mask != 0
    sees = sees.any(1)[..., :tokens].cpu()
    if sees.shape[0] not in (1, rows) or sees.shape[1:] != (tokens, tokens):
        raise ValueError(
            f"a 4-D attention_mask of shape {tuple(mask.shape)} does not fit {rows} "
            f"rows of {tokens} tokens; it must be [{rows}, 1, {tokens}, {tokens}]."
        )
    sees = sees.expand(rows, -1, -1)
    if padding is not None:
        keep_BS = padding != 0
        sees = sees & keep_BS[:, :, None] & keep_BS[:, None]
    column = torch.arange(tokens, device="cpu")
    keep_BS = sees.diagonal(dim1=-2, dim2=-1)
    first_seen_BS = torch.where(sees.any(-1), sees.int().argmax(-1), tokens)
    # the first token that this or a later token attends to
    first_seen_from_here_BS = first_seen_BS.flip(-1).cummin(-1).values.flip(-1)
    starts_BS = (first_seen_from_here_BS >= column) & keep_BS
    padding_before_tokens = keep_BS[:, 1:] & ~keep_BS[:, :-1]
    gives_padding = padding is None and bool(padding_before_tokens.any())
    if int(starts_BS.sum(-1).max()) < 2 and not gives_padding:
        return None
    return _ids_from_block_causal_mask(sees[:, None], rows, tokens)


def _ids_from_block_causal_mask(mask: Tensor, rows: int, tokens: int) -> Tensor:
    """Document ids from a block-causal mask ``[B, 1, S, S]``: a token attends to the
    tokens of its document up to itself. A token that does not attend to itself is
    padding. Any other mask raises a ValueError."""
    if mask.shape[0] not in (1, rows) or mask.shape[1:] != (1, tokens, tokens):
        raise ValueError(
            f"a 4-D attention_mask of shape {tuple(mask.shape)} does not fit {rows} "
            f"rows of {tokens} tokens; it must be [{rows}, 1, {tokens}, {tokens}]."
        )
    sees = mask != 0
    if mask.is_floating_point():
        sees = mask == 0
        if not bool((sees | (mask <= _EXCLUDED_SCORE)).all()):
            raise ValueError(
                f"a 4-D attention_mask of {mask.dtype} is added to scores: it holds 0 "
                f"where a token sees another, and {_EXCLUDED_SCORE:g} or less where not; "
                f"this one has {mask[~sees & (mask > _EXCLUDED_SCORE)][0].item()}. Pass a "
                "bool mask, True where a token sees another."
            )
    sees = sees[:, 0].expand(rows, -1, -1)
    keep_BS = sees.diagonal(dim1=-2, dim2=-1)
    column = torch.arange(tokens, device=mask.device)
    # A document's first token sees no earlier token.
    is_first_BS = (sees.int().argmax(-1) == column) & keep_BS
    ids = is_first_BS.cumsum(-1) * keep_BS
    same_document = ids[:, :, None] == ids[:, None]
    block_causal = same_document & (column[:, None] >= column)
    differs_BS = (sees != block_causal).any(-1)
    padding_is_seen_BS = sees.any(-2)
    wrong = torch.where(keep_BS, differs_BS, padding_is_seen_BS).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the 4-D attention_mask is not block-causal: token {token} of row {row} "
            "does not see exactly its document's tokens up to itself. The mask may be "
            "inverted. Give True where a token sees another (0 if added to scores), "
            "nothing at padding, or use _packed_seq_ids."
        )
    return ids.cpu()

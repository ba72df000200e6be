"""4-D attention masks: the documents that they keep apart, and the form that attention reads.

    bool     True where a token sees another
    integer  1 there, and 0 elsewhere
    float    added to scores: 0 there, and a very negative number elsewhere

Legend: B batch, S tokens of a row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .families import TextModel

_EXCLUDED = -1e4  # this, or less, added to a score makes its attention weight 0


def document_ids_of_block_mask(mask: Tensor, rows: int, tokens: int) -> Tensor:
    """int64 ``[B, S]`` on the host, of a mask ``[B, 1, S, S]``: documents counted along each row.

    A token that no token sees is padding, 0.

    Raises:
        ValueError: another shape or pattern, or numbers that are none of the three forms.
    """
    if mask.shape[0] not in (1, rows) or mask.shape[1:] != (1, tokens, tokens):
        raise ValueError(
            f"a 4-D attention_mask of shape {tuple(mask.shape)} does not fit {rows} rows of "
            f"{tokens} tokens; it must be [{rows}, 1, {tokens}, {tokens}]."
        )
    sees = _sees(mask)[:, 0].expand(rows, -1, -1)
    keep_BS = sees.diagonal(dim1=-2, dim2=-1)
    wrong = (sees.any(-2) & ~keep_BS).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the 4-D attention_mask lets another token see token {token} of row {row}, which does "
            f"not see itself. True (0 in a mask that is added to scores) is where a token sees "
            f"another: is the mask inverted? Nothing sees padding."
        )
    start_BS = sees.int().argmax(-1).masked_fill(~keep_BS, 0)  # the first token that each sees
    column = torch.arange(tokens, device=mask.device)
    block = (column >= start_BS[..., None]) & (column <= column[:, None])
    whole_BS = (start_BS.gather(-1, start_BS) == start_BS) & (start_BS.cummax(-1)[0] == start_BS)
    wrong = (((sees != block).any(-1) | ~whole_BS) & keep_BS).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        raise ValueError(
            f"the 4-D attention_mask is not block-causal: token {token} of row {row} does not see "
            f"exactly the tokens from its document's first up to itself. A recurrence sees a "
            f"document from its start; give such a mask, or name the documents by _packed_seq_ids."
        )
    first_BS = (start_BS == column) & keep_BS
    return (first_BS.cumsum(-1) * keep_BS).cpu()


def _sees(mask: Tensor) -> Tensor:
    """Where a token sees another: True, 1, or 0 in a float mask, which is added to scores.

    Raises:
        ValueError: a float mask with values other than 0 and very negative ones, such as a mask
            of ones and zeros; an integer mask with values other than 0 and 1.
    """
    if mask.dtype == torch.bool:
        return mask
    added = mask.is_floating_point()
    legal = (mask == 0) | (mask <= _EXCLUDED if added else mask == 1)
    if not bool(legal.all()):
        what = (
            f"is added to scores: it holds 0 where a token sees another, and {_EXCLUDED:g} or less "
            f"where not"
            if added
            else "holds 1 where a token sees another, and 0 where not"
        )
        raise ValueError(
            f"a 4-D attention_mask of {mask.dtype} {what}; this one has {mask[~legal][0].item()}. "
            f"Pass a bool mask, True where a token sees another."
        )
    return mask == 0 if added else mask != 0


def as_attention_reads(text: TextModel, mask: Any) -> Any:
    """A 4-D mask of bools or integers in the form that the text model's attention reads.

    Eager and flex attention of transformers add a mask to the scores, where True would be + 1.
    Other masks are returned as they are; a dict is converted mask by mask.
    """
    if isinstance(mask, dict):
        return {name: as_attention_reads(text, one) for name, one in mask.items()}
    if not isinstance(mask, Tensor) or mask.dim() != 4 or mask.is_floating_point():
        return mask
    implementation, sees = text.config._attn_implementation, mask != 0
    if implementation == "sdpa":
        return sees
    if implementation not in ("eager", "flex_attention"):
        return mask
    dtype = text.get_input_embeddings().weight.dtype
    excluded = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
    return excluded.masked_fill(~sees, torch.finfo(dtype).min)

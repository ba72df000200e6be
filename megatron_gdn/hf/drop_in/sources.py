"""Document boundaries, in any form that a trainer gives, as one table of document ids.

| source                                        | who gives it                                    |
|-----------------------------------------------|-------------------------------------------------|
| ``attention_mask`` ``[B, S]`` with ids > 1    | indexed masks of collators                      |
| ``_packed_seq_ids`` ``[B, S]``                | indexed masks beside a 4-D attention mask       |
| ``attention_mask`` ``[B, 1, S, S]``           | block-causal masks                              |
| ``cu_seq_lens_q`` ``[N + 1]``                 | flash-attention kwargs, padding-free collators  |
| ``cu_seqlens`` with ``indices`` ``[T]``       | flash-attention kwargs without padding tokens   |
| ``position_ids`` ``[B, S]`` that start again  | TRL, veRL, transformers' flattening collator    |

Ids count documents from 1 along each row; 0 is padding. The table lies on the host. A 4-D mask is 1
or True where a token sees another token. A float mask is added to scores: 0 where a token sees.

Legend: B batch, S tokens of a row, s a rank's share of it, N documents, T tokens without padding.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from ...context_parallel import SequenceLayout, inverse
from ...ops.documents import Documents

_BLOCKS = "attention_mask (4-D)"
_EXCLUDED = -1e4  # at most this number, added to a score, makes an attention weight 0


class Sources(NamedTuple):
    """The arguments of one forward that may name documents, and where a rank's tokens lie."""

    attention_mask: Tensor | None = None
    packed_seq_ids: Tensor | None = None
    cu_seqlens: Tensor | None = None  # offsets of documents; with indices, of the tokens there
    position_ids: Tensor | None = None
    indices: Tensor | None = None  # of tokens in the flattened [B * S]; all others are padding
    seq_index: Tensor | None = None

    @classmethod
    def from_keywords(cls, mask: Tensor | None, given: dict[str, Any]) -> Sources:
        """Read a forward's keywords; remove from ``given`` those that transformers lacks."""
        names = ("_packed_seq_ids", "cu_seqlens", "indices", "seq_index")
        ids, offsets, indices, seq_index = (given.pop(name, None) for name in names)
        same = given.get("cu_seq_lens_q")
        if offsets is not None and same is not None and offsets.tolist() != same.tolist():
            raise ValueError(
                f"cu_seqlens={offsets.tolist()[:8]} and cu_seq_lens_q={same.tolist()[:8]} differ; "
                f"they are two names of one thing, the offsets. Give one of them."
            )
        offsets = same if offsets is None else offsets
        return cls(mask, ids, offsets, given.get("position_ids"), indices, seq_index)


def is_indexed_packed_mask(mask: object) -> TypeGuard[Tensor]:
    """Whether a mask ``[B, S]`` holds document ids: a value is above 1. Waits for the device."""
    if not isinstance(mask, Tensor) or mask.dtype == torch.bool or mask.dim() != 2:
        return False
    return bool((mask > 1).any())


def text_positions(position_ids: Tensor | None) -> Tensor | None:
    """Text positions ``[B or 1, S]``: the first table of ``[4, B, S]``; None for ``[3, B, S]``."""
    if position_ids is None or position_ids.dim() == 2:
        return position_ids
    return position_ids[0] if position_ids.dim() == 3 and position_ids.shape[0] == 4 else None


def starts_of(ids_BS: Tensor) -> Tensor:
    """bool ``[B, S]``: True where a document or a run of padding begins."""
    starts = torch.ones_like(ids_BS, dtype=torch.bool)
    starts[:, 1:] = ids_BS[:, 1:] != ids_BS[:, :-1]
    return starts


def document_ids(sources: Sources, rows: int, tokens: int) -> Tensor | None:
    """Document ids, int64 ``[B, S]`` on the host; None when every row is one sequence.

    If the other sources name no documents, ``position_ids`` are read: a token whose position is
    not the previous token's plus 1 starts a document (as in transformers' attention masks). Tokens
    with 0 in a 0/1 ``attention_mask`` are padding, whatever the source.
    """
    mask, packed_seq_ids, cu_seqlens, position_ids, indices, _ = sources
    found: dict[str, Tensor] = {}
    if mask is not None and mask.dim() not in (2, 4):
        raise ValueError(
            f"attention_mask has shape {tuple(mask.shape)}; it must be [{rows}, {tokens}] or "
            f"[{rows}, 1, {tokens}, {tokens}]."
        )
    if mask is not None and mask.dim() == 4:
        found[_BLOCKS] = _ids_from_block_mask(mask, rows, tokens)
    elif is_indexed_packed_mask(mask):
        found["attention_mask"] = _to_host("attention_mask", mask, rows, tokens).long()
    if packed_seq_ids is not None:
        ids = _to_host("_packed_seq_ids", packed_seq_ids, rows, tokens)
        found["_packed_seq_ids"] = ids.long()
    if cu_seqlens is not None:
        found["cu_seq_lens_q"] = _ids_from_offsets(cu_seqlens, indices, rows, tokens)
    elif indices is not None:
        raise ValueError(
            f"indices of {indices.numel()} tokens without cu_seqlens, the offsets of documents "
            f"among these tokens. Give both, or the ids of documents as attention_mask."
        )
    # Positions are read beside a 4-D mask of whole rows too: conv and rule follow positions.
    unnamed = set(found) <= {_BLOCKS} and all(bool((ids <= 1).all()) for ids in found.values())
    positions = text_positions(position_ids)
    if unnamed and positions is not None:
        ids = _document_ids_from_positions(positions, found.get(_BLOCKS, mask), rows, tokens)
        found |= {} if ids is None else {"position_ids": ids}
    if not found:
        return None
    (first, ids), *others = found.items()
    for name, theirs in others:
        if not torch.equal(_renumber(ids), _renumber(theirs)):
            raise ValueError(
                f"{first} and {name} put the boundaries of documents in different places: "
                f"{_describe_documents(ids)} and {_describe_documents(theirs)}. Give one of them, "
                f"or make them agree."
            )
    if mask is not None and mask.dim() == 2 and "attention_mask" not in found:
        padding_BS = _to_host("attention_mask", mask, rows, tokens) == 0
        if indices is not None and not torch.equal(padding_BS, ids == 0):
            raise ValueError(
                f"the attention_mask keeps {int((~padding_BS).sum())} tokens, which are not the "
                f"{int((ids > 0).sum())} of indices. Give one of them, or make them agree."
            )
        ids = ids.masked_fill(padding_BS, 0)
    if "attention_mask" in found or bool((ids == 0).any()):
        return ids  # some tokens are padding, or the mask numbers documents
    return ids if bool((ids.amax(-1) != ids.amin(-1)).any()) else None


def _renumber(ids_BS: Tensor) -> Tensor:
    """Renumber ids to 1, 2, ... along each row; padding stays 0."""
    return (starts_of(ids_BS) & (ids_BS > 0)).cumsum(-1) * (ids_BS > 0)


def _describe_documents(ids_BS: Tensor) -> str:
    lengths = _renumber(ids_BS)[0].bincount()[1:].tolist()
    return f"row 0 has documents of {lengths[:8]}{' ...' if len(lengths) > 8 else ''} tokens"


def _to_host(name: str, x: Tensor, rows: int, tokens: int) -> Tensor:
    if x.shape != (rows, tokens):
        raise ValueError(
            f"{name} has shape {tuple(x.shape)}, the hidden states have {rows} rows of {tokens} "
            f"tokens; it must be [{rows}, {tokens}]."
        )
    return x.detach().cpu()


def _ids_from_offsets(cu_seqlens: Tensor, indices: Tensor | None, rows: int, tokens: int) -> Tensor:
    slots = rows * tokens
    token_T = torch.arange(slots, device="cpu")
    if indices is not None:
        token_T = indices.detach().to("cpu", torch.int64)
        ends = [-1, *token_T.flatten().tolist(), slots]
        if token_T.dim() != 1 or any(b <= a for a, b in zip(ends, ends[1:], strict=False)):
            raise ValueError(
                f"indices of shape {tuple(token_T.shape)} must be [T] and increase from 0 or more "
                f"to at most {slots - 1}: the places of the tokens that are not padding, in the "
                f"flattened rows (megatron_gdn.unpad_data makes them of a mask)."
            )
    documents = Documents.from_cu_seqlens(cu_seqlens, len(token_T), device="cpu")
    length_N = torch.tensor(documents.lengths, device="cpu")
    id_T = length_N.gt(0).cumsum(0).repeat_interleave(length_N)
    row_T = token_T // tokens if tokens else token_T
    if bool(((id_T[1:] == id_T[:-1]) & (row_T[1:] != row_T[:-1])).any()):
        raise ValueError(
            f"cu_seq_lens_q={list(documents.offsets)[:20]} has a document that goes on from one "
            f"row of {tokens} tokens into the next; each of {rows} rows must start a document."
        )
    ids = torch.zeros(slots, dtype=torch.int64, device="cpu")
    ids[token_T] = id_T
    return ids.view(rows, tokens)


def _document_ids_from_positions(
    positions: Tensor, keep: Tensor | None, rows: int, tokens: int
) -> Tensor | None:
    """Start a document at each jump of positions; None if each row is one sequence."""
    if positions.shape[0] == 1:
        positions = positions.expand(rows, -1)
    position_BS = _to_host("position_ids", positions, rows, tokens).long()
    keep_BS = torch.ones_like(position_BS, dtype=torch.bool)
    if keep is not None:
        keep_BS = _to_host("attention_mask", keep, rows, tokens) != 0
    row_T, column_T = keep_BS.nonzero(as_tuple=True)
    position_T = position_BS[row_T, column_T]
    starts = torch.ones_like(row_T, dtype=torch.bool)
    starts[1:] = (row_T[1:] != row_T[:-1]) | (position_T[1:] != position_T[:-1] + 1)
    if int(starts.sum()) == int(keep_BS.any(-1).sum()):
        return None
    ids = torch.zeros_like(position_BS)
    ids[row_T, column_T] = starts.cumsum(0)
    return ids


def _ids_from_block_mask(mask: Tensor, rows: int, tokens: int) -> Tensor:
    """Ids from a mask ``[B, 1, S, S]``; a token that no token sees is padding, with id 0."""
    if mask.shape[0] not in (1, rows) or mask.shape[1:] != (1, tokens, tokens):
        raise ValueError(
            f"a 4-D attention_mask of shape {tuple(mask.shape)} does not fit {rows} rows of "
            f"{tokens} tokens; it must be [{rows}, 1, {tokens}, {tokens}]."
        )
    sees = mask != 0
    if mask.is_floating_point():
        sees = mask == 0
        if not bool((sees | (mask <= _EXCLUDED)).all()):
            raise ValueError(
                f"a 4-D attention_mask of {mask.dtype} is added to scores: it holds 0 where a "
                f"token sees another, and {_EXCLUDED:g} or less where not; this one has "
                f"{mask[~sees & (mask > _EXCLUDED)][0].item()}. Pass a bool mask, True where a "
                f"token sees another."
            )
    sees = sees[:, 0].expand(rows, -1, -1)
    keep_BS = sees.diagonal(dim1=-2, dim2=-1)
    token = torch.arange(tokens, device=mask.device)
    # The first token that a document's first token sees is itself.
    first_BS = (sees.int().argmax(-1) == token) & keep_BS
    ids = first_BS.cumsum(-1) * keep_BS
    expected = (ids[:, :, None] == ids[:, None]) & (token[:, None] >= token)
    wrong = torch.where(keep_BS, (sees != expected).any(-1), sees.any(-2)).nonzero()
    if len(wrong):
        row, token = wrong[0].tolist()
        what = "does not see exactly the tokens from its document's first up to itself"
        if not keep_BS[row, token]:
            what = "does not see itself, but another token sees it (is the mask inverted?)"
        raise ValueError(
            f"the 4-D attention_mask is not block-causal: token {token} of row {row} {what}. True "
            f"(0 in a mask that is added to scores) is where a token sees another, and nothing "
            f"sees padding. Give such a mask, or name the documents by _packed_seq_ids."
        )
    return ids.cpu()


class Ranks(NamedTuple):
    """The context-parallel ranks of one forward, each with inputs ``[B, s]``."""

    group: Any
    device: torch.device
    rows: int
    tokens: int

    @property
    def total(self) -> int:
        return self.tokens * self.group.size()

    def gather(self, own: Tensor) -> Tensor:
        """Gather all ranks' tensors, of one shape and dtype: ``[cp, ...]`` on the host."""
        own = own.to(self.device).contiguous()
        given = [torch.empty_like(own) for _ in range(self.group.size())]
        dist.all_gather(given, own, group=self.group)
        return torch.stack(given).cpu()

    def require_agreement(self, sources: Sources) -> None:
        """Raise on every rank if sizes, kinds of sources or offsets differ between ranks.

        Ranks differ if a data loader gives each process its own batches. The ranks compare ten
        numbers in one collective.
        """
        given = [0 if x is None else x.dim() for x in sources]
        given[2] = int(sources.cu_seqlens is not None)  # its shape is checked later
        offsets = b"" if sources.cu_seqlens is None else sources.cu_seqlens.numpy().tobytes()
        told = [self.rows, self.tokens, *given, len(offsets), zlib.crc32(offsets)]
        names = ["rows", "tokens", *(f"kinds of {name}" for name in Sources._fields)]
        names += ["numbers of offsets", "offsets"]
        all_cT = self.gather(torch.tensor(told, device="cpu"))
        if differ := [names[i] for i in (all_cT != all_cT[0]).any(0).nonzero().flatten().tolist()]:
            raise ValueError(
                f"the {self.group.size()} context-parallel ranks were given different "
                f"{', '.join(differ)}: they must have shares of one batch. Give all of them the "
                f"same batches (megatron_gdn.hf.ContextParallelTrainerMixin does in transformers' "
                f"Trainer) and cut each by context_parallel_share."
            )

    def in_sequence_order(
        self, sources: Sources, layout: SequenceLayout, positions: Tensor
    ) -> Sources:
        """Gather sources in sequence order; offsets describe the whole buffer on every rank."""
        mask, ids, offsets, given, *_ = sources
        shape, of_text = (self.rows, self.tokens), text_positions(given)
        if given is not None and of_text is None:
            raise ValueError(
                f"position_ids of shape {tuple(given.shape)} with context parallelism: a "
                f"vision-language model computes such positions from the tokens that it sees, here "
                f"only a share. Compute them from the whole sequence and give this rank's columns "
                f"as [4, {self.rows}, {self.tokens}], text positions first."
            )
        if offsets is not None:
            of_text = None
        elif of_text is not None and of_text.shape[0] == 1:
            of_text = of_text.expand(self.rows, -1)
        tables = {"attention_mask": mask, "_packed_seq_ids": ids, "position_ids": of_text}
        for name, x_Bs in tables.items():
            if x_Bs is None:
                continue
            if x_Bs.shape != shape:
                raise ValueError(
                    f"{name} has shape {tuple(x_Bs.shape)}; with context parallelism it must be "
                    f"this rank's: {list(shape)}."
                )
            if layout is SequenceLayout.ZIGZAG:
                raise ValueError(
                    f"cp_layout={layout.value!r} cuts every document by itself, so a rank's {name} "
                    f"cannot be put in order without the documents: give cu_seq_lens_q of the "
                    f"whole buffer, or cut the buffer as 'zigzag_buffer' or 'contiguous'."
                )
            all_BS = self.gather(x_Bs.long()).transpose(0, 1).flatten(1)
            tables[name] = all_BS[:, inverse(positions.flatten())]
        mask, ids, position_BS = tables.values()
        if position_BS is not None:
            before, after = position_BS[:, :-1], position_BS[:, 1:]
            wrong = ((after != before + 1) & (after != 0)).nonzero()
            if len(wrong):
                row, at = wrong[0].tolist()
                raise ValueError(
                    f"in sequence order position_ids go from {before[row, at]} to {after[row, at]} "
                    f"at token {at + 1} of row {row}: they neither go on nor start again at 0. "
                    f"Either they are not this rank's share of the sequence's positions, or the "
                    f"tokens were not cut as {layout.value!r}; give seq_index, or the cp_layout "
                    f"they were cut by."
                )
        return Sources(mask, ids, offsets, position_BS)

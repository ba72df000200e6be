"""Attention over packed documents on a GPU: torch's ``flex_attention`` with a mask of
blocks.

In a tree of documents, some documents continue another one, their parent. A token's
*place* is the index that the token would have in a buffer where all continuations of a
document directly follow the document. A key's *end* is the place after the last
continuation of the key's document. A query sees a key if

    place of the key  <=  place of the query  <  end of the key

Legend: S keys of the whole buffer, s queries of this rank, I blocks of queries, J
blocks of keys.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from ..ops.documents import Documents
from ..ops.host_tables import to_device
from ..ops.trees import TreeDocuments

BLOCK_SIZE = 128  # queries, and keys, of a block


class DocumentMask(NamedTuple):
    """The keys that each query of a micro-batch sees; all layers read the same
    tensors."""

    query_place_s: Tensor  # int32
    key_place_S: Tensor  # int32
    key_end_S: Tensor  # int32
    # the tensors of a `BlockMask`, from kv_num_blocks to full_q_indices
    block_tables: Any

    @classmethod
    @torch.inference_mode(False)  # autograd cannot save tensors of inference mode
    def of(cls, documents: Documents, query_positions_s: Tensor) -> DocumentMask:
        """The mask of the queries at ``query_positions_s`` (int64, on the host) over
        all keys."""
        places_on_host = _key_places_and_ends(documents)
        key_S = to_device(places_on_host[0], documents.device)
        end_S = to_device(places_on_host[1], documents.device)
        query_s = to_device(places_on_host[0][query_positions_s], documents.device)
        first_query_I, last_query_I = _block_min_max(query_s)
        first_key_J, last_key_J = _block_min_max(key_S)
        least_end_J, greatest_end_J = _block_min_max(end_S)
        # For a block of queries and a block of keys: some_IJ, whether some query may
        # see some key; all_IJ, whether every query sees every key.
        some_IJ = (first_key_J <= last_query_I[:, None]) & (
            first_query_I[:, None] < greatest_end_J
        )
        all_IJ = (last_key_J <= first_query_I[:, None]) & (
            last_query_I[:, None] < least_end_J
        )
        # The kernels check the ends of queries and keys only in blocks that are not in
        # ``all_IJ``. A whole block of queries never sees all of the last keys: only the
        # last token sees the last key.
        all_IJ[-1] &= len(query_s) % BLOCK_SIZE == 0
        block_mask = BlockMask.from_kv_blocks(
            *_list_blocks(some_IJ & ~all_IJ), *_list_blocks(all_IJ)
        )
        # `_compiled_attention` adds the lengths, the block sizes and the function.
        block_tables = block_mask.as_tuple()[2:10]
        return cls(query_s, key_S, end_S, block_tables)

    def sees(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query ``i`` sees key ``j``, in every ``batch`` row and ``head``.

        ``flex_attention`` calls this function with scalar tensors of indices.
        """
        place = self.query_place_s[i]
        return (self.key_place_S[j] <= place) & (place < self.key_end_S[j])


def attend(
    query_sBHD: Tensor,
    key_SBGD: Tensor,
    value_SBGD: Tensor,
    mask: DocumentMask,
    scale: float,
) -> Tensor:
    """The output ``[s, B, H, D]`` of attention under ``mask``; ``scale`` multiplies
    q . k before the softmax."""
    heads_first = (x.permute(1, 2, 0, 3) for x in (query_sBHD, key_SBGD, value_SBGD))
    scale_in_text = repr(scale)  # torch would trace a number as a symbol
    out_BHsD = _compiled_attention()(*heads_first, scale_in_text, *mask)
    return out_BHsD.permute(2, 0, 1, 3)


@cache
def _compiled_attention() -> Callable[..., Tensor]:
    """``flex_attention`` compiled once for micro-batches of all lengths.

    ``scale`` is a string, since torch would trace a number as a symbol, which the
    kernel refuses.
    """

    def attend_masked(
        query: Tensor, key: Tensor, value: Tensor, scale: str, *tables: Any
    ) -> Any:
        """Attention over the keys that the `DocumentMask` with the fields ``tables``
        allows.

        ``query`` is ``[B, H, s, D]``; ``key`` and ``value`` are ``[B, G, S, D]``.
        """
        mask = DocumentMask._make(tables)
        lengths = (query.shape[2], key.shape[2])
        block_sizes = (BLOCK_SIZE, BLOCK_SIZE)
        block_mask: Any = (lengths, *mask.block_tables, block_sizes, mask.sees)
        return flex_attention(
            query,
            key,
            value,
            block_mask=BlockMask(*block_mask),
            scale=float(scale),
            enable_gqa=query.shape[1] != key.shape[1],
        )

    return torch.compile(attend_masked, dynamic=True, fullgraph=True)


def _key_places_and_ends(documents: Documents) -> tuple[Tensor, Tensor]:
    """``key_place_S`` and ``key_end_S`` of :class:`DocumentMask`: int32 ``[S]`` each,
    on the host.

    A query sees a key if the query's place is at least the key's place and below the
    key's end. The module's docstring defines both.
    """
    # a slot is a document with its padding
    slots = documents.lengths
    lengths = documents.lengths
    parents = (-1,) * len(documents.lengths)
    if isinstance(documents, TreeDocuments):
        lengths = documents.lengths_without_padding
        parents = documents.parents
    # tokens of each slot and of all its continuations; a parent is before its children
    subtrees = list(slots)
    for index, parent in reversed(list(enumerate(parents))):
        if parent >= 0:
            subtrees[parent] += subtrees[index]
    # the place of each document's first token
    starts = []
    # the place where the next continuation of a document starts; -1: the next document
    # without a parent
    next_starts = {-1: 0}
    for index, parent in enumerate(parents):
        start = next_starts[parent]
        starts.append(start)
        next_starts[index] = start + slots[index]
        next_starts[parent] = start + subtrees[index]
    numbers = torch.tensor(
        [starts, documents.offsets[:-1], lengths, slots, subtrees],
        dtype=torch.int64,
        device="cpu",
    )
    # each document's five numbers at each of its tokens, [S]
    start_S, offset_S, length_S, slot_S, subtree_S = numbers.repeat_interleave(
        numbers[3], dim=1
    )
    position_S = torch.arange(documents.total_tokens, device="cpu") - offset_S
    # No document continues padding, so only later padding in the same slot sees a key
    # that is padding.
    end_S = start_S + torch.where(position_S < length_S, subtree_S, slot_S)
    return (start_S + position_S).int(), end_S.int()


def _block_min_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of ``x`` in every block of tokens, ``[blocks]``
    each."""
    tokens = -(-len(x) // BLOCK_SIZE) * BLOCK_SIZE
    # the last token fills the last block
    token = torch.arange(tokens, device=x.device).clamp(max=len(x) - 1)
    return x[token].view(-1, BLOCK_SIZE).aminmax(dim=1)


def _list_blocks(dense_IJ: Tensor) -> tuple[Tensor, Tensor]:
    """The blocks of keys for each block of queries, as `BlockMask` takes them.

    ``dense_IJ`` is bool. The results are int32: the number of True in each row
    ``[1, 1, I]``, and the row's column numbers, those with True first,
    ``[1, 1, I, J]``.
    """
    order_IJ = dense_IJ.int().argsort(dim=1, descending=True, stable=True)
    return dense_IJ.sum(1, dtype=torch.int32)[None, None], order_IJ.int()[None, None]

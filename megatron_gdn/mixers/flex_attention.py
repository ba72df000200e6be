"""Attention over packed documents on a GPU: torch's ``flex_attention`` with a mask of
blocks.

A token's place is the index that the token would have if each document were followed
directly by its continuations. A key's end is the place after the last continuation of
its document. A query sees a key if

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

BLOCK = 128


class Mask(NamedTuple):
    """The keys that each query of a micro-batch sees; all layers read the same
    tensors."""

    query_s: Tensor  # int32, the place of each query
    key_S: Tensor  # int32, the place of each key
    end_S: Tensor  # int32, the end of each key
    blocks: Any  # tensors of a `BlockMask`, from kv_num_blocks to full_q_indices

    @classmethod
    @torch.inference_mode(False)  # autograd cannot save tensors of inference mode
    def of(cls, documents: Documents, query_positions_s: Tensor) -> Mask:
        """The mask of the queries at ``query_positions_s`` (int64, on the host) over
        all keys."""
        key, end = _key_places(documents)
        places = (key[query_positions_s], key, end)
        query, key, end = (to_device(x, documents.device) for x in places)
        (first_I, last_I), (first_J, last_J), (least_J, most_J) = map(
            _block_min_max, (query, key, end)
        )
        some_IJ = (first_J <= last_I[:, None]) & (first_I[:, None] < most_J)
        all_IJ = (last_J <= first_I[:, None]) & (last_I[:, None] < least_J)
        # The kernels check the sequence's end only in blocks that are not in
        # ``all_IJ``.
        all_IJ[-1] &= len(query) % BLOCK == 0
        all_IJ[:, -1] &= len(key) % BLOCK == 0
        block_mask = BlockMask.from_kv_blocks(
            *_list_blocks(some_IJ & ~all_IJ), *_list_blocks(all_IJ)
        )
        return cls(query, key, end, block_mask.as_tuple()[2:10])

    def sees(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Whether query ``i`` sees key ``j``; ``batch`` and ``head`` (indices) do not
        matter."""
        place = self.query_s[i]
        return (self.key_S[j] <= place) & (place < self.end_S[j])


def attend(
    query_sBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, mask: Mask, scale: float
) -> Tensor:
    """The output ``[s, B, H, D]`` of attention under ``mask``, with the softmax's
    ``scale``."""
    heads_first = (x.permute(1, 2, 0, 3) for x in (query_sBHD, key_SBGD, value_SBGD))
    return _compiled_attention()(*heads_first, repr(scale), *mask).permute(2, 0, 1, 3)


@cache
def _compiled_attention() -> Callable[..., Tensor]:
    """``flex_attention`` compiled once for micro-batches of all lengths.

    ``scale`` is a string, since torch would trace a number as a symbol, which the
    kernel refuses.
    """

    def attend_masked(
        query: Tensor, key: Tensor, value: Tensor, scale: str, *tables: Any
    ) -> Any:
        """Attention over the tokens that the mask of ``tables`` allows."""
        mask = Mask._make(tables)
        lengths = (query.shape[2], key.shape[2])
        parts: Any = (lengths, *mask.blocks, (BLOCK, BLOCK), mask.sees)
        options: Any = {
            "scale": float(scale),
            "enable_gqa": query.shape[1] != key.shape[1],
        }
        return flex_attention(
            query, key, value, block_mask=BlockMask(*parts), **options
        )

    return torch.compile(attend_masked, dynamic=True, fullgraph=True)


def _key_places(documents: Documents) -> tuple[Tensor, Tensor]:
    """The place of each key and the end of each key, as the module defines them: int32
    ``[S]``."""
    slots = documents.lengths
    lengths = documents.lengths
    parents = (-1,) * len(documents.lengths)
    if isinstance(documents, TreeDocuments):
        lengths = documents.lengths_without_padding
        parents = documents.parents
    whole = list(slots)  # rows of each document and of all its continuations
    for i, parent in reversed(list(enumerate(parents))):
        if parent >= 0:
            whole[parent] += whole[i]
    # free: the place where a document's next continuation starts
    starts = []
    free = {-1: 0}
    for i, parent in enumerate(parents):
        starts.append(free[parent])
        free[i], free[parent] = free[parent] + slots[i], free[parent] + whole[i]
    table = torch.tensor(
        [starts, documents.offsets[:-1], lengths, slots, whole], device="cpu"
    )
    start, offset, length, slot, tree = table.repeat_interleave(table[3], dim=1)
    position = torch.arange(documents.total_tokens, device="cpu") - offset
    # No document continues padding, so only later padding in its slot sees a key of
    # padding.
    end = start + torch.where(position < length, tree, slot)
    return (start + position).int(), end.int()


def _block_min_max(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of ``x`` in every block of tokens, ``[blocks]``
    each."""
    token = torch.arange(-(-len(x) // BLOCK) * BLOCK, device=x.device).clamp(
        max=len(x) - 1
    )
    return x[token].view(-1, BLOCK).aminmax(dim=1)


def _list_blocks(dense_IJ: Tensor) -> tuple[Tensor, Tensor]:
    """Per row of bool ``dense_IJ``: the number of True, and its columns, those of True
    first."""
    order_IJ = dense_IJ.int().argsort(dim=1, descending=True, stable=True)
    return dense_IJ.sum(1, dtype=torch.int32)[None, None], order_IJ.int()[None, None]

"""Attention over packed documents on a GPU: torch's ``flex_attention`` with a mask of blocks.

The mask counts places as if all that continues a document followed it directly. A query sees a key
from the key's place on, to where the documents end that continue the key's:

    place of the key  <=  place of the query  <  end of the key

Legend: S keys of the whole buffer, s queries of this rank, I blocks of queries, J blocks of keys.
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
    """Which keys the queries of a micro-batch see; every layer reads the same tensors."""

    query_s: Tensor  # int32, places
    key_S: Tensor  # int32, places
    end_S: Tensor  # int32
    blocks: Any  # tensors of a `BlockMask`, from kv_num_blocks to full_q_indices

    @classmethod
    @torch.inference_mode(False)  # a later backward reads it
    def of(cls, documents: Documents, rows_s: Tensor) -> Mask:
        """Of the queries in these rows (int64 on the host), over all keys of the buffer."""
        on_host = _places(documents)
        query, key, end = (to_device(x, documents.device) for x in (on_host[0][rows_s], *on_host))
        (first_I, last_I), (first_J, last_J), (least_J, most_J) = map(_bounds, (query, key, end))
        some_IJ = (first_J <= last_I[:, None]) & (first_I[:, None] < most_J)
        all_IJ = (last_J <= first_I[:, None]) & (last_I[:, None] < least_J)
        # The kernels look for the end of the sequence in blocks that they mask token by token.
        all_IJ[-1] &= len(query) % BLOCK == 0
        all_IJ[:, -1] &= len(key) % BLOCK == 0
        made = BlockMask.from_kv_blocks(*_listed(some_IJ & ~all_IJ), *_listed(all_IJ))
        return cls(query, key, end, made.as_tuple()[2:10])

    def sees(self, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        place = self.query_s[i]
        return (self.key_S[j] <= place) & (place < self.end_S[j])


def attend(
    query_sBHD: Tensor, key_SBGD: Tensor, value_SBGD: Tensor, mask: Mask, scale: float
) -> Tensor:
    """The output ``[s, B, H, D]``; keys and values have G heads."""
    heads_first = (x.permute(1, 2, 0, 3) for x in (query_sBHD, key_SBGD, value_SBGD))
    return _compiled()(*heads_first, repr(scale), *mask).permute(2, 0, 1, 3)


@cache
def _compiled() -> Callable[..., Tensor]:
    """For micro-batches of all lengths: sizes come from tensors alone. ``scale`` is a text, since
    torch would make a symbol of a number, which the template of the kernel does not take."""

    def masked(query: Tensor, key: Tensor, value: Tensor, scale: str, *tables: Any) -> Any:
        mask, lengths = Mask(*tables), (query.shape[2], key.shape[2])
        parts: Any = (lengths, *mask.blocks, (BLOCK, BLOCK), mask.sees)
        options: Any = {"scale": float(scale), "enable_gqa": query.shape[1] != key.shape[1]}
        return flex_attention(query, key, value, block_mask=BlockMask(*parts), **options)

    return torch.compile(masked, dynamic=True, fullgraph=True)


def _places(documents: Documents) -> tuple[Tensor, Tensor]:
    """Of all keys, place and end; int32 ``[S]`` on the host."""
    slots, lengths, parents = documents.lengths, documents.lengths, (-1,) * len(documents.lengths)
    if isinstance(documents, TreeDocuments):
        lengths, parents = documents.lengths_without_padding, documents.parents
    whole = [*slots]  # of each document with all that continue it
    for i, parent in reversed([*enumerate(parents)]):
        if parent >= 0:
            whole[parent] += whole[i]
    starts, free = [], {-1: 0}  # free: where the next document that continues this one starts
    for i, parent in enumerate(parents):
        starts.append(free[parent])
        free[i], free[parent] = free[parent] + slots[i], free[parent] + whole[i]
    table = torch.tensor([starts, documents.offsets[:-1], lengths, slots, whole], device="cpu")
    start, offset, length, slot, tree = table.repeat_interleave(table[3], dim=1)
    position = torch.arange(documents.total_tokens, device="cpu") - offset
    # No document continues padding: only the rows behind it in its own slot see it.
    end = start + torch.where(position < length, tree, slot)
    return (start + position).int(), end.int()


def _bounds(x: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest of every block of tokens."""
    token = torch.arange(-(-len(x) // BLOCK) * BLOCK, device=x.device).clamp(max=len(x) - 1)
    return x[token].view(-1, BLOCK).aminmax(dim=1)


def _listed(dense_IJ: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of queries has, and a list that begins with these."""
    order_IJ = dense_IJ.int().argsort(dim=1, descending=True, stable=True)
    return dense_IJ.sum(1, dtype=torch.int32)[None, None], order_IJ.int()[None, None]

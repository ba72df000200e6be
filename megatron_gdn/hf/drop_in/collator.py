"""Batches of packed documents for these models, and each context-parallel rank's share of them.

Legend: N documents, S tokens of the packed row, s one rank's share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...context_parallel import SequenceLayout, local_indices

IGNORED = -100


class PackingCollator:
    """Lays documents end to end in one row: ``collator([{"input_ids": [...]}, ...]) -> batch``.

    The batch has ``input_ids``, ``position_ids`` (from 0 in every document), ``labels``,
    ``shift_labels`` (what the token at each position is to predict; nothing across documents) and
    ``cu_seq_lens_q`` = ``cu_seq_lens_k``, ``max_length_q`` = ``max_length_k``. transformers' models
    take ``shift_labels`` with ``labels``; their loss then shifts nothing itself, which a share of a
    sequence could not.

    Args:
        pad_to_multiple_of: the row is filled up to a multiple of it, by a document of
            ``pad_token_id`` whose labels are ignored. ``2 * cp`` for context parallelism.
        pad_token_id: what padding holds.

    Raises:
        ValueError: no documents, or labels of another length than their document.
    """

    def __init__(self, pad_to_multiple_of: int = 1, pad_token_id: int = 0) -> None:
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of={pad_to_multiple_of} must be at least 1.")
        self.multiple, self.pad = pad_to_multiple_of, pad_token_id

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not documents:
            raise ValueError("there are no documents to pack.")
        rows = [_list(document["input_ids"]) for document in documents]
        labels = [
            _list(document.get("labels", row))
            for document, row in zip(documents, rows, strict=True)
        ]
        for number, (row, wanted) in enumerate(zip(rows, labels, strict=True)):
            if len(row) != len(wanted):
                raise ValueError(
                    f"document {number} has {len(row)} input_ids and {len(wanted)} labels; there "
                    f"must be one label per token."
                )
        gap = -sum(map(len, rows)) % self.multiple
        if gap:
            rows.append([self.pad] * gap)
            labels.append([IGNORED] * gap)
        lengths = [len(row) for row in rows]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        longest = max(lengths)
        return {
            "input_ids": torch.tensor(sum(rows, []))[None],
            "labels": torch.tensor(sum(labels, []))[None],
            "shift_labels": torch.tensor(
                [token for row in labels for token in [*row[1:], *([IGNORED] if row else [])]]
            )[None],
            "position_ids": torch.cat([torch.arange(length) for length in lengths])[None],
            "cu_seq_lens_q": offsets,
            "cu_seq_lens_k": offsets,
            "max_length_q": longest,
            "max_length_k": longest,
        }


def context_parallel_share(
    batch: Mapping[str, Any],
    cp_mesh: Any,
    layout: str | SequenceLayout = SequenceLayout.ZIGZAG_BUFFER,
) -> dict[str, Any]:
    """This rank's share of a packed batch: the columns of every ``[1, S]`` tensor that it holds.

    Offsets stay those of the whole row, which a patched model asks for.

    Args:
        batch: as :class:`PackingCollator` makes it, the same on all ranks.
        cp_mesh, layout: as given to :func:`.patching.patch`.

    Raises:
        ValueError: tokens that the layout cannot cut evenly; pad with ``pad_to_multiple_of``.
    """
    tokens = batch["input_ids"].shape[1]
    layout = SequenceLayout.parse(layout)
    lengths = [tokens]
    if layout is SequenceLayout.ZIGZAG and "cu_seq_lens_q" in batch:
        lengths = batch["cu_seq_lens_q"].diff().tolist()
    own = local_indices(lengths, cp_mesh.size(), cp_mesh.get_local_rank(), layout)
    share = {}
    for name, x in batch.items():
        of_tokens = isinstance(x, Tensor) and x.dim() == 2 and x.shape[1] == tokens
        share[name] = x[:, own.to(x.device)] if of_tokens else x
    return share


def _list(x: Any) -> list[int]:
    return x.tolist() if hasattr(x, "tolist") else list(x)

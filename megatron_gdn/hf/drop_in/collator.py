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
_COLUMNS = ("input_ids", "labels", "attention_mask")
_OFFSETS = ("cu_seq_lens_q", "cu_seq_lens_k")


class PackingCollator:
    """Lays documents end to end in one row: ``collator([{"input_ids": [...]}, ...]) -> batch``.

    The batch has ``input_ids``, ``position_ids`` (from 0 in every document), ``labels`` (ignored at
    the start of a document, which no token predicts), ``shift_labels`` (what the token at each
    position must predict; ignored at the end of a document) and
    ``cu_seq_lens_q`` = ``cu_seq_lens_k``, ``max_length_q`` = ``max_length_k``. transformers' models
    take ``shift_labels`` with ``labels``; their loss then does not shift labels itself, which would
    be wrong in a share of a sequence.

    Args:
        pad_to_multiple_of: the row is filled up to a multiple of it, by a document of
            ``pad_token_id`` whose labels are ignored. ``2 * cp`` for context parallelism.
        pad_token_id: what padding holds.

    Raises:
        ValueError: no documents or no tokens, labels of another length than their document,
            documents with padding (an ``attention_mask`` with 0), or columns that would be lost.
    """

    def __init__(self, pad_to_multiple_of: int = 1, pad_token_id: int = 0) -> None:
        if pad_to_multiple_of < 1:
            raise ValueError(f"pad_to_multiple_of={pad_to_multiple_of} must be at least 1.")
        self.multiple, self.pad = pad_to_multiple_of, pad_token_id

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not documents:
            raise ValueError("there are no documents to pack.")
        for number, document in enumerate(documents):
            _require_known(number, document)
        rows = [_list(document["input_ids"]) for document in documents]
        labels = [
            _list(document.get("labels", row))
            for document, row in zip(documents, rows, strict=True)
        ]
        if not any(rows):
            raise ValueError(f"the {len(rows)} documents have no tokens.")
        gap = -sum(map(len, rows)) % self.multiple
        if gap:
            rows.append([self.pad] * gap)
            labels.append([IGNORED] * gap)
        lengths = [len(row) for row in rows]
        offsets = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        longest = max(lengths)
        return {
            "input_ids": torch.tensor(sum(rows, []))[None],
            "labels": torch.tensor(sum(([IGNORED, *row[1:]] for row in labels if row), []))[None],
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
    """This rank's share of a packed batch: of every tensor over tokens, this rank's columns.

    Offsets stay those of the whole row: a patched model needs them so.

    Args:
        batch: as :class:`PackingCollator` makes it, the same on all ranks. Tensors ``[1, S]``,
            ``[1, S, ...]`` and ``[n, 1, S]`` (positions of a vision-language model) are cut along
            S; what has no S passes whole.
        cp_mesh, layout: as given to :func:`.patching.patch`.

    Raises:
        ValueError: tokens that the layout cannot cut evenly; pad with ``pad_to_multiple_of``. A
            batch without ``input_ids``, or a tensor with S in another dimension,
            which cannot be cut.
    """
    if "input_ids" not in batch:
        raise ValueError(f"the batch has no input_ids to be cut by; it has {', '.join(batch)}.")
    rows = batch["input_ids"].shape[0]
    tokens = batch["input_ids"].shape[1]
    layout = SequenceLayout.parse(layout)
    lengths = [tokens]
    if layout is SequenceLayout.ZIGZAG and "cu_seq_lens_q" in batch:
        lengths = batch["cu_seq_lens_q"].diff().tolist()
    own = local_indices(lengths, cp_mesh.size(), cp_mesh.get_local_rank(), layout)
    share = {}
    for name, x in batch.items():
        if not isinstance(x, Tensor) or name in _OFFSETS or tokens not in x.shape:
            share[name] = x
        elif x.shape[:2] == (rows, tokens):
            share[name] = x[:, own.to(x.device)]
        elif x.dim() == 3 and x.shape[1:] == (rows, tokens):
            share[name] = x[..., own.to(x.device)]
        else:
            raise ValueError(
                f"{name} of shape {tuple(x.shape)} beside input_ids [{rows}, {tokens}]: it is not "
                f"known how ranks share it. Leave it out, or cut it and add it to the share."
            )
    return share


def _require_known(number: int, document: Mapping[str, Any]) -> None:
    for name in document:
        if name not in _COLUMNS:
            raise ValueError(
                f"document {number} has {name!r}, which would be lost: {', '.join(_COLUMNS)} are "
                f"packed. Take it out of the dataset (remove_columns)."
            )
        count, there = len(document["input_ids"]), len(document[name])
        if there != count:
            raise ValueError(
                f"document {number} has {count} input_ids and {there} {name}; there must be one "
                f"per token."
            )
    if 0 in _list(document.get("attention_mask", [])):
        raise ValueError(
            f"document {number} has padding (0 in its attention_mask), which would be packed as "
            f"tokens. Tokenize without padding."
        )


def _list(x: Any) -> list[int]:
    return x.tolist() if hasattr(x, "tolist") else list(x)

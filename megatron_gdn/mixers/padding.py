"""Packs padded batches with a mask of documents into one row, and unpacks this row.

A mask ``[B, S]`` holds a document id per token, counted from 1 in every row; 0 is
padding. A slot is a document with the padding that follows it in the packed row.

Legend: T tokens that are not padding, N documents, P tokens of the packed row (T, or
more if slots are padded).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..ops.host_tables import to_device

if TYPE_CHECKING:
    from megatron.core.packed_seq_params import PackedSeqParams


def seqlens_of_mask(mask: Tensor) -> tuple[int, ...]:
    """The lengths of a mask's documents, row after row; the host reads the mask.

    ``[[1, 1, 2, 2, 2, 0], [1, 2, 2, 3, 3, 3]] -> (2, 3, 1, 2, 3)``

    Args:
        mask: integers ``[B, S]``: document ids, 0 at padding, increasing along a row.
            Ids may be skipped, and padding may be before, between and after documents.

    Raises:
        ValueError: a wrong dtype or shape; ids that decrease along a row; padding in a
            document.
    """
    return read_mask(mask).lengths


def unpad_data(mask: Tensor) -> tuple[Tensor, Tensor, int]:
    """The tokens' positions in a padded batch, and the lengths for variable-length
    kernels.

    Returns:
        int64 ``[T]``, the tokens' positions in the flattened mask; int32 ``[N + 1]``,
        the documents' cumulative lengths; and the longest length. The tensors are on
        the mask's device.
    """
    token_T, _, lengths = read_mask(mask)
    device = mask.device
    return (
        to_device(token_T, device),
        cu_seqlens(lengths, device),
        max(lengths, default=0),
    )


def pack_rows(
    x: Tensor, mask: Tensor, *, multiple_of: int = 1
) -> tuple[Tensor, PackedSeqParams]:
    """Lay the documents of a padded batch end to end, in the order of the rows.

    Padding is never read, and may hold NaN; padding's gradient is 0. The host reads the
    mask once.

    With context parallelism, pack the rows of all ranks, with slots of a multiple of
    ``2 * context_parallel_size`` rows (``multiple_of``). Each rank takes its rows of
    the result:

        packed, params = pack_rows(x, mask, multiple_of=2 * cp)
        slots = params.cu_seqlens_q_padded.diff().tolist()
        mine = packed[local_indices(slots, cp, cp_rank)]

    Args:
        x: ``[S, B, ...]``: hidden states in Megatron's layout, or tokens, labels, a
            loss mask.
        mask: ``[B, S]`` as in :func:`seqlens_of_mask`.
        multiple_of: zeros fill every document's slot up to a multiple of this number.

    Returns:
        ``[P, 1, ...]`` and the micro-batch's boundaries (``"thd"``, int32, on x's
        device): ``cu_seqlens_*`` of documents, ``cu_seqlens_*_padded`` of slots (None
        if ``multiple_of`` is 1), and ``max_seqlen_*``, the longest slot. A mask without
        tokens gives one empty document.

    Raises:
        ValueError: as in :func:`seqlens_of_mask`; x does not fit the mask;
            ``multiple_of`` < 1.
    """
    packing = _packing_of(mask, multiple_of, x.device)
    if x.shape[:2] != mask.shape[::-1]:
        raise ValueError(
            f"x of shape {tuple(x.shape)} does not fit a mask of shape "
            f"{tuple(mask.shape)}: x must be [S, B, ...] (sequence first), the mask "
            "[B, S]."
        )
    packed = _move_rows(
        x.flatten(0, 1), packing.padded_row_T, packing.packed_row_T, sum(packing.slots)
    )
    padded_slots = None if multiple_of == 1 else packing.slots
    params = packed_seq_params_of(
        "thd", packing.lengths, padded_slots, max(packing.slots), x.device
    )
    return packed.unsqueeze(1), params


def unpack_rows(packed: Tensor, mask: Tensor, *, multiple_of: int = 1) -> Tensor:
    """The inverse of :func:`pack_rows`, with zeros at padding; the host reads the mask
    once.

    Args:
        packed: ``[P, 1, ...]``, the rows of all context-parallel ranks in sequence
            order.
        mask, multiple_of: the arguments of :func:`pack_rows`.

    Returns:
        ``[S, B, ...]``.

    Raises:
        ValueError: as in :func:`seqlens_of_mask`; the mask's slots need another number
            of rows.
    """
    packing = _packing_of(mask, multiple_of, packed.device)
    tokens = sum(packing.slots)
    if packed.shape[:2] != (tokens, 1):
        raise ValueError(
            f"packed rows of shape {tuple(packed.shape)} do not fit the mask, whose "
            f"documents fill [{tokens}, 1, ...] with multiple_of={multiple_of}. "
            "Give the multiple_of of pack_rows, and with context parallelism the rows "
            "of all ranks."
        )
    x = _move_rows(
        packed.squeeze(1), packing.packed_row_T, packing.padded_row_T, mask.numel()
    )
    return x.unflatten(0, mask.shape[::-1])


class MaskOnHost(NamedTuple):
    """The tokens of a mask and their documents, in tensors on the CPU."""

    token_T: Tensor  # int64, the position of each token in the flattened mask
    # int64, the document of each token, counted over the whole batch
    document_T: Tensor
    lengths: tuple[int, ...]  # tokens of each document


def read_mask(mask: Tensor) -> MaskOnHost:
    """List the tokens and documents of a mask ``[B, S]`` of document ids.

    Raises a ValueError for a mask that :func:`seqlens_of_mask` does not describe.
    """
    if not isinstance(mask, Tensor) or mask.is_meta:
        if isinstance(mask, Tensor):
            what = "on the meta device"
        else:
            what = f"a {type(mask).__name__}"
        raise ValueError(
            "a mask of documents must be a tensor of integers [B, S] with values on "
            f"the CPU or a GPU; this one is {what}."
        )
    if (
        mask.dim() != 2
        or mask.is_floating_point()
        or mask.is_complex()
        or mask.dtype == torch.bool
    ):
        raise ValueError(
            "a mask of documents must be integers [B, S] (ids from 1, 0 at padding), "
            f"got shape {tuple(mask.shape)} and dtype {mask.dtype}. A bool mask may "
            "mean tokens or padding: pass keep.int() or (~padding).int()."
        )
    id_BS = mask.detach().to("cpu", torch.int64)
    if (id_BS < 0).any():
        raise ValueError(
            f"a mask of documents holds {int(id_BS.min())}; ids count from 1, padding "
            "is 0."
        )
    # a document begins where the id differs from the id before it in the row
    begins_BS = (id_BS != F.pad(id_BS[:, :-1], (1, 0))) & (id_BS > 0)
    row_N, column_N = begins_BS.nonzero(as_tuple=True)
    id_N = id_BS[row_N, column_N]
    same_row = row_N[1:] == row_N[:-1]
    # each n such that document n + 1 is in the same row, but its id is not larger
    wrong = (same_row & (id_N[1:] <= id_N[:-1])).nonzero()
    if len(wrong):
        n = int(wrong[0])
        earlier, later = id_N[n : n + 2].tolist()
        row = int(row_N[n])
        column = int(column_N[n + 1])
        what = f"has document {later} after document {earlier}"
        if later == earlier:
            what = f"goes on with document {later} after padding inside it"
        raise ValueError(
            f"row {row} of the mask {what}, at position {column}. Ids must increase "
            "along a row without interruption: number the documents in their order in "
            "the row, or move the padding to a document's end."
        )
    token_T = (id_BS > 0).flatten().nonzero().flatten()
    document_T = begins_BS.flatten().cumsum(0)[token_T] - 1
    return MaskOnHost(token_T, document_T, tuple(document_T.bincount().tolist()))


def cu_seqlens(lengths: Sequence[int], device: torch.device | str) -> Tensor:
    """The cumulative lengths, int32 ``[N + 1]`` on ``device``, from 0 on."""
    offsets = list(accumulate(lengths, initial=0))
    return to_device(torch.tensor(offsets, dtype=torch.int32, device="cpu"), device)


def padded_lengths(lengths: Sequence[int], multiple_of: int) -> tuple[int, ...]:
    """The lengths, each rounded up to a multiple of ``multiple_of``."""
    if multiple_of < 1:
        raise ValueError(
            f"multiple_of={multiple_of} must be at least 1 (1 leaves no padding)."
        )
    return tuple(-(-length // multiple_of) * multiple_of for length in lengths)


def packed_seq_params_of(
    qkv_format: str,
    lengths: Sequence[int],
    slots: Sequence[int] | None,
    longest: int,
    device: torch.device | str,
) -> PackedSeqParams:
    """PackedSeqParams of documents with these ``lengths``.

    ``slots`` are the lengths with padding (None: no padding), ``longest`` is
    ``max_seqlen``.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = cu_seqlens(lengths, device)
    padded_offsets: Any = None if slots is None else cu_seqlens(slots, device)
    return PackedSeqParams(
        qkv_format=qkv_format,
        cu_seqlens_q=offsets,
        cu_seqlens_kv=offsets,
        cu_seqlens_q_padded=padded_offsets,
        cu_seqlens_kv_padded=padded_offsets,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


class _Packing(NamedTuple):
    """Where the tokens of a mask are in a padded batch and in the packed row."""

    lengths: tuple[int, ...]  # tokens of each document
    slots: tuple[int, ...]  # these lengths with padding
    padded_row_T: Tensor  # int64, each token's row in the flattened batch [S * B]
    packed_row_T: Tensor  # int64, each token's row in the packed row


def _packing_of(mask: Tensor, multiple_of: int, device: torch.device) -> _Packing:
    """The `_Packing` of ``mask`` into slots of a multiple of ``multiple_of`` rows, with
    tensors on ``device``."""
    token_T, document_T, lengths = read_mask(mask)
    lengths = lengths or (0,)  # a mask without tokens: one empty document
    slots = padded_lengths(lengths, multiple_of)
    padding_N = torch.tensor(slots, dtype=torch.int64, device="cpu") - torch.tensor(
        lengths, dtype=torch.int64, device="cpu"
    )
    padding_before_N = padding_N.cumsum(0) - padding_N
    packed_T = torch.arange(len(token_T), device="cpu") + padding_before_N[document_T]
    B, S = mask.shape
    # mask is [B, S], x is [S, B]
    if S:
        padded_T = token_T % S * B + token_T // S
    else:
        padded_T = token_T  # no token, and no division by 0
    return _Packing(
        lengths, slots, to_device(padded_T, device), to_device(packed_T, device)
    )


def _move_rows(
    x: Tensor, source_rows: Tensor, target_rows: Tensor, rows: int
) -> Tensor:
    """Return y with ``rows`` rows: ``y[target_rows] = x[source_rows]``, and zeros
    elsewhere."""
    moved = x.index_select(0, source_rows)
    return x.new_zeros((rows,) + x.shape[1:]).index_copy_(0, target_rows, moved)

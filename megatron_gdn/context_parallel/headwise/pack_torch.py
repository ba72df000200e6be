"""The functions of :mod:`.pack` in plain torch, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

from .shares import HeadShares


def pack_peers(
    whole: Tensor,
    messages: Tensor,
    shares: HeadShares,
    rank: int,
    *,
    kept_rows: tuple[Tensor, Tensor] | None = None,
    beside_transfer: bool = False,
) -> None:
    if kept_rows is not None:
        full, place = kept_rows
        copy_kept_rows(whole, full, shares, rank, place, to_full=True)
    for message, peer in zip(messages, shares.peers(rank), strict=True):
        for block in shares.blocks(peer):
            message[..., block.own_columns] = whole[..., block.columns]


def copy_kept_rows(
    whole: Tensor,
    full: Tensor,
    shares: HeadShares,
    rank: int,
    place: Tensor,
    *,
    to_full: bool,
) -> None:
    for block in shares.blocks(rank):
        if to_full:
            full[place, :, block.own_columns] = whole[..., block.columns]
        elif block.copies == 1:
            whole[..., block.columns] = full[place, :, block.own_columns]


def unpack_peers(
    messages: Tensor,
    full: Tensor,
    whole: Tensor,
    shares: HeadShares,
    rank: int,
    place: Tensor,
    *,
    with_kept_rows: bool = False,
    beside_transfer: bool = False,
) -> None:
    if with_kept_rows:
        copy_kept_rows(whole, full, shares, rank, place, to_full=False)
    wide = torch.promote_types(whole.dtype, torch.float32)
    totals: dict[tuple[int, int], Tensor] = {}
    received = dict(zip(shares.peers(rank), messages, strict=True))
    for other in range(shares.ranks):
        for block in shares.blocks(other):
            if block.copies == 1 and other == rank:
                continue
            if other == rank:
                rows = full[place]
            else:
                rows = received[other]
            rows = rows[..., block.own_columns]
            if block.copies == 1:
                whole[..., block.columns] = rows
            else:
                key = block.whole, block.width
                totals[key] = totals.get(key, 0) + rows.to(wide)
    for (first, width), total in totals.items():
        whole[..., first : first + width] = total


def move_rows(
    messages: Tensor,
    full: Tensor,
    place: Tensor,
    *,
    to_full: bool,
    beside_transfer: bool = False,
) -> None:
    if to_full:
        full[place] = messages.flatten(0, 1)
    else:
        torch.index_select(full, 0, place, out=messages.flatten(0, 1))

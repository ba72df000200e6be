"""The functions of :mod:`.pack` in plain torch, for any device. The docstrings in
:mod:`.pack` explain the arguments."""

from __future__ import annotations

import torch
from torch import Tensor

from .shares import HeadShares


def pack_peers(
    cp_rows: Tensor,
    messages: Tensor,
    shares: HeadShares,
    rank: int,
    *,
    kept_rows: tuple[Tensor, Tensor] | None = None,
    beside_transfer: bool = False,
) -> None:
    """Copy every peer's columns of ``cp_rows [s, B, P]`` to the peer's message in
    ``messages [ranks - 1, s, B, p]``; ``beside_transfer`` is not read."""
    if kept_rows is not None:
        hp_rows, positions = kept_rows
        copy_kept_rows(cp_rows, hp_rows, shares, rank, positions, to_hp=True)
    for message, peer in zip(messages, shares.peers(rank), strict=True):
        for block in shares.blocks(peer):
            message[..., block.rank_columns] = cp_rows[..., block.columns]


def copy_kept_rows(
    cp_rows: Tensor,
    hp_rows: Tensor,
    shares: HeadShares,
    rank: int,
    positions: Tensor,
    *,
    to_hp: bool,
) -> None:
    """If ``to_hp``, copy ``rank``'s columns of ``cp_rows [s, B, P]`` to
    ``hp_rows[positions]``; else copy back the columns that only ``rank`` holds."""
    for block in shares.blocks(rank):
        if to_hp:
            hp_rows[positions, :, block.rank_columns] = cp_rows[..., block.columns]
        elif block.copies == 1:
            cp_rows[..., block.columns] = hp_rows[positions, :, block.rank_columns]


def unpack_peers(
    messages: Tensor,
    hp_rows: Tensor,
    cp_rows: Tensor,
    shares: HeadShares,
    rank: int,
    positions: Tensor,
    *,
    with_kept_rows: bool = False,
    beside_transfer: bool = False,
) -> None:
    """Write the columns of the peers' ``messages`` to ``cp_rows [s, B, P]``.

    Columns of several ranks are summed in rank order, in fp32 or wider; this rank's
    term is in ``hp_rows[positions]``. ``beside_transfer`` is not read.
    """
    if with_kept_rows:
        copy_kept_rows(cp_rows, hp_rows, shares, rank, positions, to_hp=False)
    wide = torch.promote_types(cp_rows.dtype, torch.float32)
    # (first column, width) of a block that several ranks hold -> the sum so far
    totals: dict[tuple[int, int], Tensor] = {}
    received = dict(zip(shares.peers(rank), messages, strict=True))
    for other in range(shares.rank_count):
        for block in shares.blocks(other):
            if block.copies == 1 and other == rank:
                continue
            if other == rank:
                rows = hp_rows[positions]
            else:
                rows = received[other]
            rows = rows[..., block.rank_columns]
            if block.copies == 1:
                cp_rows[..., block.columns] = rows
            else:
                key = block.first_column, block.width
                totals[key] = totals.get(key, 0) + rows.to(wide)
    for (first, width), total in totals.items():
        cp_rows[..., first : first + width] = total


def move_rows(
    messages: Tensor,
    hp_rows: Tensor,
    peer_positions: Tensor,
    *,
    to_hp: bool,
    beside_transfer: bool = False,
) -> None:
    """If ``to_hp``, copy row t of the joined ``messages`` to row ``peer_positions[t]``
    of ``hp_rows``, else copy it back.

    ``peer_positions`` has the rows of all peers' tokens. ``beside_transfer`` is not
    read.
    """
    if to_hp:
        hp_rows[peer_positions] = messages.flatten(0, 1)
    else:
        torch.index_select(hp_rows, 0, peer_positions, out=messages.flatten(0, 1))

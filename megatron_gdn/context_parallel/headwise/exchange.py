"""The head exchange: a rank's tokens of all heads become all tokens of the rank's
heads.

    to heads      [s, B, P] -> [S, B, p]  every rank sends each peer that peer's columns
    to sequence   [S, B, p] -> [s, B, P]  every peer sends the columns back

The backward of each direction is the other direction. The S rows of all ranks are in
sequence order, the s rows of one rank in this rank's order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.autograd import uncompiled
from ...ops.documents import Documents
from ..layouts import SequenceLayout
from .shares import HeadShares, Wave, waves_of

# Rows travel in waves of at least WAVE_BYTES: a wave is packed (or unpacked) while
# another travels. On 4 H200, two waves take 0.75 times as long as one wave at 600 MB,
# 1.3 times at 150 MB.
MOST_WAVES = 2
WAVE_BYTES = 96 << 20
# Fragments below MESSAGE_BYTES travel in one message per peer, since a message costs
# the host some 30 microseconds; a second copy orders the rows. On 4 H200, one message
# per fragment takes 0.85 times as long as one per peer with fragments of 30 to 100 MB,
# 3.5 times with those of 3 MB.
MESSAGE_BYTES = 28 << 20
# While messages travel, a separate kernel copies the rows that stay on their rank. If
# these rows have at most OWN_BYTES, the packing kernel copies them, because a launch
# would take longer.
OWN_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Exchange:
    """The ranks of a head exchange, the columns of each rank, and the places of
    tokens."""

    group: dist.ProcessGroup
    rank: int
    shares: HeadShares
    rank_width: int  # p
    whole_width: int  # P
    waves: tuple[Wave, ...]  # the waves in which tokens travel
    direct_fragment: float  # fragments of this many tokens or more get a message each
    # whether the kernel that packs the only wave also copies the rows that stay
    at_once: bool

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        shares: HeadShares,
        cut: Documents,
        layout: SequenceLayout,
        rows: Tensor,
    ) -> Exchange:
        """The exchange of ``rows`` ``[s or S, B, .]`` of documents ``cut`` by column
        ``shares``."""
        rank = group.rank()
        rank_width = shares.rank_width
        local = cut.total_tokens // shares.ranks
        row_bytes = max(1, rows.shape[1] * rank_width * rows.element_size())
        wave_count = min(
            MOST_WAVES, max(1, local * (shares.ranks - 1) * row_bytes // WAVE_BYTES)
        )
        waves = waves_of(cut, shares.ranks, rank, layout, wave_count)
        at_once = wave_count == 1 and local * row_bytes <= OWN_BYTES
        return cls(
            group,
            rank,
            shares,
            rank_width,
            shares.whole_width,
            waves,
            direct_fragment=MESSAGE_BYTES / row_bytes,
            at_once=at_once,
        )

    def sends_fragments(self, wave: Wave) -> bool:
        """Whether every fragment of ``wave`` travels as a message of its own."""
        return wave.mean_fragment >= self.direct_fragment


@cache
def _packing_module(gpu: bool) -> ModuleType:
    """The module that packs messages: Triton kernels if ``gpu``, else plain torch."""
    if gpu and find_spec("triton") is not None:
        from . import pack

        return pack
    from . import pack_torch

    return pack_torch


def _exchange_messages(
    exchange: Exchange, messages: Tensor
) -> tuple[list[dist.Work], Tensor]:
    """Send ``messages`` to the peers; return transfers to wait for, and the peers'
    messages."""
    received = torch.empty_like(messages)
    rows = [messages.shape[1]] * messages.shape[0]
    rows.insert(exchange.rank, 0)
    work = dist.all_to_all_single(
        received.flatten(0, 1),
        messages.flatten(0, 1),
        rows,
        rows,
        group=exchange.group,
        async_op=not exchange.at_once,
    )
    return [] if work is None else [work], received


def _send_fragments(
    exchange: Exchange, wave: Wave, messages: Tensor, full: Tensor, to_heads: bool
) -> list[dist.Work]:
    """With ``to_heads``, send the fragments in ``messages`` to the peers and receive
    theirs into ``full``; otherwise send from ``full`` and receive into ``messages``.

    Returns the transfers to wait for.
    """
    # Two ranks must list the messages between them in the same order.
    group = exchange.group
    rank = exchange.rank
    start_own, start_peers = (
        (dist.isend, dist.irecv) if to_heads else (dist.irecv, dist.isend)
    )
    operations = []
    for peer, message in zip(exchange.shares.peers(rank), messages, strict=True):
        ends = [
            (start_own, message[fragment.locally]) for fragment in wave.fragments[rank]
        ]
        ends += [
            (start_peers, full[fragment.in_sequence])
            for fragment in wave.fragments[peer]
        ]
        operations += [
            dist.P2POp(start, x, group=group, group_peer=peer) for start, x in ends
        ]
    return dist.batch_isend_irecv(operations)


def _to_heads(whole: Tensor, exchange: Exchange) -> Tensor:
    """Exchange ``[s, B, P]`` of all columns to ``[S, B, p]`` of this rank's columns."""
    pack = _packing_module(whole.is_cuda)
    shares = exchange.shares
    rank = exchange.rank
    if whole.stride(-1) != 1:
        whole = whole.contiguous()
    s, B, _ = whole.shape
    full = whole.new_empty(s * shares.ranks, B, exchange.rank_width)
    sent = []  # keeps the messages in memory until all are sent
    peers = exchange.shares.ranks - 1
    for wave in exchange.waves:
        messages = whole.new_empty(peers, wave.size, B, exchange.rank_width)
        received = None
        if exchange.at_once:
            kept_rows = (full, wave.own_place)
        else:
            kept_rows = None
        pack.pack_peers(
            whole[wave.tokens],
            messages,
            shares,
            rank,
            kept_rows=kept_rows,
            beside_transfer=bool(sent),
        )
        if exchange.sends_fragments(wave):
            works = _send_fragments(exchange, wave, messages, full, to_heads=True)
        else:
            works, received = _exchange_messages(exchange, messages)
        sent.append((wave, messages, received, works))
    for wave in () if exchange.at_once else exchange.waves:
        pack.copy_kept_rows(
            whole[wave.tokens], full, shares, rank, wave.own_place, to_full=True
        )
    for wave, _, received, works in sent:
        for work in works:
            work.wait()  # on a GPU only the stream waits, and the host goes on
        if received is not None:
            beside = wave is not exchange.waves[-1]
            pack.move_rows(
                received, full, wave.peer_place, to_full=True, beside_transfer=beside
            )
    return full


def _to_sequence(full: Tensor, exchange: Exchange) -> Tensor:
    """Exchange ``[S, B, p]`` of this rank's columns to ``[s, B, P]`` of all columns."""
    pack = _packing_module(full.is_cuda)
    shares = exchange.shares
    rank = exchange.rank
    full = full.contiguous()
    S, B, _ = full.shape
    whole = full.new_empty(S // shares.ranks, B, exchange.whole_width)
    awaited = []  # keeps the messages in memory until all are received
    peers = exchange.shares.ranks - 1
    for wave in exchange.waves:
        received = messages = full.new_empty(peers, wave.size, B, exchange.rank_width)
        if exchange.sends_fragments(wave):
            works = _send_fragments(exchange, wave, messages, full, to_heads=False)
        else:
            beside = wave is not exchange.waves[0]
            pack.move_rows(
                messages, full, wave.peer_place, to_full=False, beside_transfer=beside
            )
            works, received = _exchange_messages(exchange, messages)
        awaited.append((wave, messages, received, works))
    for wave in () if exchange.at_once else exchange.waves:
        pack.copy_kept_rows(
            whole[wave.tokens], full, shares, rank, wave.own_place, to_full=False
        )
    for wave, _, received, works in awaited:
        for work in works:
            work.wait()
        pack.unpack_peers(
            received,
            full,
            whole[wave.tokens],
            shares,
            rank,
            wave.own_place,
            with_kept_rows=exchange.at_once,
            beside_transfer=wave is not exchange.waves[-1],
        )
    return whole


class _MoveRows(torch.autograd.Function):
    """Autograd of :func:`to_heads` and :func:`to_sequence`; each is the other's
    backward."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
        ctx.exchange = exchange
        ctx.to_heads = to_heads
        if to_heads:
            return _to_heads(rows, exchange)
        return _to_sequence(rows, exchange)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (grad,) = gradients
        if ctx.to_heads:
            back = _to_sequence
        else:
            back = _to_heads
        if torch.is_grad_enabled():  # the caller wants second derivatives
            return _MoveRows.apply(grad, ctx.exchange, not ctx.to_heads), None, None
        return back(grad, ctx.exchange), None, None


@uncompiled  # Dynamo mistakes the handles of point-to-point messages for tensors
def to_heads(whole: Tensor, exchange: Exchange) -> Tensor:
    """``[s, B, P] -> [S, B, p]``: this rank's columns of all tokens, in sequence order.

    If several ranks hold a column, its gradients are summed in fp32, in the order of
    the ranks.
    """
    return _MoveRows.apply(whole, exchange, True)


@uncompiled
def to_sequence(full: Tensor, exchange: Exchange) -> Tensor:
    """``[S, B, p] -> [s, B, P]``: the inverse of :func:`to_heads` if ranks share no
    column."""
    return _MoveRows.apply(full, exchange, False)

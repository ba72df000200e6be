"""The exchange behind headwise context parallelism: a share of the tokens for a share of the heads.

    to heads      [s, B, P] -> [S, B, p]   every rank sends each peer that peer's columns
    to sequence   [S, B, p] -> [s, B, P]   and gets its own tokens' columns back

Each is the other's gradient. S and s are in sequence order and in this rank's order.
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
from .shares import HeadShares, Wave, route

# Rows travel in waves of at least this many bytes: one wave is packed (or unpacked) while the other
# travels. On 4 H200, two waves take 0.75 of one wave's time at 600 MB, 1.3 times it at 150 MB.
MOST_WAVES = 2
WAVE_BYTES = 96 << 20
# Fragments below this size are sent together, one message per peer, and a second pass puts the rows
# in order: a message costs the host some 30 microseconds. On 4 H200, messages of single fragments
# take 0.85 of that time with fragments of 30 to 100 MB, and 3.5 times it with fragments of 3 MB.
MESSAGE_BYTES = 28 << 20
# A rank copies the rows that it keeps in a kernel of their own, while the messages travel. Up to
# this many bytes they are copied in the packing kernel: the copy takes less time than a launch.
OWN_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class Exchange:
    """The group, the columns of each rank, and the places of the tokens."""

    group: dist.ProcessGroup
    rank: int
    shares: HeadShares
    rank_width: int  # p
    whole_width: int  # P
    waves: tuple[Wave, ...]
    direct_fragment: float  # fragments of at least so many tokens (mean) are messages of their own
    at_once: bool  # there is one wave, and nothing is computed while it travels

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        shares: HeadShares,
        cut: Documents,
        layout: SequenceLayout,
        rows: Tensor,
    ) -> Exchange:
        """The exchange of ``rows``, ``[s, B, P]`` or ``[S, B, p]``."""
        rank, rank_width = group.rank(), shares.rank_width
        local = cut.total_tokens // shares.ranks
        row_bytes = max(1, rows.shape[1] * rank_width * rows.element_size())
        waves = min(MOST_WAVES, max(1, local * (shares.ranks - 1) * row_bytes // WAVE_BYTES))
        made = route(cut, shares.ranks, rank, layout, waves)
        at_once = waves == 1 and local * row_bytes <= OWN_BYTES
        return cls(
            group, rank, shares, rank_width, shares.whole_width, made,
            direct_fragment=MESSAGE_BYTES / row_bytes, at_once=at_once,
        )  # fmt: skip

    def sends_fragments(self, wave: Wave) -> bool:
        return wave.mean_fragment >= self.direct_fragment


@cache
def _packing(gpu: bool) -> ModuleType:
    if gpu and find_spec("triton") is not None:
        from . import pack

        return pack
    from . import pack_torch

    return pack_torch


def _swap(exchange: Exchange, messages: Tensor) -> tuple[list[dist.Work], Tensor]:
    """Exchange ``messages`` with the peers; with ``at_once`` no work is left to wait for."""
    received = torch.empty_like(messages)
    rows = [messages.shape[1]] * messages.shape[0]
    rows.insert(exchange.rank, 0)
    work = dist.all_to_all_single(
        received.flatten(0, 1), messages.flatten(0, 1), rows, rows,
        group=exchange.group, async_op=not exchange.at_once,
    )  # fmt: skip
    return [] if work is None else [work], received


def _send_fragments(
    exchange: Exchange, wave: Wave, messages: Tensor, full: Tensor, to_heads: bool
) -> list[dist.Work]:
    """Start a message per fragment: to heads from ``messages`` into ``full``, else the reverse."""
    # A pair of ranks must list its messages in the same order.
    group, rank = exchange.group, exchange.rank
    at_home, abroad = (dist.isend, dist.irecv) if to_heads else (dist.irecv, dist.isend)
    operations = []
    for peer, message in zip(exchange.shares.peers(rank), messages, strict=True):
        ends = [(at_home, message[fragment.locally]) for fragment in wave.fragments[rank]]
        ends += [(abroad, full[fragment.in_sequence]) for fragment in wave.fragments[peer]]
        operations += [dist.P2POp(start, x, group=group, group_peer=peer) for start, x in ends]
    return dist.batch_isend_irecv(operations)


def _to_heads(whole: Tensor, exchange: Exchange) -> Tensor:
    pack, shares, rank = _packing(whole.is_cuda), exchange.shares, exchange.rank
    if whole.stride(-1) != 1:
        whole = whole.contiguous()
    s, B, _ = whole.shape
    full = whole.new_empty(s * shares.ranks, B, exchange.rank_width)
    sent = []  # keeps messages alive until they are sent
    peers = exchange.shares.ranks - 1
    for wave in exchange.waves:
        messages, received = whole.new_empty(peers, wave.size, B, exchange.rank_width), None
        kept = (full, wave.own_place) if exchange.at_once else None
        pack.pack_peers(
            whole[wave.tokens], messages, shares, rank, own=kept, beside_transfer=bool(sent)
        )
        if exchange.sends_fragments(wave):
            works = _send_fragments(exchange, wave, messages, full, to_heads=True)
        else:
            works, received = _swap(exchange, messages)
        sent.append((wave, messages, received, works))
    for wave in () if exchange.at_once else exchange.waves:
        pack.move_own(whole[wave.tokens], full, shares, rank, wave.own_place, to_full=True)
    for wave, _, received, works in sent:
        for work in works:
            work.wait()  # on a GPU only the stream waits, not the host
        if received is not None:
            beside = wave is not exchange.waves[-1]
            place = full, wave.peer_place
            pack.move_rows(received, *place, to_full=True, beside_transfer=beside)
    return full


def _to_sequence(full: Tensor, exchange: Exchange) -> Tensor:
    pack, shares, rank = _packing(full.is_cuda), exchange.shares, exchange.rank
    full = full.contiguous()
    S, B, _ = full.shape
    whole = full.new_empty(S // shares.ranks, B, exchange.whole_width)
    coming = []  # keeps messages alive, as in _to_heads
    peers = exchange.shares.ranks - 1
    for wave in exchange.waves:
        received = messages = full.new_empty(peers, wave.size, B, exchange.rank_width)
        if exchange.sends_fragments(wave):
            works = _send_fragments(exchange, wave, messages, full, to_heads=False)
        else:
            beside = wave is not exchange.waves[0]
            place = full, wave.peer_place
            pack.move_rows(messages, *place, to_full=False, beside_transfer=beside)
            works, received = _swap(exchange, messages)
        coming.append((wave, messages, received, works))
    for wave in () if exchange.at_once else exchange.waves:
        pack.move_own(whole[wave.tokens], full, shares, rank, wave.own_place, to_full=False)
    for wave, _, received, works in coming:
        for work in works:
            work.wait()
        pack.unpack_peers(
            received, full, whole[wave.tokens], shares, rank, wave.own_place,
            with_own=exchange.at_once, beside_transfer=wave is not exchange.waves[-1],
        )  # fmt: skip
    return whole


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows: Tensor, exchange: Exchange, to_heads: bool) -> Tensor:
        ctx.exchange, ctx.to_heads = exchange, to_heads
        return _to_heads(rows, exchange) if to_heads else _to_sequence(rows, exchange)

    @staticmethod
    def backward(ctx, grad: Tensor):
        back = _to_sequence if ctx.to_heads else _to_heads
        if torch.is_grad_enabled():  # a second derivative is asked for
            return _Moved.apply(grad, ctx.exchange, not ctx.to_heads), None, None
        return back(grad, ctx.exchange), None, None


@uncompiled  # Dynamo takes the handles of point-to-point messages for tensors
def to_heads(whole: Tensor, exchange: Exchange) -> Tensor:
    """``[s, B, P] -> [S, B, p]``: all tokens in sequence order, this rank's columns.

    Gradients of columns that several ranks hold are summed in fp32, in the order of the ranks.
    """
    return _Moved.apply(whole, exchange, True)


@uncompiled
def to_sequence(full: Tensor, exchange: Exchange) -> Tensor:
    """``[S, B, p] -> [s, B, P]``: the inverse of :func:`to_heads` where no column has copies."""
    return _Moved.apply(full, exchange, False)

"""The head exchange: one rank's tokens with all heads become all tokens with one rank's
heads.

    to heads      cp_rows [s, B, P] -> hp_rows [S, B, p]   a rank sends each peer that
                                                           peer's columns
    to sequence   hp_rows [S, B, p] -> cp_rows [s, B, P]   a rank sends each peer that
                                                           peer's tokens

The names come from Megatron's ``tensor_a2a_cp2hp``: cp_rows are context-parallel,
hp_rows hidden-parallel. The backward of each direction is the other direction. hp_rows
are in sequence order, cp_rows in the order of the rank's tokens.
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

# Rows travel in waves of at least LEAST_WAVE_BYTES: a wave is packed (or unpacked)
# while another travels. On 4 H200, two waves take 0.75 times as long as one wave at
# 600 MB, 1.3 times at 150 MB.
MOST_WAVES = 2
LEAST_WAVE_BYTES = 96 << 20
# Fragments below LEAST_FRAGMENT_BYTES travel in one message per peer, since a message
# costs the host some 30 microseconds. Then a second copy puts the rows in sequence
# order. On 4 H200, one message per fragment takes 0.85 times as long as one message per
# peer for fragments of 30 to 100 MB, and 3.5 times as long for fragments of 3 MB.
LEAST_FRAGMENT_BYTES = 28 << 20
# A rank copies its own columns of its own tokens, the kept rows, without a message. A
# separate kernel copies these rows while messages travel. If they have at most
# MOST_KEPT_BYTES, the packing kernel copies them, because a launch would take longer.
MOST_KEPT_BYTES = 16 << 20


@dataclass(frozen=True, eq=False)
class HeadExchange:
    """A head exchange of rows of one shape: its ranks, each rank's columns, its
    waves."""

    group: dist.ProcessGroup
    rank: int
    shares: HeadShares
    rank_width: int  # p
    width: int  # P
    waves: tuple[Wave, ...]  # the waves in which tokens travel
    # From this number of tokens on, a fragment is a message of its own.
    least_fragment_tokens: float
    # whether there is one wave, whose packing kernel also copies the kept rows
    packs_kept_rows: bool

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup,
        shares: HeadShares,
        units: Documents,
        layout: SequenceLayout,
        rows: Tensor,
    ) -> HeadExchange:
        """The exchange of rows like ``rows [s or S, B, .]``, whose columns are divided
        by ``shares``; only B and the dtype of ``rows`` are read.

        ``units`` are what ``layout`` divides among ranks: documents or the buffer.
        """
        rank = group.rank()
        rank_width = shares.rank_width
        local = units.total_tokens // shares.rank_count  # tokens of this rank
        # bytes of one token in all batch rows; at least 1, since it is a divisor
        row_bytes = max(1, rows.shape[1] * rank_width * rows.element_size())
        wave_count = min(
            MOST_WAVES,
            max(1, local * (shares.rank_count - 1) * row_bytes // LEAST_WAVE_BYTES),
        )
        waves = waves_of(units, shares.rank_count, rank, layout, wave_count)
        packs_kept_rows = wave_count == 1 and local * row_bytes <= MOST_KEPT_BYTES
        return cls(
            group,
            rank,
            shares,
            rank_width,
            shares.width,
            waves,
            least_fragment_tokens=LEAST_FRAGMENT_BYTES / row_bytes,
            packs_kept_rows=packs_kept_rows,
        )

    def sends_fragments(self, wave: Wave) -> bool:
        """Whether every fragment of ``wave`` travels as a message of its own."""
        return wave.mean_fragment_tokens >= self.least_fragment_tokens


@cache
def _packing_module(gpu: bool) -> ModuleType:
    """The module that packs messages: Triton kernels if ``gpu``, else plain torch. Both
    modules have the same functions."""
    if gpu and find_spec("triton") is not None:
        from . import pack

        return pack
    from . import pack_torch

    return pack_torch


def _exchange_messages(
    exchange: HeadExchange, messages: Tensor
) -> tuple[list[dist.Work], Tensor]:
    """All-to-all of one wave's ``messages [ranks - 1, tokens, B, p]``, one for each
    peer.

    Returns the transfers to wait for, and the peers' messages in the same shape. If
    ``exchange.packs_kept_rows``, no work overlaps the transfer: the call itself waits,
    and torch returns None for the transfer.
    """
    received = torch.empty_like(messages)
    rows = [messages.shape[1]] * messages.shape[0]
    rows.insert(exchange.rank, 0)  # a rank sends itself nothing
    work = dist.all_to_all_single(
        received.flatten(0, 1),
        messages.flatten(0, 1),
        rows,
        rows,
        group=exchange.group,
        async_op=not exchange.packs_kept_rows,
    )
    return [] if work is None else [work], received


def _send_fragments(
    exchange: HeadExchange,
    wave: Wave,
    messages: Tensor,
    hp_rows: Tensor,
    to_heads: bool,
) -> list[dist.Work]:
    """Send every fragment as a message of its own.

    ``messages``: ``[ranks - 1, tokens of the wave, B, p]``; ``hp_rows``: ``[S, B, p]``.
    With ``to_heads``, send the fragments in ``messages`` to the peers and receive the
    peers' fragments into ``hp_rows``. Otherwise send from ``hp_rows`` and receive into
    ``messages``. Returns the transfers to wait for.
    """
    # Two ranks must list the messages between them in the same order.
    group = exchange.group
    rank = exchange.rank
    if to_heads:
        start_own = dist.isend
        start_peers = dist.irecv
    else:
        start_own = dist.irecv
        start_peers = dist.isend
    operations = []
    for peer, message in zip(exchange.shares.peers(rank), messages, strict=True):
        for fragment in wave.fragments[rank]:
            rows = message[fragment.wave_slice]
            transfer = dist.P2POp(start_own, rows, group=group, group_peer=peer)
            operations.append(transfer)
        for fragment in wave.fragments[peer]:
            rows = hp_rows[fragment.sequence_slice]
            transfer = dist.P2POp(start_peers, rows, group=group, group_peer=peer)
            operations.append(transfer)
    return dist.batch_isend_irecv(operations)


def _exchange_to_heads(cp_rows: Tensor, exchange: HeadExchange) -> Tensor:
    """Exchange ``[s, B, P]`` to ``[S, B, p]``, without autograd.

    All waves are packed and sent, then kept rows are copied while messages travel. Rows
    that arrive in one message per peer are put in sequence order at the end.
    """
    pack = _packing_module(cp_rows.is_cuda)
    shares = exchange.shares
    rank = exchange.rank
    if cp_rows.stride(-1) != 1:  # the kernels need adjacent columns
        cp_rows = cp_rows.contiguous()
    s, B, _ = cp_rows.shape
    hp_rows = cp_rows.new_empty(s * shares.rank_count, B, exchange.rank_width)
    sent = []  # references, so that no message is freed before it is sent
    peers = exchange.shares.rank_count - 1
    for wave in exchange.waves:
        messages = cp_rows.new_empty(peers, wave.size, B, exchange.rank_width)
        received = None
        if exchange.packs_kept_rows:
            kept_rows = (hp_rows, wave.own_positions)
        else:
            kept_rows = None
        pack.pack_peers(
            cp_rows[wave.tokens],
            messages,
            shares,
            rank,
            kept_rows=kept_rows,
            beside_transfer=bool(sent),  # whether earlier messages travel
        )
        if exchange.sends_fragments(wave):
            works = _send_fragments(exchange, wave, messages, hp_rows, to_heads=True)
        else:
            works, received = _exchange_messages(exchange, messages)
        sent.append((wave, messages, received, works))
    for wave in () if exchange.packs_kept_rows else exchange.waves:
        pack.copy_kept_rows(
            cp_rows[wave.tokens], hp_rows, shares, rank, wave.own_positions, to_hp=True
        )
    for wave, _, received, works in sent:
        for work in works:
            work.wait()  # on a GPU only the stream waits, and the host goes on
        if received is not None:
            beside_transfer = wave is not exchange.waves[-1]
            pack.move_rows(
                received,
                hp_rows,
                wave.peer_positions,
                to_hp=True,
                beside_transfer=beside_transfer,
            )
    return hp_rows


def _exchange_to_sequence(hp_rows: Tensor, exchange: HeadExchange) -> Tensor:
    """Exchange ``[S, B, p]`` to ``[s, B, P]``, without autograd.

    All waves are sent, then kept rows are copied while messages travel. Received
    columns are written to the result; columns that several ranks hold are summed.
    """
    pack = _packing_module(hp_rows.is_cuda)
    shares = exchange.shares
    rank = exchange.rank
    hp_rows = hp_rows.contiguous()
    S, B, _ = hp_rows.shape
    cp_rows = hp_rows.new_empty(S // shares.rank_count, B, exchange.width)
    awaited = []  # references, so that no message is freed before it arrives
    peers = exchange.shares.rank_count - 1
    for wave in exchange.waves:
        received = messages = hp_rows.new_empty(
            peers, wave.size, B, exchange.rank_width
        )
        if exchange.sends_fragments(wave):
            # The transfers receive into ``messages``.
            works = _send_fragments(exchange, wave, messages, hp_rows, to_heads=False)
        else:
            beside_transfer = wave is not exchange.waves[0]
            pack.move_rows(
                messages,
                hp_rows,
                wave.peer_positions,
                to_hp=False,
                beside_transfer=beside_transfer,
            )
            works, received = _exchange_messages(exchange, messages)
        awaited.append((wave, messages, received, works))
    for wave in () if exchange.packs_kept_rows else exchange.waves:
        pack.copy_kept_rows(
            cp_rows[wave.tokens], hp_rows, shares, rank, wave.own_positions, to_hp=False
        )
    for wave, _, received, works in awaited:
        for work in works:
            work.wait()
        pack.unpack_peers(
            received,
            hp_rows,
            cp_rows[wave.tokens],
            shares,
            rank,
            wave.own_positions,
            with_kept_rows=exchange.packs_kept_rows,
            beside_transfer=wave is not exchange.waves[-1],
        )
    return cp_rows


class _ExchangeFunction(torch.autograd.Function):
    """:func:`to_heads` or :func:`to_sequence` for autograd; the backward of each is the
    other."""

    @staticmethod
    def forward(ctx, rows: Tensor, exchange: HeadExchange, to_heads: bool) -> Tensor:
        """With ``to_heads``, ``rows [s, B, P] -> [S, B, p]``; else back."""
        ctx.exchange = exchange
        ctx.to_heads = to_heads
        if to_heads:
            return _exchange_to_heads(rows, exchange)
        return _exchange_to_sequence(rows, exchange)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        """Exchange the output's gradient in the other direction."""
        (grad,) = gradients
        if torch.is_grad_enabled():  # the caller wants second derivatives
            d_rows = _ExchangeFunction.apply(grad, ctx.exchange, not ctx.to_heads)
        elif ctx.to_heads:
            d_rows = _exchange_to_sequence(grad, ctx.exchange)
        else:
            d_rows = _exchange_to_heads(grad, ctx.exchange)
        return d_rows, None, None


@uncompiled  # Dynamo mistakes the handles of point-to-point messages for tensors
def to_heads(cp_rows: Tensor, exchange: HeadExchange) -> Tensor:
    """``[s, B, P] -> [S, B, p]``: this rank's columns of all tokens, in sequence order.

    If several ranks hold a column, its gradients are summed in fp32, in the order of
    the ranks.
    """
    return _ExchangeFunction.apply(cp_rows, exchange, True)


@uncompiled  # for the same reason as :func:`to_heads`
def to_sequence(hp_rows: Tensor, exchange: HeadExchange) -> Tensor:
    """``[S, B, p] -> [s, B, P]``: the inverse of :func:`to_heads` if ranks share no
    column."""
    return _ExchangeFunction.apply(hp_rows, exchange, False)

"""Chains of affine maps whose links lie on different ranks.

A piece of a sequence turns the state before it into the state after it by an affine map,

    S_out = through @ S_in + local,

and what a piece needs from the others is the state that enters it: the maps of all earlier pieces,
applied in order to zero. The backward asks the same of the transposed maps from the other end.

Three ways, with the same result up to rounding, each in a fixed order of operations and in fp32,
since rounding in a chain of maps compounds (how close a GPU comes says
:func:`~megatron_gdn.ops.state_maps.chains.follow`):

    gather_and_fold   one all-gather of all maps; every rank folds them up to its own nodes.
                      Traffic, memory and work grow with the number of ranks.
    share_and_fold    one all-to-all gives every rank all maps of a share of the chains, which it
                      folds from end to end; another returns the states. Traffic and memory do not
                      grow, but the fold has as many steps as a chain has nodes.
    prefix_scan       Hillis and Steele (1986): log2(nodes) rounds, in each of which a rank sends
                      the maps it has composed so far.

Legend: n nodes of a chain, h of them on this rank, M chains (one per sequence, batch row and value
head, say) over the same nodes, m of them in this rank's share, K rows of a state, V columns, X both
kinds of columns of a map.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.fp32_matmul import full_fp32_matmul
from ...ops.state_maps.chains import NONE, Steps, follow


class Nodes(NamedTuple):
    """Where the nodes of every chain live: node j is the ``slots[j]``-th of rank ``hosts[j]``.

    Every rank hosts the same number of nodes. Chains are followed in the order given here.
    """

    hosts: tuple[int, ...]
    slots: tuple[int, ...]

    def backwards(self) -> Nodes:
        return Nodes(self.hosts[::-1], self.slots[::-1])

    def of(self, rank: int) -> list[tuple[int, int]]:
        """This rank's nodes as (position in the chain, slot), in the chain's order."""
        return [
            (j, slot)
            for j, (host, slot) in enumerate(zip(self.hosts, self.slots, strict=True))
            if host == rank
        ]


def pack(local: Tensor, through: Tensor) -> Tensor:
    """``[..., K, V]`` and ``[..., K, K]`` side by side, as both chains below take them.

    A view, where they are the two parts of one contiguous tensor already.
    """
    V, X = local.shape[-1], local.shape[-1] + through.shape[-1]
    whole = (*local.shape[:-1], X)
    strides = tuple(math.prod(whole[d + 1 :]) for d in range(len(whole)))
    beside = through.storage_offset() == local.storage_offset() + V
    one = through.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    if one and beside and through.stride() == local.stride() == strides:
        return local.as_strided(whole, strides)
    return torch.cat([local, through], dim=-1)


def _apply(maps_MKX: Tensor, state_MKV: Tensor) -> Tensor:
    V = state_MKV.shape[-1]
    return torch.baddbmm(maps_MKX[..., :V], maps_MKX[..., V:], state_MKV)


def _compose(later_MKX: Tensor, earlier_MKX: Tensor, V: int) -> Tensor:
    """The map of ``earlier`` and then ``later``."""
    both_MKX = torch.bmm(later_MKX[..., V:], earlier_MKX)
    both_MKX[..., :V].add_(later_MKX[..., :V])  # `+=` would copy the sum onto itself
    return both_MKX


def gather_and_fold(maps: Tensor, value_dim: int, nodes: Nodes, group: dist.ProcessGroup) -> Tensor:
    """The states that enter this rank's nodes, from one all-gather.

    Args:
        maps: ``[h, M, K, V + K]`` contiguous, local beside through, of this rank's nodes by slot.
        value_dim: V.
        nodes: the chain, in the order in which it is followed.
        group: the ranks it lies on.

    Returns:
        ``[h, M, K, V]``; zero for the first node.
    """
    h, M, K, _ = maps.shape
    gathered = maps.new_empty(group.size() * h, *maps.shape[1:])
    dist.all_gather_into_tensor(gathered, maps, group=group)
    local, through = gathered.split([value_dim, K], dim=-1)
    steps = _steps_of_one(nodes, group.rank(), h, maps.device)
    return follow(local, through, steps, maps.new_empty(h, M, K, value_dim))


@lru_cache(maxsize=64)
def _steps_of_one(nodes: Nodes, rank: int, h: int, device: torch.device) -> Steps:
    """Along all nodes, by host, up to the last of ``rank``, whose states are written by slot."""
    wanted = dict(nodes.of(rank))
    last = max(wanted)
    places = [host * h + slot for host, slot in zip(*nodes, strict=True)][:last]
    steps = [(wanted.get(j, NONE), at) for j, at in enumerate(places)]
    return Steps.build([[*steps, (wanted[last], NONE)]], device)


def share_and_fold(maps: Tensor, value_dim: int, nodes: Nodes, group: dist.ProcessGroup) -> Tensor:
    """As :func:`gather_and_fold`, every rank folding a share of the M chains for all."""
    h, M, K, X = maps.shape
    size, rank = group.size(), group.rank()
    shares = [M // size + (r < M % size) for r in range(size)]
    theirs, mine = [h * share for share in shares], [h * shares[rank]] * size
    by_chain_MhKX = maps.transpose(0, 1).reshape(M * h, K, X)
    links, _ = exchange_rows(by_chain_MhKX, theirs, mine, group)
    states = maps.new_empty(size * shares[rank] * h, K, value_dim)
    if shares[rank]:
        local, through = _by_place(links, shares[rank], h).split([value_dim, K], dim=-1)
        steps = _steps_of_all(nodes, shares[rank], h, maps.device)
        follow(local, through, steps, _by_place(states, shares[rank], h))
    returned, _ = exchange_rows(states, mine, theirs, group)
    return returned.view(M, h, K, value_dim).transpose(0, 1).contiguous()


def _by_place(x: Tensor, m: int, h: int) -> Tensor:
    """``[ranks * m * h, K, .]`` as ``[places, m, K, .]``: a rank's places lie m * h apart."""
    K, X = x.shape[1:]
    return x.as_strided((len(x) - (m - 1) * h, m, K, X), (K * X, h * K * X, X, 1))


@lru_cache(maxsize=64)
def _steps_of_all(nodes: Nodes, m: int, h: int, device: torch.device) -> Steps:
    """Along all nodes; every state is written at the place of its node's map."""
    places = [host * m * h + slot for host, slot in zip(*nodes, strict=True)]
    return Steps.build([[*((at, at) for at in places[:-1]), (places[-1], NONE)]], device)


class _Round(NamedTuple):
    """One round of the scan on one rank: which slots are sent and received, in message order."""

    send_slots: tuple[int, ...]
    send_counts: tuple[int, ...]  # by rank
    receive_slots: tuple[int, ...]
    receive_counts: tuple[int, ...]


@lru_cache(maxsize=64)
def _rounds(nodes: Nodes, rank: int, size: int) -> tuple[_Round, ...]:
    count, distance, rounds = len(nodes.hosts), 1, []
    while distance < count:
        hops = [(j, j + distance) for j in range(count - distance)]
        # Both ends list the messages between them by the position of the receiving node.
        send = sorted(
            (nodes.hosts[b], b, nodes.slots[a]) for a, b in hops if nodes.hosts[a] == rank
        )
        receive = sorted(
            (nodes.hosts[a], b, nodes.slots[b]) for a, b in hops if nodes.hosts[b] == rank
        )
        counts = (
            tuple(sum(peer == other for peer, _, _ in messages) for other in range(size))
            for messages in (send, receive)
        )
        send_counts, receive_counts = counts
        rounds.append(
            _Round(
                tuple(slot for _, _, slot in send),
                send_counts,
                tuple(slot for _, _, slot in receive),
                receive_counts,
            )
        )
        distance *= 2
    return tuple(rounds)


def exchange_rows(
    rows: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> tuple[Tensor, dist.Work | None]:
    """Give ``send_counts[r]`` of the rows, in order, to rank r: point-to-point on NCCL.

    Returns the rows received, by sending rank, and the work to wait for when ``async_op``.
    """
    received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    work = dist.all_to_all_single(
        received,
        rows.contiguous(),
        output_split_sizes=list(receive_counts),
        input_split_sizes=list(send_counts),
        group=group,
        async_op=async_op,
    )
    return received, work


def prefix_scan(maps: Tensor, value_dim: int, nodes: Nodes, group: dist.ProcessGroup) -> Tensor:
    """As :func:`gather_and_fold`, in ceil(log2(n)) rounds of messages between two ranks.

    Before the round of distance d, a node knows the map of the up to d - 1 nodes before it
    (``before``) and that map followed by its own (``upto``). It sends the latter to the node d
    further on, for which those are the d nodes just before what that node knows.
    """
    rank = group.rank()
    upto = list(maps)
    before: list[Tensor | None] = [None] * len(upto)
    rounds = _rounds(nodes, rank, group.size())
    for number, turn in enumerate(rounds):
        last = number == len(rounds) - 1
        # The last round asks for states only: nobody will pass these maps on.
        sent = [upto[slot][..., :value_dim] if last else upto[slot] for slot in turn.send_slots]
        rows = torch.stack(sent) if sent else maps[:0, ..., : value_dim if last else None]
        received, _ = exchange_rows(rows, turn.send_counts, turn.receive_counts, group)
        with full_fp32_matmul(maps.device.type):
            for slot, earlier in zip(turn.receive_slots, received, strict=True):
                known = before[slot]
                if known is None:
                    before[slot] = earlier
                elif last:
                    before[slot] = _apply(known, earlier)
                else:
                    before[slot] = _compose(known, earlier, value_dim)
                if not last:
                    upto[slot] = _compose(maps[slot], before[slot], value_dim)
    zero = maps.new_zeros(*maps.shape[1:3], value_dim)
    return torch.stack([zero if x is None else x[..., :value_dim] for x in before])

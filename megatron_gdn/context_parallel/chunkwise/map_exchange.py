"""Chains of affine maps whose links lie on different ranks.

    S_out = through @ S_in + local                 what a piece does to a state

The state that enters a piece is zero, put through the maps of all earlier pieces in order. Two ways
compute it, in fp32 and in a fixed order, with the same result up to rounding:

    gather_and_fold   One all-gather of all maps; every rank folds them up to its own nodes.
                      Traffic, memory and work grow with the number of ranks.
    share_and_fold    One all-to-all gives every rank all maps of a share of the chains. The rank
                      folds these from end to end, and another all-to-all returns the states.

Legend: h nodes of a chain on this rank; M chains over the same nodes (one per sequence, batch row
and value head), m of them in this rank's share; X columns of a map (``local`` and ``through``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.host_tables import cached_by_stream
from ...ops.state_maps.state_map import NONE, Cuts, Steps, follow
from ..layouts import SequenceLayout


class Nodes(NamedTuple):
    """A chain in its order: node j is the ``slots[j]``-th of rank ``hosts[j]``."""

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


def chain_nodes(cp_size: int, layout: SequenceLayout) -> Nodes:
    """The rank of every fragment of a layout, in stream order."""
    ranks = tuple(range(cp_size))
    if layout is SequenceLayout.CONTIGUOUS:
        return Nodes(ranks, (0,) * cp_size)
    return Nodes(ranks + ranks[::-1], (0,) * cp_size + (1,) * cp_size)


def pack(local: Tensor, through: Tensor) -> Tensor:
    """``local`` and ``through`` side by side, ``[..., X]``; a view if memory holds them so."""
    V, X = local.shape[-1], local.shape[-1] + through.shape[-1]
    strides = local.stride()
    if strides == through.stride() and strides[-2:] == (X, 1):
        whole = (*local.shape[:-1], X)
        beside = through.storage_offset() == local.storage_offset() + V
        one = through.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        contiguous = tuple([math.prod(whole[d + 1 :]) for d in range(len(whole))])
        if one and beside and strides == contiguous:
            return local.as_strided(whole, strides)
    return torch.cat([local, through], dim=-1)


def gather_and_fold(
    maps: Tensor,
    value_dim: int,
    nodes: Nodes,
    group: dist.ProcessGroup,
    cuts: Cuts | None = None,
) -> Tensor:
    """The states that enter this rank's nodes, ``[h, M, K, V]``; zero for the first node.

    ``maps``: ``[h, M, K, X]`` contiguous, local beside through, of this rank's nodes by slot.
    """
    h, M, K, _ = maps.shape
    gathered = maps.new_empty(group.size() * h, *maps.shape[1:])
    dist.all_gather_into_tensor(gathered, maps, group=group)
    local, through = gathered[..., :value_dim], gathered[..., value_dim:]
    steps = _steps_of_one(nodes, group.rank(), h, maps.device)
    return follow(local, through, steps, maps.new_empty(h, M, K, value_dim), None, cuts)


@cached_by_stream(64)
def _steps_of_one(nodes: Nodes, rank: int, h: int, device: torch.device) -> Steps:
    """Steps up to the last node of ``rank``; its states are written by slot."""
    wanted = dict(nodes.of(rank))
    places = [host * h + slot for host, slot in zip(nodes.hosts, nodes.slots, strict=True)]
    last = max(wanted)
    passed = [(wanted.get(j, NONE), place) for j, place in enumerate(places[:last])]
    return Steps.build([[*passed, (wanted[last], NONE)]], device)


def share_and_fold(
    maps: Tensor,
    value_dim: int,
    nodes: Nodes,
    group: dist.ProcessGroup,
    cuts: Cuts | None = None,
) -> Tensor:
    """As :func:`gather_and_fold`, but every rank folds a share of the M chains for all ranks."""
    h, M, K, X = maps.shape
    n = group.size()
    shares = [M // n + (r < M % n) for r in range(n)]
    m = shares[group.rank()]
    theirs, mine = [h * share for share in shares], [h * m] * n
    by_chain_MhKX = maps.transpose(0, 1).reshape(M * h, K, X)
    links = exchange_rows(by_chain_MhKX, theirs, mine, group)
    states = maps.new_empty(n * m * h, K, value_dim)
    if m:
        local, through = _by_place(links, m, h).split([value_dim, X - value_dim], dim=-1)
        steps = _steps_of_share(nodes, m, h, maps.device)
        follow(local, through, steps, _by_place(states, m, h), None, cuts)
    returned = exchange_rows(states, mine, theirs, group)
    return returned.view(M, h, K, value_dim).transpose(0, 1).contiguous()


def _by_place(x: Tensor, m: int, h: int) -> Tensor:
    """``[ranks * m * h, K, .]`` as ``[places, m, K, .]``; places of one chain lie m * h apart."""
    K, X = x.shape[1:]
    return x.as_strided((len(x) - (m - 1) * h, m, K, X), (K * X, h * K * X, X, 1))


@cached_by_stream(64)
def _steps_of_share(nodes: Nodes, m: int, h: int, device: torch.device) -> Steps:
    """Steps over all nodes; every state is written where its node's map was."""
    places = [host * m * h + slot for host, slot in zip(nodes.hosts, nodes.slots, strict=True)]
    return Steps.build([[*((j, j) for j in places[:-1]), (places[-1], NONE)]], device)


def exchange_rows(
    rows: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Send ``send_counts[r]`` rows to each rank r, in order; return those received, by sender."""
    received, counts = rows.new_empty(sum(receive_counts), *rows.shape[1:]), list(receive_counts)
    dist.all_to_all_single(received, rows.contiguous(), counts, list(send_counts), group=group)
    return received

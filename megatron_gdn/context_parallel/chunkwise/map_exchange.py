"""Exchanges the maps of pieces, and computes the states that enter pieces from the
maps.

    S_out = through @ S_in + local                 the map of a piece

The maps of all earlier pieces of a chain, applied to a zero state, give the state that
enters a piece. One all-to-all gives every rank all maps of its share of the chains. The
rank applies the maps of each chain one after the other, in fp32, and another all-to-all
returns the states.

Legend: h nodes of a chain on this rank; M chains over the same nodes (one per sequence,
batch row and value head), m chains in this rank's share; X columns of a map (``local``
and ``through``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.host_tables import cached_by_stream
from ...ops.state_maps.state_map import NONE, Cuts, Steps, follow_chains
from .fragments import Nodes


def rows_by_chain(local: Tensor, through: Tensor, h: int) -> Tensor:
    """The maps of h nodes, ``local`` beside ``through``, chain after chain.

    From ``[h * chains, H, K, .]`` to ``[chains * H, h, K, X]``, contiguous, in one copy;
    without a copy if h is 1 and both lie side by side in one memory.
    """
    joined = joined_view(local, through)
    apart = (local, through) if joined is None else (joined,)
    # from [h * chains, H, K, .] to [chains, H, h, K, .]
    by_chain = [x.unflatten(0, (h, -1)).movedim(0, 2) for x in apart]
    if joined is None:
        rows = torch.cat(by_chain, dim=-1)
    else:
        rows = by_chain[0].contiguous()
    return rows.flatten(0, 1)


def joined_view(local: Tensor, through: Tensor) -> Tensor | None:
    """A view of ``local`` beside ``through``; None if they are not adjacent in one
    memory."""
    V, X = local.shape[-1], local.shape[-1] + through.shape[-1]
    strides = local.stride()
    if strides == through.stride() and strides[-2:] == (X, 1):
        whole = (*local.shape[:-1], X)
        beside = through.storage_offset() == local.storage_offset() + V
        same_memory = (
            through.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        )
        contiguous = tuple([math.prod(whole[d + 1 :]) for d in range(len(whole))])
        if same_memory and beside and strides == contiguous:
            return local.as_strided(whole, strides)
    return None


class _Share(NamedTuple):
    """A rank's share of M chains over h nodes per rank, and what it exchanges."""

    send_counts: tuple[int, ...]  # rows to each rank
    receive_counts: tuple[int, ...]
    m: int  # chains in the share
    steps: Steps | None  # None: the share has no chain


@cached_by_stream(64)
def _share_of(
    nodes: Nodes, M: int, h: int, ranks: int, rank: int, device: torch.device
) -> _Share:
    """The chains of which ``rank`` folds the maps, and how many rows it sends and
    receives."""
    shares = [M // ranks + (r < M % ranks) for r in range(ranks)]
    m = shares[rank]
    steps = None
    if m:
        steps = _steps_of_share(nodes, m, h, device)
    return _Share(tuple(h * x for x in shares), (h * m,) * ranks, m, steps)


def _steps_of_share(nodes: Nodes, m: int, h: int, device: torch.device) -> Steps:
    """Steps from node to node. A node of m chains is at place host * m * h + slot of
    the view."""
    hosts = zip(nodes.hosts, nodes.slots, strict=True)
    places = [host * m * h + slot for host, slot in hosts]
    chain = [(j, j) for j in places[:-1]] + [(places[-1], NONE)]
    return Steps.build([chain], device)


def states_entering_nodes(
    maps: Tensor,
    value_dim: int,
    nodes: Nodes,
    group: dist.ProcessGroup,
    cuts: Cuts | None = None,
) -> Tensor:
    """States ``[h, M, K, V]`` that enter this rank's h nodes of M chains; zero for the
    first node.

    ``maps`` ``[M, h, K, X]``: maps of this rank's nodes in the order of
    ``nodes.slots``, with the ``value_dim`` columns of ``local`` first. ``cuts`` marks
    nodes through which no state passes.
    """
    M, h, K, X = maps.shape
    ranks = group.size()
    share = _share_of(nodes, M, h, ranks, group.rank(), maps.device)
    send_counts, receive_counts, m, steps = share
    links = exchange_rows(maps.flatten(0, 1), send_counts, receive_counts, group)
    states = maps.new_empty(ranks * m * h, K, value_dim)
    if steps is not None:
        local, through = _view_by_place(links, m, h).split(
            [value_dim, X - value_dim], dim=-1
        )
        follow_chains(local, through, steps, _view_by_place(states, m, h), None, cuts)
    returned = exchange_rows(states, receive_counts, send_counts, group)
    return returned.view(M, h, K, value_dim).transpose(0, 1).contiguous()


def _view_by_place(x: Tensor, m: int, h: int) -> Tensor:
    """View ``x [ranks * m * h, K, .]`` as ``[places, m, K, .]``; entry [p, c] is row p
    + c h."""
    K, X = x.shape[1:]
    return x.as_strided((len(x) - (m - 1) * h, m, K, X), (K * X, h * K * X, X, 1))


def exchange_rows(
    rows: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Send ``send_counts[r]`` rows to each rank r; return ``receive_counts[r]`` rows
    from each."""
    received = rows.new_empty(sum(receive_counts), *rows.shape[1:])
    counts = list(receive_counts)
    dist.all_to_all_single(
        received, rows.contiguous(), counts, list(send_counts), group=group
    )
    return received

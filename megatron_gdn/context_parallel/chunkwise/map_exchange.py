"""Exchanges the maps of pieces, and computes the states that enter pieces from the
maps.

    S_out = through @ S_in + local                 the map of a piece

The maps of all earlier pieces of a chain, applied to a zero state, give the state that
enters a piece. One all-to-all gives every rank all maps of its share of the chains. The
rank applies the maps of each chain one after the other, in fp32, and another all-to-all
returns the states. If a state passes no node, the state that enters a node is ``local``
of the node before; then one all-to-all sends it there.

Legend: M states that follow the same paths (one per sequence, batch row and value
head), m of them in this rank's share; h nodes of this rank that send, or that receive;
X columns of a map (``local`` and ``through``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.host_tables import cached_by_stream
from ...ops.state_maps.state_map import NONE, Steps, follow_chains


class Paths(NamedTuple):
    """Which nodes states leave and enter: the first node of a path makes a state, the
    last one gets it, and the nodes between get and change it."""

    hosts: tuple[int, ...]  # the rank of each node
    nodes: tuple[tuple[int, ...], ...]  # of each path, in order, at least two

    def backwards(self) -> Paths:
        """The paths of the states' gradients."""
        return Paths(self.hosts, tuple(path[::-1] for path in self.nodes))

    @property
    def sending(self) -> tuple[int, ...]:
        """All nodes that a state leaves."""
        return tuple(sorted(j for path in self.nodes for j in path[:-1]))

    @property
    def receiving(self) -> tuple[int, ...]:
        """All nodes that a state enters."""
        return tuple(sorted(j for path in self.nodes for j in path[1:]))

    @property
    def direct(self) -> bool:
        """Whether no state passes a node."""
        return all(len(path) == 2 for path in self.nodes)

    def sent_by(self, rank: int) -> tuple[int, ...]:
        """The nodes of ``rank`` that a state leaves, in the order of what it sends."""
        mine = [j for j in self.sending if self.hosts[j] == rank]
        if self.direct:
            rank_after = {path[0]: self.hosts[path[1]] for path in self.nodes}
            mine.sort(key=rank_after.__getitem__)
        return tuple(mine)

    def received_by(self, rank: int) -> tuple[int, ...]:
        """The nodes of ``rank`` that a state enters, in the order of what it
        receives."""
        return self.backwards().sent_by(rank)


class _Route(NamedTuple):
    """What a rank sends and receives for M states; counts are rows of one head's map or
    state."""

    direct: bool  # whether states go to the next node at once, and no maps are sent
    # of the M states, those whose maps each rank applies
    shares: tuple[int, ...]
    sent: tuple[int, ...]  # maps (``direct``: states) to each rank
    received: tuple[int, ...]
    states_sent: tuple[int, ...]
    states_received: tuple[int, ...]
    # from node to node, in the order of the maps and states here; None: no maps here
    steps: Steps | None


@cached_by_stream(64)
def _route_of(
    paths: Paths, M: int, ranks: int, rank: int, device: torch.device
) -> _Route:
    """The route of ``rank`` for M states."""
    if paths.direct:
        to_rank = [0] * ranks
        from_rank = [0] * ranks
        for source, target in paths.nodes:
            source_rank = paths.hosts[source]
            target_rank = paths.hosts[target]
            to_rank[target_rank] += M * (source_rank == rank)
            from_rank[source_rank] += M * (target_rank == rank)
        return _Route(True, (), tuple(to_rank), tuple(from_rank), (), (), None)
    shares = tuple(M // ranks + (r < M % ranks) for r in range(ranks))
    m = shares[rank]
    of_maps = [len(paths.sent_by(r)) for r in range(ranks)]
    of_states = [len(paths.received_by(r)) for r in range(ranks)]
    steps = None
    if m:
        steps = _steps_of(paths, ranks, device)
    return _Route(
        direct=False,
        shares=shares,
        sent=tuple(of_maps[rank] * share for share in shares),
        received=tuple(count * m for count in of_maps),
        states_sent=tuple(count * m for count in of_states),
        states_received=tuple(of_states[rank] * share for share in shares),
        steps=steps,
    )


def _steps_of(paths: Paths, ranks: int, device: torch.device) -> Steps:
    """Steps along the paths; maps and states lie rank after rank, node after node."""
    maps = [j for r in range(ranks) for j in paths.sent_by(r)]
    states = [j for r in range(ranks) for j in paths.received_by(r)]
    chains = []
    for first, *between, last in paths.nodes:
        chain = [(NONE, maps.index(first))]
        chain += [(states.index(j), maps.index(j)) for j in between]
        chain += [(states.index(last), NONE)]
        chains.append(chain)
    return Steps.build(chains, device)


def states_entering_nodes(
    local: Tensor,
    through: Tensor | None,
    paths: Paths,
    group: dist.ProcessGroup,
    cuts: Tensor | None = None,
) -> Tensor:
    """States ``[h, M, K, V]`` that enter this rank's nodes ``paths.received_by``.

    ``local``, ``through``: the maps ``[h, M, K, .]`` of this rank's nodes
    ``paths.sent_by``; of ``paths.direct`` no ``through`` is read. ``cuts``: int32 on
    the device, 1 for each node of the only path that no state passes.
    """
    _, M, K, V = local.shape
    rank = group.rank()
    route = _route_of(paths, M, group.size(), rank, local.device)
    if route.direct:
        rows = local.flatten(0, 1)
        states = exchange_rows(rows, route.sent, route.received, group)
        return states.unflatten(0, (-1, M))
    assert through is not None
    rows = rows_by_rank(local, through, route.shares)
    links = exchange_rows(rows, route.sent, route.received, group)
    states = local.new_empty(sum(route.states_sent), K, V)
    if route.steps is not None:
        m = route.shares[rank]
        X = links.shape[-1]
        of_local, of_through = links.view(-1, m, K, X).split([V, X - V], dim=-1)
        out = states.view(-1, m, K, V)
        follow_chains(of_local, of_through, route.steps, out, None, cuts)
    returned = exchange_rows(states, route.states_sent, route.states_received, group)
    h = len(returned) // M
    if h == 1:
        return returned[None]
    by_rank = returned.split(list(route.states_received))
    shaped = [
        x.view(h, share, K, V) for x, share in zip(by_rank, route.shares, strict=True)
    ]
    return torch.cat(shaped, dim=1)


def rows_by_rank(local: Tensor, through: Tensor, shares: Sequence[int]) -> Tensor:
    """Lay ``local`` beside ``through``, maps ``[h, M, K, .]``, in the order of the
    receiving ranks: the maps of rank 0's ``shares[0]`` states, for all h nodes, then the
    maps of rank 1's ``shares[1]`` states, and so on.

    The result ``[h * M, K, X]`` is contiguous, made in one copy if the shares are
    equal; without a copy if h is 1 and both lie side by side in one memory.
    """
    joined = joined_view(local, through)
    apart = (local, through) if joined is None else (joined,)
    equal = len(local) > 1 and len(set(shares)) == 1
    if equal:
        apart = [x.unflatten(1, (len(shares), -1)).transpose(0, 1) for x in apart]
    if joined is None:
        rows = torch.cat(apart, dim=-1)
    else:
        rows = apart[0]
    if equal:
        return rows.contiguous().flatten(0, 2)
    if len(local) <= 1:
        return rows.flatten(0, 1)
    return torch.cat([x.flatten(0, 1) for x in rows.split(list(shares), dim=1)])


def joined_view(local: Tensor, through: Tensor) -> Tensor | None:
    """A view of ``local`` beside ``through``; None if they are not adjacent in one
    memory."""
    V, X = local.shape[-1], local.shape[-1] + through.shape[-1]
    strides = local.stride()
    if strides == through.stride() and strides[-2:] == (X, 1):
        whole = local.shape[:-1] + (X,)
        beside = through.storage_offset() == local.storage_offset() + V
        same_memory = (
            through.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        )
        contiguous = tuple([math.prod(whole[d + 1 :]) for d in range(len(whole))])
        if same_memory and beside and strides == contiguous:
            return local.as_strided(whole, strides)
    return None


def exchange_rows(
    rows: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Send ``send_counts[r]`` rows to each rank r; return ``receive_counts[r]`` rows
    from each."""
    received = rows.new_empty((sum(receive_counts),) + rows.shape[1:])
    counts = list(receive_counts)
    dist.all_to_all_single(
        received, rows.contiguous(), counts, list(send_counts), group=group
    )
    return received

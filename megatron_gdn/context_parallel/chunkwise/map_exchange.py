"""Exchanges the maps of pieces, and computes the states that enter pieces from the
maps.

    S_out = through @ S_in + local                 the map of a piece

A *node* is one fragment of a chain. A *path* lists the nodes through which a state
goes, in order. The state is zero before the first node.

To get the state that enters a piece, the maps of all earlier pieces of the chain are
applied to a zero state. The M states of all chains and heads are divided among the
ranks. One all-to-all gives every rank the maps of its share of the M states. The rank
applies the maps along each chain one after the other, in fp32, and another all-to-all
returns the states. If every path has two nodes, S_in is zero in the first node, so
S_out is ``local``. Then one all-to-all sends these states to the second nodes, and no
maps.

Legend: M states that follow the same paths (one per chain and value head; chains of all
batch rows), m of them in this rank's share; h nodes of this rank that send, or that
receive; X columns of a map (``local`` and ``through``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.host_tables import cached_by_stream
from ...ops.state_maps.state_map import NO_INDEX, ChainSteps, follow_chains


class StatePaths(NamedTuple):
    """The nodes that states leave and enter, the same in every chain.

    A state leaves the first node of a path, passes the nodes between, and enters the
    last node.
    """

    ranks: tuple[int, ...]  # the rank of each node of a chain
    # the nodes of each path, in order, at least two
    nodes_of_paths: tuple[tuple[int, ...], ...]

    def reversed(self) -> StatePaths:
        """The paths of the states' gradients, from the last node to the first."""
        return StatePaths(self.ranks, tuple(path[::-1] for path in self.nodes_of_paths))

    @property
    def sending_nodes(self) -> tuple[int, ...]:
        """All nodes that a state leaves, in ascending order."""
        return tuple(sorted(j for path in self.nodes_of_paths for j in path[:-1]))

    @property
    def receiving_nodes(self) -> tuple[int, ...]:
        """All nodes that a state enters, in ascending order."""
        return tuple(sorted(j for path in self.nodes_of_paths for j in path[1:]))

    @property
    def is_direct(self) -> bool:
        """Whether every path has two nodes, so that no ``through`` is needed."""
        return all(len(path) == 2 for path in self.nodes_of_paths)

    def sending_nodes_of(self, rank: int) -> tuple[int, ...]:
        """The nodes of ``rank`` that a state leaves, in the order in which ``rank``
        sends their maps. If ``is_direct``, the order is that of the receiving ranks."""
        own_nodes = [j for j in self.sending_nodes if self.ranks[j] == rank]
        if self.is_direct:
            receiving_rank = {
                path[0]: self.ranks[path[1]] for path in self.nodes_of_paths
            }
            own_nodes.sort(key=receiving_rank.__getitem__)
        return tuple(own_nodes)

    def receiving_nodes_of(self, rank: int) -> tuple[int, ...]:
        """The nodes of ``rank`` that a state enters, in the order in which ``rank``
        receives the states."""
        return self.reversed().sending_nodes_of(rank)


class _MapRoute(NamedTuple):
    """What a rank sends and receives for M states.

    Entry r of a ``*_counts``: how many maps, or states, of one head this rank sends to
    rank r, or receives from rank r.
    """

    # `StatePaths.is_direct`: one exchange sends the states themselves. No maps are
    # sent, and no second exchange follows.
    is_direct: bool
    # how many of the M states each rank computes
    states_per_rank: tuple[int, ...]
    map_send_counts: tuple[int, ...]  # if ``is_direct``, counts of states
    map_receive_counts: tuple[int, ...]
    state_send_counts: tuple[int, ...]
    state_receive_counts: tuple[int, ...]
    # How to apply the received maps; None if ``is_direct``, or this rank has no share.
    chain_steps: ChainSteps | None


@cached_by_stream(64)
def _map_route(
    paths: StatePaths, M: int, ranks: int, rank: int, device: torch.device
) -> _MapRoute:
    """The route of ``rank``, one of ``ranks``, for M states; ``chain_steps`` are on
    ``device``.

    The M states are divided into ``ranks`` shares; rank r computes the states of share
    r.
    """
    if paths.is_direct:
        to_rank = [0] * ranks
        from_rank = [0] * ranks
        for source, target in paths.nodes_of_paths:
            source_rank = paths.ranks[source]
            target_rank = paths.ranks[target]
            to_rank[target_rank] += M * (source_rank == rank)
            from_rank[source_rank] += M * (target_rank == rank)
        return _MapRoute(
            is_direct=True,
            states_per_rank=(),
            map_send_counts=tuple(to_rank),
            map_receive_counts=tuple(from_rank),
            state_send_counts=(),
            state_receive_counts=(),
            chain_steps=None,
        )
    shares = tuple(M // ranks + (r < M % ranks) for r in range(ranks))
    m = shares[rank]
    # of each rank, the number of nodes that a state leaves, and enters
    sending_counts = [len(paths.sending_nodes_of(r)) for r in range(ranks)]
    receiving_counts = [len(paths.receiving_nodes_of(r)) for r in range(ranks)]
    steps = None
    if m:
        steps = _steps_of(paths, ranks, device)
    return _MapRoute(
        is_direct=False,
        states_per_rank=shares,
        map_send_counts=tuple(sending_counts[rank] * share for share in shares),
        map_receive_counts=tuple(nodes * m for nodes in sending_counts),
        state_send_counts=tuple(nodes * m for nodes in receiving_counts),
        state_receive_counts=tuple(receiving_counts[rank] * share for share in shares),
        chain_steps=steps,
    )


def _steps_of(paths: StatePaths, ranks: int, device: torch.device) -> ChainSteps:
    """The steps that apply all ranks' maps along the paths.

    Maps are indexed by rank, then by `StatePaths.sending_nodes_of`; states by rank,
    then by `StatePaths.receiving_nodes_of`.
    """
    maps = [j for r in range(ranks) for j in paths.sending_nodes_of(r)]
    states = [j for r in range(ranks) for j in paths.receiving_nodes_of(r)]
    # A step is (index of the state to write, index of the map to apply after that).
    # NO_INDEX: the step writes no state, or applies no map.
    steps_of_paths = []
    for first, *between, last in paths.nodes_of_paths:
        steps = [(NO_INDEX, maps.index(first))]
        steps += [(states.index(j), maps.index(j)) for j in between]
        steps += [(states.index(last), NO_INDEX)]
        steps_of_paths.append(steps)
    return ChainSteps.build(steps_of_paths, device)


def states_entering_nodes(
    local: Tensor,
    through: Tensor | None,
    paths: StatePaths,
    group: dist.ProcessGroup,
    cuts: Tensor | None = None,
) -> Tensor:
    """States ``[h, M, K, V]`` that enter this rank's nodes
    ``paths.receiving_nodes_of(rank)``, in this order; a collective over ``group``.

    ``local``, ``through``: the maps ``[h, M, K, .]`` of the nodes
    ``paths.sending_nodes_of(rank)``; ``through`` is not read if ``paths.is_direct``.
    ``cuts``: int32 ``[nodes]`` on the device, for a single path: 1 at each node that no
    state passes.
    """
    _, M, K, V = local.shape
    rank = group.rank()
    route = _map_route(paths, M, group.size(), rank, local.device)
    if route.is_direct:
        rows = local.flatten(0, 1)
        states = exchange_rows(
            rows, route.map_send_counts, route.map_receive_counts, group
        )
        return states.unflatten(0, (-1, M))
    assert through is not None
    rows = pack_maps_by_rank(local, through, route.states_per_rank)
    maps = exchange_rows(rows, route.map_send_counts, route.map_receive_counts, group)
    states = local.new_empty(sum(route.state_send_counts), K, V)
    if route.chain_steps is not None:
        m = route.states_per_rank[rank]
        X = maps.shape[-1]
        all_local, all_through = maps.view(-1, m, K, X).split([V, X - V], dim=-1)
        out = states.view(-1, m, K, V)
        # None: every chain begins with a zero state
        follow_chains(all_local, all_through, route.chain_steps, out, None, cuts)
    returned = exchange_rows(
        states, route.state_send_counts, route.state_receive_counts, group
    )
    h = len(returned) // M
    if h == 1:  # the shares, joined in rank order, are the M states
        return returned[None]
    # Each rank returns its share of the M states, for all h nodes.
    by_rank = returned.split(list(route.state_receive_counts))
    shaped = [
        x.view(h, share, K, V)
        for x, share in zip(by_rank, route.states_per_rank, strict=True)
    ]
    return torch.cat(shaped, dim=1)


def pack_maps_by_rank(local: Tensor, through: Tensor, shares: Sequence[int]) -> Tensor:
    """Lay ``local`` beside ``through``, maps ``[h, M, K, .]``, and sort them by the
    receiving rank. The maps of rank 0's ``shares[0]`` states come first, for all h
    nodes, then the maps of rank 1's ``shares[1]`` states, and so on.

    The result ``[h * M, K, X]`` is contiguous. It takes one copy if the shares are
    equal, and none if h is 1 and :func:`joined_view` gives a view.
    """
    joined = joined_view(local, through)
    tensors = (local, through) if joined is None else (joined,)
    transpose = len(local) > 1 and len(set(shares)) == 1
    if transpose:  # [h, M, ...] -> [ranks, h, m, ...]
        tensors = [x.unflatten(1, (len(shares), -1)).transpose(0, 1) for x in tensors]
    if joined is None:
        rows = torch.cat(tensors, dim=-1)
    else:
        rows = tensors[0]
    if transpose:
        return rows.contiguous().flatten(0, 2)
    if len(local) <= 1:
        return rows.flatten(0, 1)
    return torch.cat([x.flatten(0, 1) for x in rows.split(list(shares), dim=1)])


def joined_view(local: Tensor, through: Tensor) -> Tensor | None:
    """A view ``[h, M, K, X]`` of ``local`` beside ``through``; None if they are not the
    columns of one contiguous tensor. A rule may write ``local`` and ``through`` into
    one tensor; then no copy is needed before they are sent."""
    V, X = local.shape[-1], local.shape[-1] + through.shape[-1]
    strides = local.stride()
    if strides == through.stride() and strides[-2:] == (X, 1):
        joined_shape = local.shape[:-1] + (X,)
        beside = through.storage_offset() == local.storage_offset() + V
        same_memory = (
            through.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
        )
        contiguous_strides = tuple(
            [math.prod(joined_shape[d + 1 :]) for d in range(len(joined_shape))]
        )
        if same_memory and beside and strides == contiguous_strides:
            return local.as_strided(joined_shape, strides)
    return None


def exchange_rows(
    rows: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
) -> Tensor:
    """Send ``send_counts[r]`` of ``rows`` to each rank r; return ``receive_counts[r]``
    rows from each rank r, in the order of the ranks."""
    received = rows.new_empty((sum(receive_counts),) + rows.shape[1:])
    counts = list(receive_counts)
    dist.all_to_all_single(
        received, rows.contiguous(), counts, list(send_counts), group=group
    )
    return received

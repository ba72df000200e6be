"""Chains of affine maps whose links lie on different ranks.

A piece of a sequence turns the state before it into the state after it by an affine map,

    S_out = through @ S_in + local,

and a piece needs the state that enters it: the maps of all earlier pieces, applied in order to
zero. The backward follows the transposed maps from the other end.

There are two ways, with the same result up to rounding. Each has a fixed order of operations, in
fp32, since rounding compounds in a chain of maps (for the accuracy on a GPU see
:func:`~megatron_gdn.ops.state_maps.chains.follow`):

    gather_and_fold   One all-gather of all maps; every rank folds them up to its own nodes.
                      Traffic, memory and work grow with the number of ranks.
    share_and_fold    One all-to-all gives every rank all maps of a share of the chains. The rank
                      folds these from end to end, and another all-to-all returns the states.
                      Traffic and memory do not grow; the fold has one step per node of a chain.

Over several machines share_and_fold may go in two levels. The nodes of a chain that follow each
other on one machine are a *leg*:

    1. within a machine, ranks share out the chains, and each folds the maps of a leg to one map;
    2. across machines, ranks with the same share do the same with the maps of the legs, which gives
       the states that enter the legs;
    3. from these states each rank follows its legs, and the states return within the machine.

A chain has steps for a leg, for all legs and for a leg again, not for all nodes, and maps of legs
alone cross machines.

Legend: h nodes of a chain on this rank; M chains over the same nodes (for example one per sequence,
batch row and value head), m of them in this rank's share; K rows of a state, V columns, X columns
of a map (``local`` and ``through`` together); n ranks per machine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, groupby, pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.host_tables import cached_by_stream
from ...ops.state_maps.chains import IDENTITY, follow
from ...ops.state_maps.steps import NONE, Steps


class Nodes(NamedTuple):
    """The place of every node of a chain: node j is the ``slots[j]``-th of rank ``hosts[j]``.

    Every rank hosts the same number of nodes. Chains are followed in this order.

    No state passes a node in ``cuts`` (positions in the chain): ``local`` alone leaves it. Its
    ``through`` is zero and is never multiplied, since 0 * NaN would carry NaN from one document to
    another.
    """

    hosts: tuple[int, ...]
    slots: tuple[int, ...]
    cuts: frozenset[int] = frozenset()

    def backwards(self) -> Nodes:
        last = len(self.hosts) - 1
        return Nodes(self.hosts[::-1], self.slots[::-1], frozenset(last - j for j in self.cuts))

    def of(self, rank: int) -> list[tuple[int, int]]:
        """This rank's nodes as (position in the chain, slot), in the chain's order."""
        return [
            (j, slot)
            for j, (host, slot) in enumerate(zip(self.hosts, self.slots, strict=True))
            if host == rank
        ]

    def legs(self, n: int) -> list[range]:
        """Stretches of the chain whose nodes are on the same n successive ranks, and in one slot.

        The whole chain if n are all ranks.
        """
        if n > max(self.hosts):
            return [range(len(self.hosts))]
        place = list(zip([host // n for host in self.hosts], self.slots, strict=True))
        lengths = [len(list(same)) for _, same in groupby(place)]
        ends = [0, *accumulate(lengths)]
        return [range(a, b) for a, b in pairwise(ends)]

    def of_legs(self, n: int) -> Nodes:
        """The chain whose nodes are the legs: every n successive ranks are one host."""
        legs = self.legs(n)
        return Nodes(
            tuple(self.hosts[leg[0]] // n for leg in legs),
            tuple(self.slots[leg[0]] for leg in legs),
            frozenset(r for r, leg in enumerate(legs) if not self.cuts.isdisjoint(leg)),
        )


def pack(local: Tensor, through: Tensor) -> Tensor:
    """A map's ``local`` and ``through`` side by side, ``[..., X]``, as both ways below take them.

    A view if they already are the two parts of one contiguous tensor.
    """
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


def gather_and_fold(maps: Tensor, value_dim: int, nodes: Nodes, group: dist.ProcessGroup) -> Tensor:
    """The states that enter this rank's nodes, from one all-gather.

    Args:
        maps: ``[h, M, K, X]`` contiguous, local beside through, of this rank's nodes by slot.
        value_dim: V.
        nodes: the chain, in the order in which it is followed.
        group: the ranks it lies on.

    Returns:
        ``[h, M, K, V]``; zero for the first node.
    """
    h, M, K, _ = maps.shape
    gathered = maps.new_empty(group.size() * h, *maps.shape[1:])
    dist.all_gather_into_tensor(gathered, maps, group=group)
    local, through = gathered[..., :value_dim], gathered[..., value_dim:]
    steps = _steps_of_one(nodes, group.rank(), h, maps.device)
    return follow(local, through, steps, maps.new_empty(h, M, K, value_dim))


@cached_by_stream(64)
def _steps_of_one(nodes: Nodes, rank: int, h: int, device: torch.device) -> Steps:
    """Steps over all nodes up to the last one of ``rank``; its states are written by slot."""
    wanted = dict(nodes.of(rank))
    places = [host * h + slot for host, slot in zip(nodes.hosts, nodes.slots, strict=True)]
    return Steps.build(_from_zero(places, wanted, nodes.cuts), device)


Stretch = list[tuple[int, int]]


def _from_zero(
    places: Sequence[int], targets: dict[int, int], cuts: frozenset[int]
) -> list[Stretch]:
    """The steps of a chain that no state enters: a cut at its first node changes nothing."""
    opening, others = _stretches(range(len(places)), places, targets, cuts - {0})
    return [opening, *others] if opening else others


def _stretches(
    leg: range, places: Sequence[int], targets: dict[int, int], cuts: frozenset[int]
) -> tuple[Stretch, list[Stretch]]:
    """The steps along the nodes ``leg`` of a chain: from its first node, and from each cut.

    From zero the first map is never multiplied, so a cut costs no product. Every stretch ends with
    the last state that is wanted in it. The state that enters the next cut's node belongs to it
    too. Stretches without a wanted state are left out; the first is empty then.

    Args:
        places: of every node, where its map is.
        targets: by node, where the state that enters it goes.
    """
    ends = [*sorted(cuts.intersection(leg)), leg[-1]]
    others = []
    for cut, stop in pairwise(ends):
        # The state that enters a cut node was made by the stretch before it.
        after = _stretch(range(cut + 1, stop + 1), places, targets)
        if after:
            others.append([(NONE, places[cut]), *after])
    return _stretch(range(leg[0], ends[0] + 1), places, targets), others


def _stretch(leg: range, places: Sequence[int], targets: dict[int, int]) -> Stretch:
    """From the state that enters the first of these nodes to the last state that is wanted."""
    last = max(targets.keys() & leg, default=None)
    if last is None:
        return []
    passed = range(leg[0], last)
    return [*((targets.get(j, NONE), places[j]) for j in passed), (targets[last], NONE)]


def share_and_fold(
    maps: Tensor,
    value_dim: int,
    nodes: Nodes,
    group: dist.ProcessGroup,
    per_machine: int | None = None,
) -> Tensor:
    """As :func:`gather_and_fold`, but every rank folds a share of the M chains for all ranks.

    Args:
        per_machine: n, a divisor of the ranks: in two levels, within n successive ranks and then
            across. None: in one level.
    """
    ranks = range(group.size())
    return _share_and_fold(maps, value_dim, nodes, group, ranks, per_machine or len(ranks))


def _share_and_fold(
    maps: Tensor, value_dim: int, nodes: Nodes, group: dist.ProcessGroup, ranks: range, n: int
) -> Tensor:
    """Over these ranks of the group, which ``nodes.hosts`` numbers from 0; n share each leg."""
    h, M, K, X = maps.shape
    machine, own = divmod(ranks.index(group.rank()), n)
    beside, across = ranks[machine * n : (machine + 1) * n], ranks[own::n]
    shares = [M // n + (r < M % n) for r in range(n)]
    m = shares[own]
    theirs = _counts([h * share for share in shares], beside, group)
    mine = _counts([h * m] * n, beside, group)
    by_chain_MhKX = maps.transpose(0, 1).reshape(M * h, K, X)
    links, _ = exchange_rows(by_chain_MhKX, theirs, mine, group)
    states, entering = maps.new_empty(n * m * h, K, value_dim), None
    steps = _steps_of_share(nodes, machine, n, m, h, maps.device)
    local, through = _by_place(links, m, h).split([value_dim, X - value_dim], dim=-1)
    if steps.of_legs is not None:
        legs = maps.new_empty(h, m, K, X)
        if m:
            follow(local, through, steps.of_legs, legs, IDENTITY)
        entering = _share_and_fold(legs, value_dim, steps.legs, group, across, len(across))
    if m:
        follow(local, through, steps.of_nodes, _by_place(states, m, h), steps.start(entering))
    returned, _ = exchange_rows(states, mine, theirs, group)
    return returned.view(M, h, K, value_dim).transpose(0, 1).contiguous()


def _counts(counts: list[int], ranks: range, group: dist.ProcessGroup) -> list[int]:
    """Rows for every rank of the group: none for others than ``ranks``."""
    if len(ranks) == group.size():
        return counts
    of_all = [0] * group.size()
    of_all[ranks.start : ranks.stop : ranks.step] = counts
    return of_all


def _by_place(x: Tensor, m: int, h: int) -> Tensor:
    """``[ranks * m * h, K, .]`` as ``[places, m, K, .]``: a rank's places lie m * h apart."""
    K, X = x.shape[1:]
    return x.as_strided((len(x) - (m - 1) * h, m, K, X), (K * X, h * K * X, X, 1))


class _ShareSteps(NamedTuple):
    """Along the nodes of one machine; every state is written at the place of its node's map.

    Attributes:
        of_nodes: from the states that enter the legs, by slot, and then from cuts; along the whole
            chain from zero if one machine holds it.
        legs: the chain of all legs.
        of_legs: the map of every leg of this machine, by slot; None if one machine holds the chain.
    """

    of_nodes: Steps
    legs: Nodes
    of_legs: Steps | None

    def start(self, entering: Tensor | None) -> Tensor | None:
        """The states before the first maps of ``of_nodes``: zero after a cut."""
        if entering is None:
            return None
        cuts = len(self.of_nodes.chains) - len(entering)
        if cuts == 0:
            return entering
        return torch.cat([entering, entering.new_zeros(cuts, *entering.shape[1:])])


@cached_by_stream(64)
def _steps_of_share(
    nodes: Nodes, machine: int, n: int, m: int, h: int, device: torch.device
) -> _ShareSteps:
    places = [host % n * m * h + slot for host, slot in zip(nodes.hosts, nodes.slots, strict=True)]
    targets, legs = dict(enumerate(places)), nodes.legs(n)
    if len(legs) == 1:
        whole = Steps.build(_from_zero(places, targets, nodes.cuts), device)
        return _ShareSteps(whole, nodes, None)
    here = [leg for leg in legs if nodes.hosts[leg[0]] // n == machine]
    here.sort(key=lambda leg: nodes.slots[leg[0]])
    found = [_stretches(leg, places, {j: targets[j] for j in leg}, nodes.cuts) for leg in here]
    of_nodes = [opening for opening, _ in found] + [x for _, others in found for x in others]
    of_legs = []
    for slot, leg in enumerate(here):
        # Nothing before a cut leaves a leg. No state passes it: the chain of legs is cut there too.
        first = max(nodes.cuts.intersection(leg), default=leg[0])
        of_legs.append([*((NONE, places[j]) for j in range(first, leg[-1] + 1)), (slot, NONE)])
    return _ShareSteps(
        Steps.build(of_nodes, device), nodes.of_legs(n), Steps.build(of_legs, device)
    )


def exchange_rows(
    rows: Tensor,
    send_counts: Sequence[int],
    receive_counts: Sequence[int],
    group: dist.ProcessGroup,
    async_op: bool = False,
) -> tuple[Tensor, dist.Work | None]:
    """Send ``send_counts[r]`` of the rows, in order, to rank r: point-to-point on NCCL.

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

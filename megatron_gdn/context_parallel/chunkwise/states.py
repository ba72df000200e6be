"""States across pieces of a sequence that lie on different ranks.

Every rank computes the maps of its pieces, ``S_out = through @ S_in + local``. One exchange of
these maps gives each rank the states that enter its pieces, and the rule starts from those states.
The backward does the same from the other end, with d_local and the transposed maps.

Legend: N pieces on this rank, counted over its batch rows; h nodes on this rank (fragments that
states enter and leave); M chains times value heads; H value heads, K key dim, V value dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents
from ...ops.front.history import ranges
from ...ops.host_tables import cached_by_stream, to_device
from ...ops.rules.base import Rule, RuleBackward, RuleForward, on_tokens
from ...ops.state_maps.state_map import StateMap
from ..layouts import SequenceLayout
from .map_exchange import Nodes, pack
from .pieces import Pieces, pieces_of

Exchange = Callable[[Tensor, int, Nodes, dist.ProcessGroup], Tensor]


@dataclass(frozen=True, eq=False)
class StateTable:
    """Between which pieces states travel, for one rank and all rows of a batch.

    In zigzag every document is a chain of 2 * cp nodes, one piece each. The layouts that cut the
    whole buffer have one chain, of fragments: a state enters a fragment by its first piece and
    leaves it by its last; a fragment of several pieces lets no state through.
    """

    sequences: Documents  # boundaries of all N pieces of this rank, batch rows laid end to end
    nodes: Nodes  # of every chain; it is cut at fragments that let no state through
    node_count: int  # h
    # int64 [h * chains], the pieces by which states enter and leave this rank's nodes; None if
    # these are all N pieces in this order.
    first: Tensor | None
    last: Tensor | None
    # Tokens and boundaries of the last pieces, whose maps alone are computed; set only if these are
    # at most half of the tokens. Else the rule's forward uses what the maps of all pieces leave.
    leavers: tuple[Tensor, Documents] | None
    # bool [h * chains, 1, 1, 1]; None if true everywhere but at chain ends, where it is unused.
    enters: Tensor | None  # the first piece continues a document
    leaves: Tensor | None  # the last piece's document continues on another node
    passes: Tensor | None  # a state passes from end to end


def chain_nodes(cp_size: int, layout: SequenceLayout, cuts: frozenset[int] = frozenset()) -> Nodes:
    """The rank of every fragment of a layout, in stream order; no state passes ``cuts``."""
    ranks = tuple(range(cp_size))
    if layout is SequenceLayout.CONTIGUOUS:
        return Nodes(ranks, (0,) * cp_size, cuts)
    return Nodes(ranks + ranks[::-1], (0,) * cp_size + (1,) * cp_size, cuts)


def _cuts(pieces: Pieces, layout: SequenceLayout) -> frozenset[int]:
    """The fragments, of all ranks, that no state passes: all but one piece inside a document."""
    if layout is SequenceLayout.ZIGZAG:  # a chain is one document, and its nodes are the pieces
        return frozenset()
    alone = pieces.fragment.bincount() == 1
    amid = (pieces.seen > 0) & (pieces.left > 0)
    passed = pieces.fragment[amid & alone[pieces.fragment]].tolist()
    return frozenset(range(len(alone))).difference(passed)


@cached_by_stream(16)
def state_table(
    lengths: tuple[int, ...],
    cp_size: int,
    layout: SequenceLayout,
    rank: int,
    rows: int,
    device: torch.device,
) -> StateTable | None:
    """Built once per micro-batch, from host lengths; None when no document is cut."""
    pieces = pieces_of(lengths, cp_size, layout)
    if not pieces.any_continues:
        return None
    nodes = chain_nodes(cp_size, layout, _cuts(pieces, layout))
    n, h = len(nodes.hosts), nodes.hosts.count(rank)
    mine = pieces.held_by(rank)
    N = len(mine)
    node, chain = pieces.fragment[mine] % n, pieces.fragment[mine] // n
    chains = int(pieces.fragment.max()) // n + 1
    key = torch.tensor(nodes.slots, device="cpu")[node] * chains + chain
    number = torch.arange(N, device="cpu")
    first = key.new_full((h * chains,), N).scatter_reduce_(0, key, number, "amin")
    last = key.new_zeros(h * chains).scatter_reduce_(0, key, number, "amax")

    enters, leaves = pieces.seen[mine][first] > 0, pieces.left[mine][last] > 0
    passes = enters & leaves & (first == last)
    starts, ends = node[first] == 0, node[first] == n - 1

    def pieces_of_all_rows(x: Tensor) -> Tensor | None:
        x = (x.view(h, 1, chains) + torch.arange(rows, device="cpu").view(1, rows, 1) * N).flatten()
        every = torch.arange(rows * N, device="cpu")
        return None if torch.equal(x, every) else to_device(x, device)

    def mask(x: Tensor, exempt: Tensor) -> Tensor | None:
        if (x | exempt).all():
            return None
        of_all_rows = x.view(h, 1, chains).expand(h, rows, chains)
        return to_device(of_all_rows.reshape(-1, 1, 1, 1).contiguous(), device)

    leavers, leaving = None, pieces.length[mine][last]
    if rows == 1 and 2 * int(leaving.sum()) <= pieces.tokens:
        begin = pieces.local_start[mine][last]
        boundaries = Documents((0, *leaving.cumsum(0).tolist()), device)
        leavers = to_device(ranges(begin, leaving), device), boundaries
    return StateTable(
        sequences=pieces.documents(rank, rows, device),
        nodes=nodes,
        node_count=h,
        first=pieces_of_all_rows(first),
        last=pieces_of_all_rows(last),
        leavers=leavers,
        enters=mask(enters, starts),
        leaves=mask(leaves, ends),
        passes=mask(passes, starts | ends),
    )


def _take(x_N: Tensor, index: Tensor | None, mask: Tensor | None) -> Tensor:
    x = x_N if index is None else x_N.index_select(0, index)
    # Not a product: 0 * NaN would pass NaN on.
    return x if mask is None else torch.where(mask, x, x.new_zeros(()))


def _put(x: Tensor, index: Tensor | None, count: int) -> Tensor:
    """The inverse of :func:`_take`: ``count`` entries, zero except at ``index``."""
    return x if index is None else x.new_zeros(count, *x.shape[1:]).index_copy_(0, index, x)


class StatesOfPieces:
    """The states that enter this rank's pieces, computed from the maps of all earlier pieces.

    A :class:`~megatron_gdn.ops.parts.StateLink`.
    """

    def __init__(self, table: StateTable, exchange: Exchange, group: dist.ProcessGroup) -> None:
        self.documents, self._count = table.sequences, table.sequences.sequences
        self._table, self._exchange, self._group = table, exchange, group

    def _chain(self, maps: StateMap, nodes: Nodes) -> Tensor:
        """States that enter this rank's nodes, ``[h * chains, H, K, V]`` as ``maps.local``."""
        packed = pack(*maps)
        packed = packed.view(self._table.node_count, -1, *packed.shape[2:])
        entering = self._exchange(packed, maps.local.shape[-1], nodes, self._group)
        return entering.view(maps.local.shape)

    def _maps(self, rule: Rule, forward: RuleForward, inputs: Any) -> StateMap:
        """What this rank's nodes do to a state, ``[h * chains, H, K, .]``."""
        table, last = self._table, self._table.last
        if table.leavers is not None:
            tokens, pieces = table.leavers
            inputs = on_tokens(inputs, lambda x: x.index_select(1, tokens))
            forward, last = rule.begin(inputs, pieces), None
        local, through = forward.state_map()
        return StateMap(_take(local, last, table.leaves), _take(through, last, table.passes))

    def entering(
        self, rule: Rule, forward: RuleForward, inputs: Any
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        maps = self._maps(rule, forward, inputs)
        entering = self._chain(maps, self._table.nodes)
        return _put(entering, self._table.first, self._count), (entering, maps.through)

    def entered(self, kept: tuple[Tensor, ...]) -> Tensor:
        return _put(kept[0], self._table.first, self._count)

    def leaving(self, backward: RuleBackward, kept: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        table, (entering, through) = self._table, kept
        d_local = _take(backward.d_initial(), table.first, table.enters)
        maps = StateMap(entering, through).transposed(d_local)
        leaving = self._chain(maps, table.nodes.backwards())
        return self.entered(kept), _put(leaving, table.last, self._count)

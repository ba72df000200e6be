"""The states that enter and leave a rank's pieces of sequences.

Every rank computes the maps of its pieces, ``S_out = through @ S_in + local``. From one
exchange of maps each rank knows the states that enter its pieces. The backward follows
the chains in reverse, with transposed ``through`` maps and with gradients of states in
place of ``local``.

Legend: N pieces on this rank, over all batch rows; h nodes of a chain on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents
from ...ops.front.history import ranges
from ...ops.host_tables import to_device
from ...ops.rules.base import Rule, RuleBackward, RuleForward, map_inputs
from ...ops.state_maps.state_map import Cuts, StateMap
from ..layouts import SequenceLayout
from .fragments import Cutting, Nodes, any_document_continues, fragments_of, pieces_of
from .map_exchange import rows_by_chain, states_entering_nodes


@dataclass(frozen=True, eq=False)
class StateTable:
    """The pieces and nodes of one rank, between which states travel, for all rows of a
    batch.

    In zigzag every document is a chain of 2 * cp nodes with one piece each. In the
    other layouts the buffer is one chain. A state enters a node by the node's first
    piece and leaves the node by its last piece, so no state passes through a node of
    several pieces.
    """

    # boundaries of all N pieces of this rank, batch rows laid end to end
    sequences: Documents
    nodes: Nodes  # the nodes of every chain
    node_count: int  # h
    # int64 [h * chains]: this rank's nodes' first and last piece; None: each node is
    # one piece.
    first: Tensor | None
    last: Tensor | None
    # Tokens and boundaries of the nodes' last pieces, whose maps alone are computed;
    # set only if the last pieces have at most half of the tokens. If None, the maps of
    # all pieces are computed.
    last_pieces: tuple[Tensor, Documents] | None
    # Three masks, bool [h * chains, 1, 1, 1]; a mask is None if true except at ends of
    # chains.
    enters: Tensor | None  # the first piece continues a document
    leaves: Tensor | None  # the last piece's document continues on another node
    passes: Tensor | None  # a state passes from the node's begin to its end
    # nodes that no state passes, in order and in reverse order
    cuts: tuple[Cuts, Cuts] | None


class _NodeTensors(NamedTuple):
    """The tensors of :class:`StateTable` for this rank's nodes, for all batch rows."""

    first: Tensor
    last: Tensor
    enters: Tensor
    leaves: Tensor
    passes: Tensor
    cuts: Tensor  # int32 [n], 1 at nodes that no state passes
    cuts_back: Tensor


def state_table(documents: Documents, cutting: Cutting, rows: int) -> StateTable | None:
    """The table of a micro-batch of ``rows`` batch rows; None if all documents lie on
    one node."""
    return documents.keep(_make_state_table, cutting, rows)


def _make_state_table(
    documents: Documents, cutting: Cutting, rows: int
) -> StateTable | None:
    if not any_document_continues(documents, cutting):
        return None
    pieces = pieces_of(documents, cutting)
    known = documents.known
    tensors = documents.table(_node_tensors, pieces, cutting, rows, move=False)
    nodes = cutting.nodes
    n = len(cutting.nodes.hosts)
    N = pieces.sequences

    def index(x: Tensor) -> Tensor | None:
        if known and torch.equal(x, torch.arange(rows * N, device="cpu")):
            return None
        return to_device(x, documents.device)

    def mask(x: Tensor, *unused: int) -> Tensor | None:
        """``x`` on the device; None if ``x`` is true at all nodes that are not
        ``unused``."""
        ignored = torch.tensor([j in unused for j in range(n)], device="cpu")[
            cutting.own
        ]
        if known and (x.view(len(ignored), -1) | ignored[:, None]).all():
            return None
        return to_device(x, documents.device)

    cuts = None
    last_pieces = None
    # Only a chain with several documents can have nodes that no state passes.
    if cutting.layout is not SequenceLayout.ZIGZAG and not (
        known and not tensors.cuts[1:-1].any()
    ):
        cut_tensors = tensors.cuts, tensors.cuts_back
        flags = [tuple((x > 0).tolist()) if known else None for x in cut_tensors]
        forward, backward = (
            Cuts(to_device(x, documents.device), f)
            for x, f in zip(cut_tensors, flags, strict=True)
        )
        cuts = forward, backward
    if known and rows == 1:
        last_pieces = _last_pieces(pieces, tensors.last)
    sequences = pieces
    if rows != 1:  # lay the pieces of the rows end to end
        if rows:
            ends = accumulate(pieces.lengths * rows)
        else:
            ends = (0,)
        sequences = Documents((0, *ends), pieces.device)
    return StateTable(
        sequences=sequences,
        nodes=nodes,
        node_count=nodes.hosts.count(cutting.rank),
        first=index(tensors.first),
        last=index(tensors.last),
        last_pieces=last_pieces,
        enters=mask(tensors.enters, 0),
        leaves=mask(tensors.leaves, n - 1),
        passes=mask(tensors.passes, 0, n - 1),
        cuts=cuts,
    )


def _node_tensors(
    documents: Documents, pieces: Documents, cutting: Cutting, rows: int
) -> _NodeTensors:
    """Compute the tensors of this rank's nodes from its ``pieces``, for ``rows`` batch
    rows."""
    fragments = fragments_of(documents, cutting)
    own = cutting.own
    N = pieces.sequences
    begin, end, local = (x[own] for x in fragments[:3])
    row = torch.arange(rows, device=begin.device).view(1, rows, 1)
    ends = pieces.starts[1:].long()

    def pieces_at(tokens: Tensor) -> Tensor:
        """Indices of the pieces that hold ``tokens`` (indices on this rank), for all
        batch rows."""
        indices = torch.searchsorted(ends, tokens.contiguous(), right=True).clamp(
            max=N - 1
        )
        return (indices[:, None] + row * N).flatten()

    def mask(x: Tensor) -> Tensor:
        return x[own][:, None].expand(-1, rows, -1).reshape(-1, 1, 1, 1)

    cuts = (~fragments.passes[:, 0]).int()
    return _NodeTensors(
        pieces_at(local),
        pieces_at(local + (end - begin - 1).clamp(min=0)),
        mask(fragments.enters),
        mask(fragments.leaves),
        mask(fragments.passes),
        cuts,
        cuts.flip(0),
    )


def _last_pieces(pieces: Documents, indices: Tensor) -> tuple[Tensor, Documents] | None:
    """Tokens and boundaries of ``pieces[indices]``; None if these have over half of the
    tokens."""
    begin = pieces.starts[indices].long()
    length = pieces.starts.diff()[indices].long()
    if 2 * int(length.sum()) > pieces.total_tokens:
        return None
    boundaries = Documents((0, *length.cumsum(0).tolist()), pieces.device)
    return to_device(ranges(begin, length), pieces.device), boundaries


def _select_pieces(x_N: Tensor, index: Tensor | None, mask: Tensor | None) -> Tensor:
    """Pieces' entries ``x_N[index]`` (None: all), with zeros where ``mask`` (if any) is
    False."""
    if index is None:
        x = x_N
    else:
        x = x_N.index_select(0, index)
    # A product with the mask would keep NaN, because 0 * NaN is NaN.
    if mask is None:
        return x
    return torch.where(mask, x, x.new_zeros(()))


def _scatter_to_pieces(x: Tensor, index: Tensor | None, count: int) -> Tensor:
    """Zeros for ``count`` pieces, with ``x`` at pieces ``index`` (None: ``x`` is all
    pieces)."""
    if index is None:
        return x
    return x.new_zeros(count, *x.shape[1:]).index_copy_(0, index, x)


class StatesOfPieces:
    """The states that enter this rank's pieces: a
    :class:`~megatron_gdn.ops.stages.StateLink`."""

    def __init__(self, table: StateTable, group: dist.ProcessGroup) -> None:
        """``table``: this rank's pieces and nodes; ``group``: the ranks that exchange
        states."""
        self.documents = table.sequences
        self._count = table.sequences.sequences
        self._table = table
        self._group = group

    def _states_of_nodes(
        self, maps: StateMap, nodes: Nodes, cuts: Cuts | None
    ) -> Tensor:
        """The states that enter this rank's h nodes of each chain:
        ``[h * chains, H, K, V]``."""
        rows = rows_by_chain(maps.local, maps.through, self._table.node_count)
        entering = states_entering_nodes(
            rows, maps.local.shape[-1], nodes, self._group, cuts
        )
        return entering.view(maps.local.shape)

    def _maps_of_nodes(
        self, rule: Rule, forward: RuleForward, inputs: object
    ) -> StateMap:
        """Maps ``[h * chains, H, K, .]`` of nodes' last pieces; ``forward`` has
        ``inputs``."""
        table = self._table
        last = self._table.last
        if table.last_pieces is not None:
            tokens, pieces = table.last_pieces
            inputs = map_inputs(inputs, lambda x: x.index_select(1, tokens))
            forward = rule.begin(inputs, pieces)
            last = None
        local, through = forward.state_map()
        return StateMap(
            _select_pieces(local, last, table.leaves),
            _select_pieces(through, last, table.passes),
        )

    def entering(
        self, rule: Rule, forward: RuleForward, inputs: object
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The states that enter pieces, and the tensors to pass to :meth:`leaving` as
        ``kept``."""
        maps = self._maps_of_nodes(rule, forward, inputs)
        table = self._table
        if table.cuts is None:
            cuts = None
        else:
            cuts = table.cuts[0]
        entering = self._states_of_nodes(maps, table.nodes, cuts)
        return _scatter_to_pieces(entering, table.first, self._count), (
            entering,
            maps.through,
        )

    def entered(self, kept: tuple[Tensor, ...]) -> Tensor:
        """The states that entered pieces, from the tensors that :meth:`entering`
        returned."""
        return _scatter_to_pieces(kept[0], self._table.first, self._count)

    def leaving(
        self, backward: RuleBackward, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """The states that entered pieces, and the gradients of the states that leave
        pieces."""
        table = self._table
        entering, through = kept
        d_local = _select_pieces(backward.d_initial(), table.first, table.enters)
        maps = StateMap(entering, through).transposed(d_local)
        if table.cuts is None:
            cuts = None
        else:
            cuts = table.cuts[1]
        leaving = self._states_of_nodes(maps, table.nodes.backwards(), cuts)
        return self.entered(kept), _scatter_to_pieces(leaving, table.last, self._count)

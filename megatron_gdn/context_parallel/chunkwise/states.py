"""The states that enter and leave a rank's pieces of sequences.

Every rank computes the maps of its pieces, ``S_out = through @ S_in + local``. From one
exchange of maps each rank knows the states that enter its pieces. The backward follows
the chains in reverse, with transposed ``through`` maps and with gradients of states in
place of ``local``.

Legend: N pieces on this rank, over all batch rows.
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
from ...ops.state_maps.state_map import StateMap
from ..layouts import SequenceLayout
from .fragments import Cutting, any_document_is_cut, fragments_of, pieces_of
from .map_exchange import Paths, states_entering_nodes


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
    paths: Paths  # the nodes that states leave and enter, the same in every chain
    # of this rank's nodes, those that a state leaves, and those that a state enters
    sending: tuple[int, ...]
    receiving: tuple[int, ...]
    # int64 [nodes * chains]: the pieces that a state leaves and enters, by node; None:
    # all N pieces in order.
    left: Tensor | None
    entered: Tensor | None
    # Tokens and boundaries of the pieces ``left``, whose maps alone are computed; set
    # only if these pieces have less than half of the tokens. If None, the maps of all
    # pieces are computed.
    left_alone: tuple[Tensor, Documents] | None
    # int64 [nodes * chains]: for ``entered``, which of ``left`` is the piece of the same
    # node; None: they are the same in the same order.
    through_back: Tensor | None
    masks: Masks | None  # None if the host knows the documents
    # int32 [n], 1 at nodes that no state passes, in order and in reverse order; None if
    # the host knows these nodes, or if there are none, since a chain is a document
    cuts: tuple[Tensor | None, Tensor | None]
    chains: int  # over all batch rows
    direct: bool  # of ``paths``


class Masks(NamedTuple):
    """Which nodes states leave, enter and pass, as tensors for fixed buffers, whose
    documents the host does not know.

    Bool ``[nodes * chains, 1, 1, 1]``. ``leaves`` and ``passes`` are of the nodes that
    ``left`` lists, ``enters`` of those that ``entered`` lists.
    """

    leaves: Tensor
    enters: Tensor
    passes: Tensor


class _NodeTensors(NamedTuple):
    """The tensors of :class:`StateTable` and :class:`Masks` for this rank's nodes."""

    left: Tensor
    entered: Tensor
    leaves: Tensor
    enters: Tensor
    passes: Tensor
    cuts: Tensor
    cuts_back: Tensor


def state_table(documents: Documents, cutting: Cutting, rows: int) -> StateTable | None:
    """The table of a micro-batch of ``rows`` batch rows; None if no state goes from
    node to node."""
    return documents.keep(_make_state_table, cutting, rows)


def _make_state_table(
    documents: Documents, cutting: Cutting, rows: int
) -> StateTable | None:
    if not any_document_is_cut(documents, cutting):
        return None
    pieces = pieces_of(documents, cutting)
    N = pieces.sequences
    paths = _paths_of(documents, cutting)
    sending = paths.sent_by(cutting.rank)
    receiving = paths.received_by(cutting.rank)
    tensors = documents.keep_tensors(
        _node_tensors, pieces, cutting, rows, sending, receiving, move=False
    )
    on_device = _NodeTensors._make(to_device(x, documents.device) for x in tensors)
    masks = None
    cuts = None, None
    if not documents.known_on_host:
        masks = Masks(on_device.leaves, on_device.enters, on_device.passes)
        if cutting.layout is not SequenceLayout.ZIGZAG:
            cuts = on_device.cuts, on_device.cuts_back
    left_alone = None
    if documents.known_on_host and rows == 1 and sending:
        left_alone = _pieces_alone(pieces, tensors.left)
    chains = rows * fragments_of(documents, cutting).begin.shape[1]
    sequences = pieces
    if rows != 1:  # lay the pieces of the rows end to end
        if rows:
            ends = accumulate(pieces.lengths * rows)
        else:
            ends = (0,)
        sequences = Documents((0, *ends), pieces.device)

    def index(x: Tensor, of_device: Tensor) -> Tensor | None:
        if documents.known_on_host and torch.equal(
            x, torch.arange(rows * N, device="cpu")
        ):
            return None
        return of_device

    return StateTable(
        sequences=sequences,
        paths=paths,
        sending=sending,
        receiving=receiving,
        left=index(tensors.left, on_device.left),
        entered=index(tensors.entered, on_device.entered),
        left_alone=left_alone,
        through_back=_same_nodes(sending, receiving, chains, documents.device),
        masks=masks,
        cuts=cuts,
        direct=paths.direct,
        chains=chains,
    )


def _same_nodes(
    sending: tuple[int, ...],
    receiving: tuple[int, ...],
    chains: int,
    device: torch.device,
) -> Tensor | None:
    """:attr:`StateTable.through_back`; of a node that does not send, that of any."""
    index = [sending.index(j) if j in sending else 0 for j in receiving]
    if index == list(range(len(sending))):
        return None
    first = torch.tensor(index, dtype=torch.int64, device="cpu")[:, None] * chains
    places = first + torch.arange(chains, device="cpu")
    return to_device(places.flatten(), device)


def _paths_of(documents: Documents, cutting: Cutting) -> Paths:
    """The paths of states; if the host does not know them, one path through all
    nodes."""
    hosts = cutting.nodes.hosts
    every_node = tuple(range(len(hosts)))
    if not documents.known_on_host or cutting.layout is SequenceLayout.ZIGZAG:
        return Paths(hosts, (every_node,))
    fragments = fragments_of(documents, cutting)
    paths: list[list[int]] = []
    for j in fragments.enters[:, 0].nonzero().flatten().tolist():
        if paths and fragments.passes[j - 1, 0]:
            paths[-1].append(j)
        else:
            paths.append([j - 1, j])
    return Paths(hosts, tuple(tuple(path) for path in paths))


def _node_tensors(
    documents: Documents,
    pieces: Documents,
    cutting: Cutting,
    rows: int,
    sending: tuple[int, ...],
    receiving: tuple[int, ...],
) -> _NodeTensors:
    """Compute the tensors of this rank's nodes from its ``pieces``, for ``rows`` batch
    rows."""
    fragments = fragments_of(documents, cutting)
    N = pieces.sequences
    begin, end, local = fragments[:3]
    last = local + (end - begin - 1).clamp(min=0)
    row = torch.arange(rows, device=begin.device).view(1, rows, 1)
    ends = pieces.starts[1:].long()

    def of_nodes(x: Tensor, nodes: tuple[int, ...]) -> Tensor:
        """``x [nodes, chains]`` of these nodes, for all batch rows."""
        chosen = torch.stack([x[j] for j in nodes]) if nodes else x[:0]
        return chosen[:, None].expand(-1, rows, -1)

    def pieces_at(tokens: Tensor) -> Tensor:
        """Indices of the pieces that hold ``tokens`` (indices on this rank)."""
        indices = torch.searchsorted(ends, tokens.contiguous(), right=True)
        return (indices.clamp(max=N - 1) + row * N).flatten()

    def mask(x: Tensor, nodes: tuple[int, ...]) -> Tensor:
        return of_nodes(x, nodes).reshape(-1, 1, 1, 1)

    cuts = (~fragments.passes[:, 0]).int()
    return _NodeTensors(
        left=pieces_at(of_nodes(last, sending)),
        entered=pieces_at(of_nodes(local, receiving)),
        leaves=mask(fragments.leaves, sending),
        enters=mask(fragments.enters, receiving),
        passes=mask(fragments.passes, sending),
        cuts=cuts,
        cuts_back=cuts.flip(0),
    )


def _pieces_alone(
    pieces: Documents, indices: Tensor
) -> tuple[Tensor, Documents] | None:
    """Tokens and boundaries of ``pieces[indices]``; None if these have half of the tokens or
    more."""
    begin = pieces.starts[indices].long()
    length = pieces.starts.diff()[indices].long()
    if 2 * int(length.sum()) >= pieces.total_tokens:
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
    return x.new_zeros((count,) + x.shape[1:]).index_copy_(0, index, x)


class StatesOfPieces:
    """The states that enter this rank's pieces: a
    :class:`~megatron_gdn.ops.stages.StateLink`."""

    def __init__(
        self, table: StateTable, group: dist.ProcessGroup, no_maps: StateMap
    ) -> None:
        """``table``: this rank's pieces and nodes; ``group``: the ranks that exchange
        states; ``no_maps``: those of no piece, ``[0, H, K, .]``."""
        self.documents = table.sequences
        self._count = table.sequences.sequences
        self._table = table
        self._group = group
        self._no_maps = no_maps
        self._backwards = table.paths.backwards()

    def _maps_of_nodes(
        self, rule: Rule, forward: RuleForward, inputs: object
    ) -> StateMap:
        """Maps ``[nodes * chains, H, K, .]`` of the pieces that a state leaves;
        ``forward`` has ``inputs``."""
        table = self._table
        if not table.sending:
            return self._no_maps
        left = table.left
        if table.left_alone is not None:
            tokens, pieces = table.left_alone
            inputs = map_inputs(inputs, lambda x: x.index_select(1, tokens))
            forward = rule.begin(inputs, pieces)
            left = None
        local, through = forward.state_map()
        leaves = None
        passes = None
        if table.masks is not None:
            leaves = table.masks.leaves
            passes = table.masks.passes
        local = _select_pieces(local, left, leaves)
        if table.direct:
            return StateMap(local, through)  # nobody reads ``through``
        return StateMap(local, _select_pieces(through, left, passes))

    def _exchange(
        self, local: Tensor, through: Tensor | None, paths: Paths, cuts: Tensor | None
    ) -> Tensor:
        """The states ``[nodes * chains, H, K, V]`` at this rank's nodes of ``paths``,
        from the maps of the nodes that send."""
        H, K, V = local.shape[1:]
        M = self._table.chains * H
        nodes = len(local) // self._table.chains
        local = local.reshape(nodes, M, K, V)
        if through is not None:
            through = through.reshape(nodes, M, K, through.shape[-1])
        states = states_entering_nodes(local, through, paths, self._group, cuts)
        return states.view(-1, H, K, V)

    def forward_states(
        self, rule: Rule, forward: RuleForward, inputs: object
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The states that enter pieces, and the tensors ``kept`` for
        :meth:`backward_states`."""
        table = self._table
        maps = self._maps_of_nodes(rule, forward, inputs)
        if table.direct:
            kept = (self._exchange(maps.local, None, table.paths, None),)
        else:
            entering = self._exchange(
                maps.local, maps.through, table.paths, table.cuts[0]
            )
            kept = (entering, maps.through)
        return self.states_from_saved(kept), kept

    def states_from_saved(self, kept: tuple[Tensor, ...]) -> Tensor:
        """The states that entered pieces, from the tensors that :meth:`forward_states`
        returned."""
        return _scatter_to_pieces(kept[0], self._table.entered, self._count)

    def backward_states(
        self, backward: RuleBackward, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """The states that entered pieces, and the gradients of the states that leave
        pieces."""
        table = self._table
        d_local = self._no_maps.local
        if table.receiving:
            enters = None
            if table.masks is not None:
                enters = table.masks.enters
            d_local = _select_pieces(backward.d_initial(), table.entered, enters)
        if table.direct:
            leaving = self._exchange(d_local, None, self._backwards, None)
        else:
            through = self._through_of_receiving(kept[1])
            maps = StateMap(d_local, through).transposed(d_local)
            leaving = self._exchange(
                maps.local, maps.through, self._backwards, table.cuts[1]
            )
        d_final = _scatter_to_pieces(leaving, table.left, self._count)
        return self.states_from_saved(kept), d_final

    def _through_of_receiving(self, through: Tensor) -> Tensor:
        """From ``through`` of the nodes that a state leaves, that of the nodes that a
        state enters.

        A node that no state leaves gets any: it is the first of its path backwards, and
        its ``through`` is not read.
        """
        table = self._table
        if table.through_back is None:
            return through
        if not table.sending:
            return through.new_zeros(table.through_back.shape + through.shape[1:])
        return through.index_select(0, table.through_back)

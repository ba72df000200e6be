"""The states that enter and leave a rank's pieces of sequences.

Every rank computes the maps of its pieces, ``S_out = through @ S_in + local``. After
one exchange of maps, each rank has the states that enter its pieces. The backward
passes gradients of states along the chains in reverse order: ``dS_in = through^T dS_out
+ d_local``.

Legend: a *node* is one fragment of a *chain* (:mod:`.fragments`), n the nodes of a
chain, N the pieces on this rank over all batch rows; H, K, V heads, rows and columns of
a state.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.documents import Documents
from ...ops.front.history import join_ranges
from ...ops.host_tables import to_device
from ...ops.rules.base import Rule, RuleBackward, RuleForward, map_inputs
from ...ops.state_maps.state_map import StateMap
from ..layouts import SequenceLayout
from .fragments import SequencePartition, any_document_is_cut, fragments_of, pieces_of
from .map_exchange import StatePaths, states_entering_nodes


class GatheredPieces(NamedTuple):
    """Some of a rank's pieces, to be laid end to end in a shorter buffer."""

    # int64, indices of the pieces' tokens among the rank's tokens
    token_indices: Tensor
    boundaries: Documents  # of the pieces in the shorter buffer


@dataclass(frozen=True, eq=False)
class StateTable:
    """The pieces and nodes of one rank that states enter and leave, for all batch rows.

    In zigzag every document is a chain of 2 * cp nodes with one piece each. In the
    other layouts the buffer is one chain. A state enters a node by the node's first
    piece and leaves the node by its last piece, so no state passes through a node of
    several pieces.
    """

    # boundaries of all N pieces of this rank, batch rows laid end to end
    pieces: Documents
    paths: StatePaths  # the nodes that states leave and enter, the same in every chain
    # this rank's nodes that a state leaves; this rank's nodes that a state enters
    sending_nodes: tuple[int, ...]
    receiving_nodes: tuple[int, ...]
    # int64 [nodes * chains], node by node: the piece by which a state leaves each of
    # ``sending_nodes``; None: all N pieces in order
    exit_pieces: Tensor | None
    # the same for the pieces by which states enter ``receiving_nodes``
    entry_pieces: Tensor | None
    # Set only if ``exit_pieces`` have less than half of the tokens: then maps are
    # computed for these pieces only. If None, maps are computed for all pieces.
    gathered_exit_pieces: GatheredPieces | None
    # int64 [nodes * chains]: for each of ``entry_pieces``, the index of its node's exit
    # piece in ``exit_pieces``; None: 0, 1, 2, ...
    exit_of_each_entry: Tensor | None
    masks: NodeMasks | None  # None if the host knows the documents
    # ``cuts`` of `follow_chains` for the forward and for the backward: int32 [n], 1 at
    # nodes that no state passes. Only for fixed buffers in which a chain has several
    # documents, else None.
    cuts: tuple[Tensor | None, Tensor | None]
    chain_count: int  # over all batch rows
    is_direct: bool  # whether every path has two nodes, so that no ``through`` is read


class NodeMasks(NamedTuple):
    """Masks of the nodes that states leave, enter and pass. Made only for fixed
    buffers, since the host does not know their documents. Bool ``[nodes * chains, 1, 1,
    1]``."""

    state_leaves: Tensor  # of the nodes ``StateTable.sending_nodes``
    state_enters: Tensor  # of the nodes ``StateTable.receiving_nodes``
    state_passes: Tensor  # of the nodes ``StateTable.sending_nodes``


class _NodeTensors(NamedTuple):
    """The tensors of :class:`StateTable` and :class:`NodeMasks` for this rank's
    nodes."""

    exit_pieces: Tensor
    entry_pieces: Tensor
    state_leaves: Tensor
    state_enters: Tensor
    state_passes: Tensor
    cuts: Tensor
    reversed_cuts: Tensor


def state_table(
    documents: Documents, partition: SequencePartition, rows: int
) -> StateTable | None:
    """The table of a micro-batch of ``rows`` batch rows; None if no state goes from
    node to node. The table is stored on ``documents``, for all layers."""
    return documents.keep(_make_state_table, partition, rows)


def _make_state_table(
    documents: Documents, partition: SequencePartition, rows: int
) -> StateTable | None:
    """Compute :func:`state_table`.

    If the host knows the documents, the table has only nodes between which states
    travel. For fixed buffers it has all nodes, and new boundaries overwrite the tensors
    of ``_node_tensors``; nothing else here may depend on the boundaries.
    """
    if not any_document_is_cut(documents, partition):
        return None
    pieces = pieces_of(documents, partition)
    N = pieces.sequences
    paths = _state_paths(documents, partition)
    sending = paths.sending_nodes_of(partition.rank)
    receiving = paths.receiving_nodes_of(partition.rank)
    # These tensors are on the host, since the code below reads them there. Those of
    # fixed buffers are on the device.
    tensors = documents.keep_tensors(
        _node_tensors, pieces, partition, rows, sending, receiving, move=False
    )
    on_device = _NodeTensors._make(to_device(x, documents.device) for x in tensors)
    masks = None
    cuts = None, None
    if not documents.known_on_host:
        masks = NodeMasks(
            on_device.state_leaves, on_device.state_enters, on_device.state_passes
        )
        # In zigzag a chain is one document, so every state passes every inner node.
        if partition.layout is not SequenceLayout.ZIGZAG:
            cuts = on_device.cuts, on_device.reversed_cuts
    gathered_exit_pieces = None
    # only for one batch row, since the indices count the tokens of one row
    if documents.known_on_host and rows == 1 and sending:
        gathered_exit_pieces = _gather_pieces(pieces, tensors.exit_pieces)
    chains = rows * fragments_of(documents, partition).begin.shape[1]
    sequences = pieces
    if rows != 1:  # lay the pieces of the rows end to end
        if rows:
            ends = accumulate(pieces.lengths * rows)
        else:
            ends = (0,)  # one empty document, since `Documents` needs one
        sequences = Documents((0, *ends), pieces.device)

    def none_if_all_pieces(indices: Tensor, on_device: Tensor) -> Tensor | None:
        """``on_device``, a copy of ``indices``; None if ``indices`` are 0, 1, 2, ... of
        all pieces."""
        if documents.known_on_host:
            all_pieces = torch.arange(rows * N, device="cpu")
            if torch.equal(indices, all_pieces):
                return None
        return on_device

    return StateTable(
        pieces=sequences,
        paths=paths,
        sending_nodes=sending,
        receiving_nodes=receiving,
        exit_pieces=none_if_all_pieces(tensors.exit_pieces, on_device.exit_pieces),
        entry_pieces=none_if_all_pieces(tensors.entry_pieces, on_device.entry_pieces),
        gathered_exit_pieces=gathered_exit_pieces,
        exit_of_each_entry=_exit_of_each_entry(
            sending, receiving, chains, documents.device
        ),
        masks=masks,
        cuts=cuts,
        is_direct=paths.is_direct,
        chain_count=chains,
    )


def _exit_of_each_entry(
    sending: tuple[int, ...],
    receiving: tuple[int, ...],
    chains: int,
    device: torch.device,
) -> Tensor | None:
    """Compute :attr:`StateTable.exit_of_each_entry` for nodes ``sending`` and
    ``receiving``.

    A node that does not send has no piece in ``exit_pieces``, and gets the index of the
    first piece. The backward does not read ``through`` of such a node, because the node
    is then the first of its path.
    """
    index = [sending.index(j) if j in sending else 0 for j in receiving]
    if index == list(range(len(sending))):
        return None
    first = torch.tensor(index, dtype=torch.int64, device="cpu")[:, None] * chains
    indices = first + torch.arange(chains, device="cpu")
    return to_device(indices.flatten(), device)


def _state_paths(documents: Documents, partition: SequencePartition) -> StatePaths:
    """The paths of states along a chain. In zigzag each document has tokens in all
    nodes, so there is one path through all nodes. The same path is taken if the host
    does not know where documents are cut."""
    ranks = partition.nodes.ranks
    every_node = tuple(range(len(ranks)))
    if not documents.known_on_host or partition.layout is SequenceLayout.ZIGZAG:
        return StatePaths(ranks, (every_node,))
    fragments = fragments_of(documents, partition)
    paths: list[list[int]] = []
    # [:, 0]: the buffer is the only chain. The state that enters node j comes from node
    # j - 1. It begins there, unless a state passes node j - 1.
    for j in fragments.state_enters[:, 0].nonzero().flatten().tolist():
        if paths and fragments.state_passes[j - 1, 0]:
            paths[-1].append(j)
        else:
            paths.append([j - 1, j])
    return StatePaths(ranks, tuple(tuple(path) for path in paths))


def _node_tensors(
    documents: Documents,
    pieces: Documents,
    partition: SequencePartition,
    rows: int,
    sending: tuple[int, ...],
    receiving: tuple[int, ...],
) -> _NodeTensors:
    """Compute the tensors of this rank's nodes from its ``pieces``, for ``rows`` batch
    rows; ``sending`` and ``receiving`` are ``sending_nodes`` and ``receiving_nodes`` of
    :class:`StateTable`."""
    fragments = fragments_of(documents, partition)
    N = pieces.sequences
    # indices, among this rank's tokens, of each fragment's first and last token
    first_token = fragments.local_begin
    length = fragments.end - fragments.begin
    last_token = first_token + (length - 1).clamp(min=0)
    row = torch.arange(rows, device=first_token.device).view(1, rows, 1)
    ends = pieces.starts[1:].long()

    def of_nodes(x: Tensor, nodes: tuple[int, ...]) -> Tensor:
        """Rows ``nodes`` of ``x [n, chains]``, repeated for the batch rows: ``[nodes,
        rows, chains]``."""
        # stacked, since a list of indices would have to be copied to the device
        chosen = torch.stack([x[j] for j in nodes]) if nodes else x[:0]
        return chosen[:, None].expand(-1, rows, -1)

    def pieces_at(tokens: Tensor) -> Tensor:
        """The index of the piece that holds each of ``tokens [nodes, rows, chains]``,
        as a flat tensor."""
        indices = torch.searchsorted(ends, tokens.contiguous(), right=True)
        return (indices.clamp(max=N - 1) + row * N).flatten()

    def node_mask(x: Tensor, nodes: tuple[int, ...]) -> Tensor:
        """Rows ``nodes`` of ``x``, bool ``[n, chains]``, in the shape of
        :class:`NodeMasks`."""
        return of_nodes(x, nodes).reshape(-1, 1, 1, 1)

    cuts = (~fragments.state_passes[:, 0]).int()  # read only if there is one chain
    return _NodeTensors(
        exit_pieces=pieces_at(of_nodes(last_token, sending)),
        entry_pieces=pieces_at(of_nodes(first_token, receiving)),
        state_leaves=node_mask(fragments.state_leaves, sending),
        state_enters=node_mask(fragments.state_enters, receiving),
        state_passes=node_mask(fragments.state_passes, sending),
        cuts=cuts,
        reversed_cuts=cuts.flip(0),
    )


def _gather_pieces(pieces: Documents, indices: Tensor) -> GatheredPieces | None:
    """The pieces with these ``indices``; None if these pieces have half of all tokens
    or more, since a shorter buffer would then save too little work."""
    begin = pieces.starts[indices].long()
    length = pieces.starts.diff()[indices].long()
    if 2 * int(length.sum()) >= pieces.total_tokens:
        return None
    boundaries = Documents((0, *length.cumsum(0).tolist()), pieces.device)
    return GatheredPieces(
        to_device(join_ranges(begin, length), pieces.device), boundaries
    )


def _select_pieces(x_N: Tensor, index: Tensor | None, mask: Tensor | None) -> Tensor:
    """``x_N[index]``, with zeros where ``mask`` is False.

    ``x_N`` has an entry per piece. ``index`` None: all pieces; ``mask`` None: all True.
    """
    if index is None:
        x = x_N
    else:
        x = x_N.index_select(0, index)
    if mask is None:
        return x
    # A product with the mask would keep NaN, because 0 * NaN is NaN.
    return torch.where(mask, x, x.new_zeros(()))


def _fill_pieces(x: Tensor, index: Tensor | None, count: int) -> Tensor:
    """A tensor with an entry for each of ``count`` pieces: ``x`` at pieces ``index``,
    else zeros. If ``index`` is None, ``x`` has all pieces."""
    if index is None:
        return x
    return x.new_zeros((count,) + x.shape[1:]).index_copy_(0, index, x)


class StateExchange:
    """Exchanges the states that enter and leave this rank's pieces: a
    :class:`~megatron_gdn.ops.stages.StateLink`.

    :meth:`forward_states` and :meth:`backward_states` are collectives.
    """

    def __init__(
        self, table: StateTable, group: dist.ProcessGroup, no_maps: StateMap
    ) -> None:
        """``table``: this rank's pieces and nodes; ``group``: the ranks that exchange
        states; ``no_maps``: an empty :class:`StateMap`, ``[0, H, K, .]``."""
        self.documents = table.pieces
        self._piece_count = table.pieces.sequences
        self._table = table
        self._group = group
        self._no_maps = no_maps
        self._reversed_paths = table.paths.reversed()

    def _maps_of_nodes(
        self, rule: Rule, forward: RuleForward, inputs: object
    ) -> StateMap:
        """Maps ``[nodes * chains, H, K, .]`` of the pieces ``exit_pieces``.

        ``forward`` is ``rule.begin(inputs, self.documents)``, ``inputs`` are the rule's
        inputs ``[B, tokens, ...]``.
        """
        table = self._table
        if not table.sending_nodes:
            return self._no_maps
        indices = table.exit_pieces
        gathered = table.gathered_exit_pieces
        if gathered is not None:  # a second, shorter forward for the maps alone
            inputs = map_inputs(
                inputs, lambda x: x.index_select(1, gathered.token_indices)
            )
            forward = rule.begin(inputs, gathered.boundaries)
            indices = None  # all gathered pieces are needed, in order
        local, through = forward.state_map()
        leaves = None
        passes = None
        if table.masks is not None:
            leaves = table.masks.state_leaves
            passes = table.masks.state_passes
        local = _select_pieces(local, indices, leaves)
        if table.is_direct:
            return StateMap(local, through)  # ``through`` is not read
        return StateMap(local, _select_pieces(through, indices, passes))

    def _exchange(
        self,
        local: Tensor,
        through: Tensor | None,
        paths: StatePaths,
        cuts: Tensor | None,
    ) -> Tensor:
        """Exchange maps along ``paths``; return the states that enter this rank's
        nodes, ``[receiving nodes * chains, H, K, V]``.

        ``local``, ``through``: the maps ``[sending nodes * chains, H, K, .]``;
        ``through`` is None if every path has two nodes, since then states are sent in
        place of maps. ``cuts``: int32 ``[nodes]``, 1 at each node that no state passes.
        """
        H, K, V = local.shape[1:]
        M = self._table.chain_count * H  # states that follow the same paths
        nodes = len(local) // self._table.chain_count
        local = local.reshape(nodes, M, K, V)
        if through is not None:
            through = through.reshape(nodes, M, K, through.shape[-1])
        states = states_entering_nodes(local, through, paths, self._group, cuts)
        return states.view(-1, H, K, V)

    def forward_states(
        self, rule: Rule, forward: RuleForward, inputs: object
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The states ``[N, H, K, V]`` that enter pieces, and the tensors ``kept`` for
        :meth:`backward_states`.

        ``forward`` is ``rule.begin(inputs, self.documents)``, which has not run yet.
        """
        table = self._table
        maps = self._maps_of_nodes(rule, forward, inputs)
        if table.is_direct:
            kept = (self._exchange(maps.local, None, table.paths, None),)
        else:
            entering = self._exchange(
                maps.local, maps.through, table.paths, table.cuts[0]
            )
            kept = (entering, maps.through)
        return self.states_from_saved(kept), kept

    def states_from_saved(self, kept: tuple[Tensor, ...]) -> Tensor:
        """The states ``[N, H, K, V]`` that :meth:`forward_states` returned with
        ``kept``."""
        return _fill_pieces(kept[0], self._table.entry_pieces, self._piece_count)

    def backward_states(
        self, backward: RuleBackward, kept: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor]:
        """The states that entered pieces, and the gradients of the states that leave
        pieces, ``[N, H, K, V]`` each.

        ``backward.d_initial()``, computed without gradients from later pieces, is
        ``local`` of the maps of gradients. ``kept``: as :meth:`forward_states` gave it.
        """
        table = self._table
        d_local = self._no_maps.local  # empty, if no state enters this rank's nodes
        if table.receiving_nodes:
            enters = None
            if table.masks is not None:
                enters = table.masks.state_enters
            d_local = _select_pieces(backward.d_initial(), table.entry_pieces, enters)
        if table.is_direct:
            leaving = self._exchange(d_local, None, self._reversed_paths, None)
        else:
            through = self._through_of_entry_pieces(kept[1])
            # dS_in = through^T dS_out + d_local
            maps = StateMap(d_local, through).transposed(d_local)
            leaving = self._exchange(
                maps.local, maps.through, self._reversed_paths, table.cuts[1]
            )
        d_final = _fill_pieces(leaving, table.exit_pieces, self._piece_count)
        return self.states_from_saved(kept), d_final

    def _through_of_entry_pieces(self, through: Tensor) -> Tensor:
        """For the backward: ``through`` of ``entry_pieces``, from ``through`` of
        ``exit_pieces``.

        ``through``: ``[sending nodes * chains, H, K, .]``, for the last piece of each
        node that sends (``exit_pieces``). States enter a node by its first piece
        (``entry_pieces``). If a state passes a node, the two are one piece, and
        ``exit_of_each_entry`` is the index of its ``through``.
        """
        table = self._table
        if table.exit_of_each_entry is None:
            return through
        if not table.sending_nodes:
            # In the backward each receiving node is the first of its path, and the
            # ``through`` of a first node is not read.
            return through.new_zeros(table.exit_of_each_entry.shape + through.shape[1:])
        return through.index_select(0, table.exit_of_each_entry)

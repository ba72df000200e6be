"""Tables of chunkwise context parallelism against their definition, played out on the
host.

Of documents that the host knows, and of one set of fixed buffers that is filled again
and again.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices, rank_order_of_sequence
from megatron_gdn.context_parallel.chunkwise.fragments import SequencePartition
from megatron_gdn.context_parallel.chunkwise.history import history_route
from megatron_gdn.context_parallel.chunkwise.map_exchange import pack_maps_by_rank
from megatron_gdn.context_parallel.chunkwise.states import (
    _fill_pieces,
    _select_pieces,
    state_table,
)
from megatron_gdn.ops import Documents, StaticDocuments
from tests.searches import examples

CPU = torch.device("cpu")
MOST = 7  # documents


@dataclass(frozen=True, eq=False)
class Pieces:
    """All N non-empty pieces of a stream, in stream order; int64 tensors on the
    host."""

    start: Tensor  # in the stream
    length: Tensor  # at least 1
    seen: Tensor  # tokens of its document before it; 0 starts a document
    rank: Tensor  # who holds it
    local_start: Tensor  # where in that rank's tokens
    tokens: int  # of each rank

    def held_by(self, rank: int) -> Tensor:
        """Indices of this rank's pieces, in the order it holds them."""
        mine = (self.rank == rank).nonzero().flatten()
        return mine[self.local_start[mine].argsort()]


@lru_cache(maxsize=16)
def pieces_of(lengths: tuple[int, ...], cp_size: int, layout: SequenceLayout) -> Pieces:
    """By definition: where fragments and documents begin."""
    place = rank_order_of_sequence(lengths, cp_size, layout)
    total = sum(lengths)
    kept = torch.tensor([n for n in lengths if n], dtype=torch.int64)
    ends = kept.cumsum(0)
    starts = ends - kept
    if layout is SequenceLayout.ZIGZAG:
        number_2cp = torch.arange(2 * cp_size)
        tokens_N = kept // (2 * cp_size)
        fragment_start = (starts[:, None] + tokens_N[:, None] * number_2cp).flatten()
    else:
        count = cp_size if layout is SequenceLayout.CONTIGUOUS else 2 * cp_size
        fragment_start = torch.arange(count if total else 0) * (total // count)
        if layout is SequenceLayout.ZIGZAG_BUFFER:
            # The last rank holds the two stretches in the middle side by side.
            fragment_start = fragment_start[
                torch.arange(len(fragment_start)) != cp_size
            ]
    start = torch.cat([fragment_start, starts]).unique()  # sorted
    length = torch.diff(start, append=kept.new_tensor([total]))
    document = torch.searchsorted(starts, start, right=True) - 1
    tokens = total // cp_size
    return Pieces(
        start=start,
        length=length,
        seen=start - starts[document],
        rank=place[start] // max(tokens, 1),
        local_start=place[start] % max(tokens, 1),
        tokens=tokens,
    )


@st.composite
def fills(draw):
    """(several sets of documents of one buffer, cp, layout): any lengths that the
    layout allows."""
    cp = draw(st.integers(2, 5))
    layout = draw(st.sampled_from(SequenceLayout))
    unit = cp if layout is SequenceLayout.CONTIGUOUS else 2 * cp
    total = unit * draw(st.integers(1, 12))
    step = unit if layout is SequenceLayout.ZIGZAG else 1
    between = st.lists(st.integers(0, total // step), max_size=MOST - 1)
    sets = []
    for ends in draw(st.lists(between, min_size=1, max_size=4)):
        offsets = [0, *sorted(end * step for end in ends), total]
        sets.append(tuple(b - a for a, b in zip(offsets, offsets[1:], strict=False)))
    return sets, cp, layout


def tables_of(sets, make):
    """For each set of documents, what ``make`` makes of them, and of the buffers once
    filled."""
    static = StaticDocuments(sum(sets[0]), MOST)
    first = make(static)
    for lengths in sets:
        offsets = (0, *accumulate(lengths))
        yield lengths, True, make(Documents(offsets, CPU))
        static.fill(offsets)
        yield lengths, False, first


def played_out(rows_by_rank, send_counts, size):
    """What every rank receives when rank r sends ``send_counts[r][t]`` of its rows to
    t."""
    messages = [
        x.split(list(n)) for x, n in zip(rows_by_rank, send_counts, strict=True)
    ]
    return [
        torch.cat([messages[giver][taker] for giver in range(size)])
        for taker in range(size)
    ]


@settings(deadline=None, max_examples=examples(25))
@given(fills(), st.integers(2, 6))
def test_every_piece_gets_the_rows_before_it_and_sends_their_gradients_back(fill, taps):
    sets, cp, layout = fill
    past = taps - 1

    def make(documents):
        return [
            history_route(documents, SequencePartition(cp, layout, rank), taps)
            for rank in range(cp)
        ]

    for lengths, known, routes in tables_of(sets, make):
        pieces = pieces_of(lengths, cp, layout)
        if routes[0] is None:
            assert known and routes == [None] * cp and (pieces.seen == 0).all()
            continue
        sends, receives = ([x[i] for x in routes] for i in (1, 2))
        assert [list(x) for x in zip(*sends, strict=True)] == [
            list(x) for x in receives
        ]
        held = [local_indices(lengths, cp, rank, layout) for rank in range(cp)]
        rows = [mine[route.send_rows] for mine, route in zip(held, routes, strict=True)]
        received = played_out(rows, sends, cp)
        returning = []
        expected = torch.zeros(sum(lengths), dtype=torch.float64)
        for rank, table in enumerate(route.history_table for route in routes):
            assert len(received[rank]) == sum(receives[rank])
            # Every piece that continues a document: the rows before it, and its first
            # ones.
            continued = [p for p in pieces.held_by(rank).tolist() if pieces.seen[p]]
            there = (table.edge_tokens[:, 0] >= 0).nonzero().flatten()
            assert len(there) == len(continued)
            assert (table.rows_before[table.edge_tokens[:, 0] < 0] == -1).all()
            assert (table.edge_tokens[table.edge_tokens[:, 0] < 0] == -1).all()
            assert len(table.edge_tokens) == len(there) or not known
            # newest history first
            gradient = torch.rand(len(there), past, dtype=torch.float64)
            back = torch.full((len(received[rank]),), torch.nan, dtype=torch.float64)
            place = torch.full((len(held[rank]),), -1)
            for line, piece, of_piece in zip(
                there.tolist(), continued, gradient, strict=True
            ):
                history = table.rows_before[line].tolist()
                edge = table.edge_tokens[line].tolist()
                start, seen, length = (
                    int(x[piece]) for x in (pieces.start, pieces.seen, pieces.length)
                )
                first = edge[0]
                count = min(length, past)
                assert held[rank][first] == start
                assert edge == [*range(first, first + count), *[-1] * (past - count)]
                place[first : first + count] = line * past + torch.arange(count)
                of_document = min(seen, past)
                assert history[of_document:] == [-1] * (past - of_document)
                for age, row in enumerate(history[:of_document]):
                    assert received[rank][row] == start - 1 - age
                    assert back[row].isnan(), (
                        "every row that is read is read by one piece"
                    )
                    back[row] = of_piece[age]
                    expected[start - 1 - age] += of_piece[age]
            assert not (known and back.isnan().any()), "every row that arrives is read"
            assert torch.equal(table.edge_index, place.int())
            returning.append(back)
        returned = played_out(returning, receives, cp)
        total = torch.zeros(sum(lengths), dtype=torch.float64)
        for rank, table in enumerate(route.history_table for route in routes):
            pool = torch.cat([returned[rank], torch.zeros(1)])
            lines = table.gradient_additions[table.gradient_additions[:, 0] >= 0]
            assert len(lines) == len(table.gradient_additions) or not known
            tokens = lines[:, 0]
            sources = lines[:, 1:]
            assert len(tokens) == len(tokens.unique())
            total[held[rank][tokens]] += pool[sources].sum(1)
        # no NaN: no row that nobody read is added
        torch.testing.assert_close(total, expected)


@settings(deadline=None, max_examples=examples(60))
@given(fills(), st.integers(1, 3))
def test_states_enter_every_piece_as_one_rank_would_have_them(fill, rows):
    """Scalar states: S_out = a S_in + b per piece; the paths by hand against the
    tables."""
    sets, cp, layout = fill

    def make(documents):
        count = rows if documents.known_on_host else 1
        return [
            state_table(documents, SequencePartition(cp, layout, rank), count)
            for rank in range(cp)
        ]

    for lengths, known, tables in tables_of(sets, make):
        require_states(lengths, cp, layout, tables, rows if known else 1, known)


def along_paths(paths, a, b, cuts):
    """The state at every node that gets one; ``a``, ``b`` of the nodes that send."""
    entering = {}
    for path in paths.nodes_of_paths:
        state = 0
        for step, j in enumerate(path):
            if step:
                entering[j] = state
            if step < len(path) - 1:
                through = 0 if cuts is not None and cuts[step] else a.get(j, torch.nan)
                state = b[j] + (through * state if step else 0)
    return entering


def require_states(lengths, cp, layout, tables, rows, known):
    pieces = pieces_of(lengths, cp, layout)
    if tables[0] is None:
        assert known and (pieces.seen == 0).all()
        return
    maps = torch.rand(rows, len(pieces.start), 2, dtype=torch.float64)  # a, b
    entering, leaving = torch.zeros(2, *maps.shape[:2], dtype=torch.float64)
    for i in range(1, len(pieces.start)):
        if pieces.seen[i]:
            entering[:, i] = maps[:, i - 1, 0] * entering[:, i - 1] + maps[:, i - 1, 1]
    for i in reversed(range(len(pieces.start) - 1)):
        if pieces.seen[i + 1]:
            leaving[:, i] = maps[:, i + 1, 0] * leaving[:, i + 1] + maps[:, i + 1, 1]

    paths = tables[0].paths
    assert all(t.paths == paths for t in tables)
    if known:
        # Nothing is sent but what a piece needs.
        continued = int((pieces.seen > 0).sum())
        assert continued == len(paths.receiving_nodes) * tables[0].chain_count // rows
    held = [pieces.held_by(rank) for rank in range(cp)]
    counts = [t.pieces.sequences // rows for t in tables]
    a, b, d = {}, {}, {}
    for table, count, h in zip(tables, counts, held, strict=True):
        # Nobody writes the maps of pieces that are not there.
        mine = maps.new_full((rows, count, 2), torch.nan)
        mine[:, : len(h)] = maps[:, h]
        mine = mine.flatten(0, 1)[..., None, None, None]  # [N, 2, 1, 1, 1]
        masks = table.masks
        leaves, enters, passes = (None,) * 3 if masks is None else masks
        assert (masks is None) == known

        def by_node(x, nodes, table=table):
            return dict(zip(nodes, x.view(len(nodes), table.chain_count), strict=True))

        a |= by_node(
            _select_pieces(mine[:, 0], table.exit_pieces, passes), table.sending_nodes
        )
        b |= by_node(
            _select_pieces(mine[:, 1], table.exit_pieces, leaves), table.sending_nodes
        )
        d |= by_node(
            _select_pieces(mine[:, 1], table.entry_pieces, enters),
            table.receiving_nodes,
        )
    cuts = tables[0].cuts
    assert layout is SequenceLayout.ZIGZAG or known or cuts[0] is not None
    forward = along_paths(paths, a, b, cuts[0])
    backward = along_paths(paths.reversed(), a, d, cuts[1])
    for rank, table in enumerate(tables):
        count = counts[rank]
        here = len(held[rank])
        assert len(table.pieces.cu_seqlens) - 1 == rows * count
        assert count == here if known else count > here
        if table.gathered_exit_pieces is not None:
            tokens, pieces_alone = table.gathered_exit_pieces
            stretches = torch.arange(pieces.tokens).split(list(table.pieces.lengths))
            left = [stretches[i] for i in table.exit_pieces.tolist()]
            assert torch.equal(tokens, torch.cat(left))
            assert list(pieces_alone.lengths) == [len(x) for x in left]
            assert 2 * len(tokens) < pieces.tokens
        for states, nodes, index, right in (
            (forward, table.receiving_nodes, table.entry_pieces, entering),
            (backward, table.sending_nodes, table.exit_pieces, leaving),
        ):
            at_nodes = torch.cat([states[j] for j in nodes] or [maps.new_zeros(0)])
            got = _fill_pieces(at_nodes, index, rows * count).view(rows, count)
            torch.testing.assert_close(got[:, :here], right[:, held[rank]])
            assert not got[:, here:].any()


class CopyCount(TorchDispatchMode):
    """Counts the operations that write a tensor."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        self.count += name in ("cat", "clone", "copy_", "_to_copy")
        return function(*args, **(kwargs or {}))


def test_the_two_parts_of_one_tensor_are_not_copied():
    whole = torch.randn(1, 6, 4, 9)
    local, through = whole.split([5, 4], dim=-1)
    rows = pack_maps_by_rank(local, through, (3, 3))
    assert torch.equal(rows, whole[0])
    assert rows.data_ptr() == whole.data_ptr() and rows.is_contiguous()


@pytest.mark.parametrize(
    "split",
    [
        lambda x: (x[..., :5].contiguous(), x[..., 5:].contiguous()),
        lambda x: (x[..., 5:], x[..., :5]),
        lambda x: (x[..., :5], x[..., 5:].mT),
        lambda x: (x[..., :4], x[..., 5:]),
        lambda x: (x[..., :5], (x + 1)[..., 5:]),
        lambda x: (x[:1, ..., :5], x[1:, ..., 5:]),
        lambda x: (x.transpose(0, 1)[..., :5], x.transpose(0, 1)[..., 5:]),
    ],
    ids=[
        "apart",
        "reversed",
        "transposed",
        "gap",
        "other tensor",
        "other rows",
        "other order",
    ],
)
@pytest.mark.parametrize("equal", [True, False], ids=["equal shares", "others"])
def test_whatever_else_they_are_each_rank_gets_its_share(split, equal):
    local, through = split(torch.randn(2, 2, 4, 9))
    joined = torch.cat([local, through], dim=-1)
    M = joined.shape[1]
    shares = (M // 2, M // 2) if equal and M > 1 else (M, 0)
    expected = torch.cat([x.flatten(0, 1) for x in joined.split(shares, dim=1)])
    with CopyCount() as copies:
        rows = pack_maps_by_rank(local, through, shares)
    assert torch.equal(rows, expected) and rows.is_contiguous()
    assert copies.count <= (1 if equal else 2)

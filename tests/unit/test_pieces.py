"""Tables of chunkwise context parallelism against their definition, played out on the host."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import local_indices
from megatron_gdn.context_parallel.chunkwise.map_exchange import pack
from megatron_gdn.context_parallel.chunkwise.pieces import history_route, pieces_of
from megatron_gdn.context_parallel.chunkwise.states import _put, _take, chain_nodes, state_table
from megatron_gdn.context_parallel.chunkwise.static_history import static_history_route
from megatron_gdn.ops import Documents, StaticDocuments

CPU = torch.device("cpu")


@st.composite
def cuts(draw):
    """(lengths, cp, layout): documents of any length where the layout allows, empty ones too."""
    cp, layout = draw(st.integers(2, 5)), draw(st.sampled_from(SequenceLayout))
    units = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    if layout is SequenceLayout.ZIGZAG:
        return tuple(2 * cp * n for n in units), cp, layout
    total = sum(units) * (cp if layout is SequenceLayout.CONTIGUOUS else 2 * cp)
    ends = sorted(draw(st.lists(st.integers(0, total), max_size=5)))
    return tuple(b - a for a, b in zip([0, *ends], [*ends, total], strict=True)), cp, layout


def position_in_document(lengths):
    return torch.cat([torch.arange(n) for n in lengths] + [torch.arange(0)])


@settings(deadline=None)
@given(cuts())
def test_pieces_are_the_stretches_of_one_document_that_a_rank_holds_together(cut):
    lengths, cp, layout = cut
    pieces, position = pieces_of(*cut), position_in_document(lengths)
    remaining = torch.cat([torch.arange(n).flip(0) for n in lengths] + [torch.arange(0)])
    assert int(pieces.length.sum()) == sum(lengths)
    for rank in range(cp):
        mine, held = pieces.held_by(rank), local_indices(lengths, cp, rank, layout)
        stretches = [torch.arange(s, s + n) for s, n in zip(
            pieces.start[mine].tolist(), pieces.length[mine].tolist(), strict=True
        )]  # fmt: skip
        assert torch.equal(torch.cat([*stretches, held[:0]]), held)
        for piece, stretch in zip(mine, stretches, strict=True):
            assert pieces.seen[piece] == position[stretch[0]]
            assert pieces.left[piece] == remaining[stretch[-1]]
            assert torch.equal(position[stretch], position[stretch[0]] + torch.arange(len(stretch)))


def played_out(rows_by_rank, send_counts, size):
    """What every rank receives when rank r sends ``send_counts[r][t]`` of its rows to t."""
    messages = [x.split(list(n)) for x, n in zip(rows_by_rank, send_counts, strict=True)]
    return [torch.cat([messages[giver][taker] for giver in range(size)]) for taker in range(size)]


@settings(deadline=None)
@given(cuts(), st.integers(2, 5))
def test_every_piece_gets_the_rows_before_it_and_sends_their_gradients_back(cut, taps):
    lengths, cp, layout = cut
    routes = [history_route(*cut, rank, taps, CPU) for rank in range(cp)]
    if routes[0] is None:
        pieces = pieces_of(*cut)
        assert routes == [None] * cp and (pieces.seen == 0).all()
        return
    held = [local_indices(lengths, cp, rank, layout) for rank in range(cp)]
    received = played_out(
        [rows[route.send_rows] for rows, route in zip(held, routes, strict=True)],
        [route.send_counts for route in routes],
        cp,
    )
    past, returning = taps - 1, []
    expected = torch.zeros(sum(lengths), dtype=torch.float64)
    for rank, table in enumerate(route.table for route in routes):
        assert len(received[rank]) == sum(routes[rank].receive_counts)
        # Every piece that continues a document: the rows before it, and its first ones.
        continued = [p for p in pieces_of(*cut).held_by(rank).tolist() if pieces_of(*cut).seen[p]]
        assert len(table.before) == len(continued)
        gradient = torch.rand(len(continued), past, dtype=torch.float64)  # newest history first
        back = torch.full((len(received[rank]),), torch.nan, dtype=torch.float64)
        place = torch.full((len(held[rank]),), -1)
        lines = zip(table.before.tolist(), table.edge.tolist(), continued, gradient, strict=True)
        for line, (history, edge, piece, of_piece) in enumerate(lines):
            start, seen, length = (
                int(x[piece]) for x in (pieces_of(*cut).start, pieces_of(*cut).seen,
                                        pieces_of(*cut).length)
            )  # fmt: skip
            first, count = edge[0], min(length, past)
            assert held[rank][first] == start
            assert edge == [*range(first, first + count), *[-1] * (past - count)]
            place[first : first + count] = line * past + torch.arange(count)
            known = min(seen, past)
            assert history[known:] == [-1] * (past - known)
            for age, row in enumerate(history[:known]):
                assert received[rank][row] == start - 1 - age
                back[row] = of_piece[age]
                expected[start - 1 - age] += of_piece[age]
        assert not back.isnan().any(), "every row that arrives is the history of one piece"
        assert torch.equal(table.place, place.int())
        returning.append(back)
    returned = played_out(returning, [route.receive_counts for route in routes], cp)
    total = torch.zeros(sum(lengths), dtype=torch.float64)
    for rank, table in enumerate(route.table for route in routes):
        pool = torch.cat([returned[rank], torch.zeros(1)])
        tokens, sources = table.additions[:, 0], table.additions[:, 1:]
        assert len(tokens) == len(tokens.unique())
        total[held[rank][tokens]] += pool[sources].sum(1)
    torch.testing.assert_close(total, expected)


@settings(deadline=None)
@given(cuts(), st.integers(1, 3))
def test_states_enter_every_piece_as_one_rank_would_have_them(cut, rows):
    """Scalar states: S_out = a S_in + b per piece; the chain by hand against the tables."""
    lengths, cp, layout = cut
    pieces, nodes = pieces_of(*cut), chain_nodes(cp, layout)
    documents = Documents((0, *torch.tensor(lengths).cumsum(0).tolist()), CPU)
    tables = [state_table(documents, cp, layout, rank, rows) for rank in range(cp)]
    if tables[0] is None:
        assert (pieces.seen == 0).all()
        return
    n = len(nodes.hosts)
    maps = torch.rand(rows, len(pieces.start), 2, dtype=torch.float64)  # a, b
    entering, leaving = torch.zeros(2, *maps.shape[:2], dtype=torch.float64)
    for i in range(1, len(pieces.start)):
        if pieces.seen[i]:
            entering[:, i] = maps[:, i - 1, 0] * entering[:, i - 1] + maps[:, i - 1, 1]
    for i in reversed(range(len(pieces.start) - 1)):
        if pieces.seen[i + 1]:
            leaving[:, i] = maps[:, i + 1, 0] * leaving[:, i + 1] + maps[:, i + 1, 1]

    def chain(nodes, a_by_rank, b_by_rank):
        """Exclusive fold over the nodes, on ``[h, rows * chains]`` of every rank."""
        results, state = [torch.zeros_like(b) for b in b_by_rank], 0
        for j in range(n):
            host, slot = nodes.hosts[j], nodes.slots[j]
            results[host][slot] = state
            state = a_by_rank[host][slot] * state + b_by_rank[host][slot]
        return results

    held = [pieces.held_by(rank) for rank in range(cp)]
    mine = [maps[:, h].flatten(0, 1)[..., None, None, None] for h in held]  # [N, 2, 1, 1, 1]
    both = list(zip(mine, tables, strict=True))
    a = [_take(m[:, 0], t.last, t.passes).view(t.node_count, -1) for m, t in both]
    b = [_take(m[:, 1], t.last, t.leaves).view(t.node_count, -1) for m, t in both]
    d = [_take(m[:, 1], t.first, t.enters).view(t.node_count, -1) for m, t in both]
    forward, backward = chain(nodes, a, b), chain(nodes.backwards(), a, d)
    for j in range(1, n - 1):  # the maps of the ends are not followed
        cut_at = [False, False]
        if tables[0].cuts is not None:
            cut_at = [cuts.at(at) for cuts, at in zip(tables[0].cuts, (j, n - 1 - j), strict=True)]
        assert (a[nodes.hosts[j]][nodes.slots[j]] == 0).all() == cut_at[0] == cut_at[1]
    assert all(t.nodes == nodes for t in tables)
    assert len({None if t.cuts is None else t.cuts[0].known for t in tables}) == 1
    for rank, table in enumerate(tables):
        count = rows * len(held[rank])
        assert len(table.sequences.lengths) == count
        if table.leavers is not None:
            tokens, pieces_alone = table.leavers
            stretches = torch.arange(pieces.tokens).split(list(table.sequences.lengths))
            last = [stretches[i] for i in table.last.tolist()]
            assert torch.equal(tokens, torch.cat(last))
            assert list(pieces_alone.lengths) == [len(x) for x in last]
        got = _put(forward[rank].flatten(), table.first, count)
        torch.testing.assert_close(got, entering[:, held[rank]].flatten())
        got = _put(backward[rank].flatten(), table.last, count)
        torch.testing.assert_close(got, leaving[:, held[rank]].flatten())


UNITS = 24  # tokens of the buffer, in the smallest documents that zigzag can cut
FILLS = ((24,), (1,) * 8 + (16,), (2, 0, 3, 1, 18), (5, 1, 1, 17), (0, 0, 23, 1))


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
@pytest.mark.parametrize("taps", [2, 3, 4, 6])
def test_every_piece_gets_the_rows_before_it_and_their_gradients_return(cp, taps):
    reach, unit = taps - 1, 2 * cp
    documents = StaticDocuments(UNITS * unit, 9)
    routes = [static_history_route(documents, cp, rank, taps) for rank in range(cp)]
    sends = [route.send_counts for route in routes]
    receives = [route.receive_counts for route in routes]
    assert [list(x) for x in zip(*sends, strict=True)] == [list(x) for x in receives]
    make = torch.Generator().manual_seed(cp * taps)
    for fill in FILLS:
        lengths = [units * unit for units in fill]
        ends = torch.tensor(lengths).cumsum(0)
        documents.fill([0, *ends.tolist()])
        tokens = [local_indices(lengths, cp, rank) for rank in range(cp)]
        rows = [x[route.send_rows] for x, route in zip(tokens, routes, strict=True)]
        arrived = played_out(rows, sends, cp)
        expected = torch.zeros(UNITS * unit, dtype=torch.int64)
        d_histories = []
        for mine, route, history in zip(tokens, routes, arrived, strict=True):
            d_history, place = torch.zeros_like(history), torch.full((len(mine),), -1)
            lines = zip(route.table.before.tolist(), route.table.edge.tolist(), strict=True)
            for line, (before, edge) in enumerate(lines):
                count = sum(token >= 0 for token in edge)
                if not count:
                    assert before == edge == [-1] * reach
                    continue
                first = edge[0]
                assert edge == [*range(first, first + count), *[-1] * (reach - count)]
                place[first : first + count] = line * reach + torch.arange(count)
                start = mine[first].item()
                document = int((ends <= start).sum())
                begin = int(ends[document]) - lengths[document]
                assert count == min(reach, lengths[document] // (2 * cp))
                for age, row in enumerate(before, 1):
                    assert (row >= 0) == (start - age >= begin)
                    if row >= 0:
                        assert history[row] == start - age
                        grad = int(torch.randint(1, 99, (), generator=make))
                        d_history[row] += grad
                        expected[start - age] += grad
            assert torch.equal(route.table.place, place.int())
            d_histories.append(d_history)
        returned = played_out(d_histories, receives, cp)
        found = torch.zeros_like(expected)
        for mine, route, back in zip(tokens, routes, returned, strict=True):
            sources = torch.cat([back, torch.zeros(1, dtype=torch.int64)])
            lines = route.table.additions.long()
            there = lines[lines[:, 0] >= 0]
            assert len(there[:, 0].unique()) == len(there)
            found[mine[there[:, 0]]] += sources[there[:, 1:]].sum(1)
        assert torch.equal(found, expected)


def test_the_two_parts_of_one_tensor_are_not_copied():
    whole = torch.randn(2, 3, 4, 9)
    local, through = whole.split([5, 4], dim=-1)
    packed = pack(local, through)
    assert torch.equal(packed, whole) and packed.data_ptr() == whole.data_ptr()
    assert packed.is_contiguous()


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
    ids=["apart", "reversed", "transposed", "gap", "other tensor", "other rows", "other order"],
)
def test_whatever_else_they_are_the_result_is_theirs(split):
    local, through = split(torch.randn(2, 3, 4, 9))
    packed = pack(local, through)
    assert torch.equal(packed, torch.cat([local, through], dim=-1)) and packed.is_contiguous()

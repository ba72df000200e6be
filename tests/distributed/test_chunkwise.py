"""Chunkwise context parallelism: what is its own beside the laws that hold for both
schemes."""

from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import agreement, rank_order_of_sequence
from megatron_gdn.context_parallel.chunkwise.fragments import SequencePartition
from megatron_gdn.context_parallel.chunkwise.map_exchange import (
    StatePaths,
    states_entering_nodes,
)
from megatron_gdn.gdn import layer as layer_module
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.ops.delta_rule.plain import PlainBackward, PlainForward
from megatron_gdn.ops.rules.choice import Choice
from tests.distributed.layer_laws import over_ranks, thd
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN
from tests.ops.delta_rule.states import InHalf
from tests.ranks import on_ranks

LAYOUTS = ["zigzag", "zigzag_buffer", "contiguous"]
TWO_KEY_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
sizes = pytest.mark.parametrize("size", [2, 4, 8])


def states_equal_products(
    layout: str,
    backwards: bool,
    dtype: torch.dtype,
    ends: tuple[int, ...] = (),
    by_flags: bool = False,
) -> None:
    """The exchange gives every node the product of the maps before it.

    ``ends``: nodes that a state enters or leaves, but does not pass; with ``by_flags``
    only the device knows these. Before the last end may stand NaN: no bit after it
    changes.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    M = 3
    K = 4
    V = 5
    hosts = SequencePartition(size, SequenceLayout.parse(layout), rank).nodes.ranks
    n = len(hosts)
    every = tuple(range(n))
    stops = sorted({0, n - 1, *ends})
    stretches = tuple(every[a : b + 1] for a, b in pairwise(stops))
    paths = StatePaths(hosts, (every,) if by_flags else stretches)
    cuts = None
    if by_flags:
        cuts = torch.tensor([j in ends for j in every], dtype=torch.int32)
    order = every
    if backwards:
        paths = paths.reversed()
        cuts = None if cuts is None else cuts.flip(0)
        order = every[::-1]
    torch.manual_seed(0)  # the same maps on every rank, of which each uses its own
    local = torch.randn(n, M, K, V, dtype=dtype)
    through = torch.randn(n, M, K, K, dtype=dtype) / 2
    state = torch.zeros(M, K, V, dtype=torch.float64)
    entering = {}
    for j in order:
        entering[j] = state
        state = local[j].double() + (0 if j in ends else through[j].double() @ state)
    sent = list(paths.sending_nodes_of(rank))
    received = paths.receiving_nodes_of(rank)
    last = max((order.index(j) for j in ends), default=-1)
    ill = [j for j in sent if order.index(j) < last]

    def exchanged(local: torch.Tensor) -> torch.Tensor:
        return states_entering_nodes(
            local[sent], through[sent], paths, dist.group.WORLD, cuts
        )

    got = exchanged(local)
    assert got.dtype == dtype and torch.equal(got, exchanged(local))
    assert len(got) == len(received)
    local[ill] = float("nan")
    beside_nan = exchanged(local)
    for j, x, y in zip(received, got, beside_nan, strict=True):
        assert order.index(j) <= last or torch.equal(x, y), (j, last)
        # Products of up to 16 maps, each a sum of 4: some 8 roundings deep.
        atol = 64 * torch.finfo(dtype).eps
        torch.testing.assert_close(x.double(), entering[j], rtol=0, atol=atol)


def equal(pools, tp, cp, *args, **options):
    pools(tp * cp).run(
        parallel_equals_one_rank, GDN, tp, cp, *args, mode="chunkwise", **options
    )


@pytest.mark.each_value
@sizes
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_exchange_gives_the_product_of_the_maps_before(pools, size, layout):
    for backwards in (False, True):
        for dtype in (torch.float32, torch.float64):
            pools(size).run(states_equal_products, layout, backwards, dtype)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        (6, "contiguous"),
        pytest.param(8, "contiguous", marks=pytest.mark.slow),
        (4, "zigzag_buffer"),
    ],
)
@pytest.mark.parametrize("by_flags", [False, True], ids=["host knows", "device knows"])
def test_no_state_passes_the_end_of_its_path(pools, size, layout, by_flags):
    n = 2 * size - 1 if layout == "zigzag_buffer" else size
    last = n - 1
    for ends in ((0,), (1,), (2,), (0, 1, 2, last - 1), (2, last), tuple(range(n))):
        for backwards in (False, True):
            args = (layout, backwards, torch.float32, ends, by_flags)
            pools(size).run(states_equal_products, *args)


@pytest.mark.parametrize(
    "lengths",
    [pytest.param(None, marks=pytest.mark.slow), (16, 0, 48, 32)],
    ids=["batch", "packed"],
)
def test_eight_ranks_of_two_key_heads_equal_one_rank(pools, lengths):
    equal(pools, 1, 8, lengths=lengths, changes=TWO_KEY_HEADS)


@pytest.mark.parametrize(
    ("cp", "layout"),
    [  # at 4 the rows before come from several ranks
        pytest.param(2, "zigzag", marks=pytest.mark.slow),
        (2, "zigzag_buffer"),
        pytest.param(2, "contiguous", marks=pytest.mark.slow),
        (4, "zigzag"),
        pytest.param(4, "zigzag_buffer", marks=pytest.mark.slow),
        pytest.param(4, "contiguous", marks=pytest.mark.slow),
    ],
)
def test_chunks_shorter_than_the_taps_equal_one_rank(pools, cp, layout):
    chunks = cp if layout == "contiguous" else 2 * cp
    for tokens in (chunks, 2 * chunks):
        equal(pools, 1, cp, tokens=tokens, batch=3, layout=layout, conv_bias=True)
    equal(pools, 1, cp, lengths=(chunks, 0, chunks, 2 * chunks), layout=layout)


@pytest.mark.each_value
@pytest.mark.parametrize("layout", LAYOUTS)
def test_documents_across_many_ranks_equal_one_rank(pools, layout):
    equal(pools, 1, 4, lengths=(128, 0, 64), layout=layout)


def test_a_rank_of_nothing_but_padding_equals_one_rank(pools):
    equal(pools, 1, 2, lengths=(24,), real_lengths=(11,), layout="contiguous")
    equal(pools, 1, 4, lengths=(12, 20), real_lengths=(12, 3), layout="contiguous")


@pytest.mark.parametrize("layout", ["zigzag_buffer", "contiguous"])
@pytest.mark.parametrize("last", [2, 19], ids=["short", "long"])
def test_runs_of_several_documents_equal_one_rank(pools, layout, last):
    """Maps are computed of the last piece of a run alone, or of all pieces at once."""
    equal(pools, 1, 2, lengths=(20 - last, last + 3, 0, 17), layout=layout)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "rates", [(1e-4, 2e-4), (16, 20)], ids=["no decay", "strong decay"]
)
@pytest.mark.parametrize("lengths", [None, (8, 24, 16, 8)], ids=["batch", "packed"])
def test_any_decay_equals_one_rank(pools, rates, lengths):
    equal(pools, 2, 2, True, lengths=lengths, A_init_range=rates)


@pytest.mark.parametrize("taps", [1, 2, 7])
def test_any_number_of_taps_equals_one_rank(pools, taps):
    for layout in LAYOUTS:
        changes = {"linear_conv_kernel_dim": taps}
        equal(pools, 1, 2, lengths=(8, 4, 12), layout=layout, changes=changes)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("lengths", [None, (8, 24, 0, 16)], ids=["batch", "packed"])
@on_ranks(2)
def test_fp16_operands_equal_one_rank(lengths, mode):
    """Every rank takes powers of two of its own; states and their gradients know none
    of them.

    To twice 8 tensors' rounding to fp16 by 2^-12: each side has its own.
    """
    choice = Choice(HalfOperands(InHalf()), "")
    rounded = replace(GDN, tolerance=2 * 8 * 2**-12)
    with patch.object(layer_module, "resolve_rule", lambda *_, **__: choice):
        parallel_equals_one_rank(rounded, 1, 2, lengths=lengths, mode=mode)


@on_ranks(cp=2)
def test_nothing_is_sent_where_no_document_is_cut():
    """Documents that end where ranks do: chunkwise sends nothing but what ranks
    compare."""
    layer = over_ranks(linear_cp_mode="chunkwise", cp_layout="contiguous")
    refuse = AssertionError("a collective")
    with (
        patch.object(agreement, "_all_ranks_compare", lambda *_: False),
        patch.object(dist, "all_to_all_single", side_effect=refuse),
        patch.object(dist, "all_gather_into_tensor", side_effect=refuse),
    ):
        x = torch.randn(8, 1, layer.hidden_size, requires_grad=True)
        layer(x, None, packed_seq_params=thd((5, 3, 0, 8)))[0].sum().backward()


WHOLE = 0
# Rows of history, states, and the gradients of both.
STATES_GO_TO_THE_NEXT_RANK = 4
# In place of states their maps, whose products are sent back.
STATES_PASS_A_RANK = 6
SENT = {
    "ranks end documents": ((10, 0, 22, 32), "contiguous", WHOLE),
    "middle document": ((16, 4, 24, 4, 16), "zigzag_buffer", WHOLE),
    "middle documents": ((16, 4, 12, 16, 16), "zigzag_buffer", WHOLE),
    "one end": ((10, 0, 23, 31), "contiguous", STATES_GO_TO_THE_NEXT_RANK),
    "many documents": ((3,) * 21 + (1,), "contiguous", STATES_GO_TO_THE_NEXT_RANK),
    "two of three": ((20, 24, 20), "zigzag_buffer", STATES_GO_TO_THE_NEXT_RANK),
    "all three": ((8, 50, 6), "zigzag_buffer", STATES_PASS_A_RANK),
    "every document": ((16, 32, 16), "zigzag", STATES_PASS_A_RANK),
}
of_sent = pytest.mark.parametrize(
    ("lengths", "layout", "messages"), SENT.values(), ids=SENT
)


@pytest.mark.each_value
@of_sent
@on_ranks(cp=2)
def test_only_documents_on_several_ranks_cost_messages(lengths, layout, messages):
    """As many for many documents."""
    layer = over_ranks(linear_cp_mode="chunkwise", cp_layout=layout)
    x = torch.randn(sum(lengths) // 2, 1, layer.config.hidden_size, requires_grad=True)
    with patch.object(
        dist, "all_to_all_single", wraps=dist.all_to_all_single
    ) as exchange:
        layer(x, None, packed_seq_params=thd(lengths))[0].sum().backward()
    assert exchange.call_count == messages
    batch = layer.micro_batches.of(thd(lengths), layer.project(x))
    sequence_context = batch.passage.sequence_context
    assert (sequence_context.history is None) == (sequence_context.states is None)
    assert (sequence_context.states is None) == (messages == 0)


@pytest.mark.each_value
@of_sent
@on_ranks(cp=2)
def test_auto_takes_chunkwise_where_it_sends_nothing(lengths, layout, messages):
    """The tokens are few, so headwise is the cheaper one elsewhere."""
    layer = over_ranks(linear_cp_mode="auto", cp_layout=layout)
    x = torch.randn(sum(lengths) // 2, 1, layer.config.hidden_size)
    batch = layer.micro_batches.of(thd(lengths), layer.project(x))
    assert batch.scheme.name == ("headwise" if messages else "chunkwise")


@of_sent
@on_ranks(cp=2)
def test_maps_are_made_of_documents_that_go_on_alone(lengths, layout, messages):
    """Of pieces that a state leaves, or of all pieces if these have half of the tokens;
    the rule has a sequence for each piece, and no document inside a rank is cut."""
    layer = over_ranks(linear_cp_mode="chunkwise", cp_layout=layout)
    rank = dist.get_rank()
    x = torch.randn(sum(lengths) // 2, 1, layer.config.hidden_size, requires_grad=True)
    made = []
    forward = PlainForward.state_map

    def counted(self):
        made.append(list(self.documents.lengths))
        return forward(self)

    backwards = []
    backward = PlainBackward.d_initial

    def counted_backward(self):
        backwards.append(self.documents.sequences)
        return backward(self)

    run = []
    plain = PlainForward.run

    def ran(self, *args, **kwargs):
        run.append(list(self.documents.lengths))
        return plain(self, *args, **kwargs)

    with (
        patch.object(PlainForward, "state_map", counted),
        patch.object(PlainForward, "run", ran),
        patch.object(PlainBackward, "d_initial", counted_backward),
    ):
        layer(x, None, packed_seq_params=thd(lengths))[0].sum().backward()
    stretches = stretches_of(lengths, layout, 2)
    mine = [tokens for tokens, holder, *_ in stretches if holder == rank]
    left = [
        tokens for tokens, holder, _, leaves in stretches if holder == rank and leaves
    ]
    enters = any(enters for _, holder, enters, _ in stretches if holder == rank)
    in_order = sorted(mine)
    assert [sorted(x) for x in run] == [in_order]
    expected = left if 2 * sum(left) < sum(mine) else mine
    assert [sorted(x) for x in made] == ([sorted(expected)] if left else [])
    assert len(backwards) == enters


def stretches_of(lengths, layout, cp):
    """All pieces as (tokens, rank, whether a state enters, whether one leaves), by
    walking through the tokens of each document."""
    place = rank_order_of_sequence(lengths, cp, layout)
    per_rank = sum(lengths) // cp
    found = []
    start = 0
    for length in lengths:
        places = place[start : start + length].tolist()
        start += length
        cuts = [
            i
            for i, (a, b) in enumerate(pairwise(places), 1)
            if b != a + 1 or b % per_rank == 0
        ]
        if layout == "zigzag":  # the middle of a document is a cut too
            cuts = [length * i // (2 * cp) for i in range(1, 2 * cp)]
        edges = [0, *cuts, length]
        if length:
            found += [
                (b - a, places[a] // per_rank, a > 0, b < length)
                for a, b in pairwise(edges)
            ]
    return found

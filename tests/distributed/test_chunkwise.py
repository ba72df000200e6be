"""Chunkwise context parallelism: what is its own beside the laws that hold for both
schemes."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import agreement
from megatron_gdn.context_parallel.chunkwise.fragments import Cutting
from megatron_gdn.context_parallel.chunkwise.map_exchange import (
    states_entering_nodes,
)
from megatron_gdn.gdn import layer as layer_module
from megatron_gdn.gdn.half import HalfOperands
from megatron_gdn.ops.rules.choice import Choice
from megatron_gdn.ops.state_maps.state_map import Cuts
from tests.distributed.layer_laws import over_ranks, thd
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN
from tests.ops.delta_rule.states import InHalf
from tests.ranks import on_ranks

LAYOUTS = ["zigzag", "zigzag_buffer", "contiguous"]
TWO_KEY_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
sizes = pytest.mark.parametrize("size", [2, 4, 8])


def chains_equal_their_product(
    layout: str, backwards: bool, dtype: torch.dtype, cuts: tuple[int, ...] = ()
) -> None:
    """The exchange gives every node the product of the maps before it.

    Before the last cut may stand NaN: no bit after it changes.
    """
    rank = dist.get_rank()
    size = dist.get_world_size()
    M = 3
    K = 4
    V = 5
    nodes = Cutting(size, SequenceLayout.parse(layout), rank).nodes
    cut = tuple(j in cuts for j in range(len(nodes.hosts)))
    nodes, cut = (nodes.backwards(), cut[::-1]) if backwards else (nodes, cut)
    flags = torch.tensor(cut, dtype=torch.int32)
    # Nothing is cut; the host knows what; the device alone does.
    known = (Cuts(flags, cut), Cuts(flags, None)) if cuts else (None,)
    torch.manual_seed(0)  # the same maps on every rank, of which each uses its own
    n = len(nodes.hosts)
    local = torch.randn(n, M, K, V, dtype=dtype)
    through = torch.randn(n, M, K, K, dtype=dtype) / 2
    through[list(cut)] = 0
    state = torch.zeros(M, K, V, dtype=torch.float64)
    entering = []
    for j in range(n):
        entering.append(state)
        state = through[j].double() @ state + local[j].double()
    mine = [(j, nodes.slots[j]) for j, host in enumerate(nodes.hosts) if host == rank]
    maps = torch.empty(M, len(mine), K, V + K, dtype=dtype)
    for j, slot in mine:
        maps[:, slot] = torch.cat([local[j], through[j]], dim=-1)
    last = max((j for j in range(n) if cut[j]), default=-1)
    ill = maps.clone()
    for j, slot in mine:
        if j < last:
            ill[:, slot] = float("nan")
    for at in known:
        got = states_entering_nodes(maps, V, nodes, dist.group.WORLD, at)
        again = states_entering_nodes(maps, V, nodes, dist.group.WORLD, at)
        assert got.dtype == dtype and torch.equal(got, again)
        beside_nan = states_entering_nodes(ill, V, nodes, dist.group.WORLD, at)
        for j, slot in mine:
            assert j <= last or torch.equal(beside_nan[slot], got[slot]), (j, last)
            # Products of up to 16 maps, each a sum of 4: some 8 roundings deep.
            torch.testing.assert_close(
                got[slot].double(),
                entering[j],
                rtol=0,
                atol=64 * torch.finfo(dtype).eps,
            )


def equal(pools, tp, cp, *args, **options):
    pools(tp * cp).run(
        parallel_equals_one_rank, GDN, tp, cp, *args, mode="chunkwise", **options
    )


@pytest.mark.each_value
@sizes
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_the_exchange_gives_the_product_of_the_maps_before(pools, size, layout):
    for backwards in (False, True):
        for dtype in (torch.float32, torch.float64):
            pools(size).run(chains_equal_their_product, layout, backwards, dtype)


@pytest.mark.parametrize("size", [6, 8])
def test_no_exchange_passes_a_cut(pools, size):
    last = size - 1
    for cuts in ((0,), (1,), (2,), (0, 1, 2, last - 1), (2, last), tuple(range(size))):
        for backwards in (False, True):
            args = ("contiguous", backwards, torch.float32, cuts)
            pools(size).run(chains_equal_their_product, *args)


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
        (4, "contiguous"),
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


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("lengths", "layout", "messages"),
    [
        ((10, 0, 22, 32), "contiguous", 0),
        ((16, 4, 12, 16, 16), "zigzag_buffer", 0),
        ((10, 0, 23, 31), "contiguous", 6),
        ((3,) * 21 + (1,), "contiguous", 6),
        ((16, 32, 16), "zigzag", 6),
    ],
    ids=str,
)
@on_ranks(cp=2)
def test_only_documents_on_several_ranks_cost_messages(lengths, layout, messages):
    """Of rows, maps and states, and their gradients; as many for many documents."""
    layer = over_ranks(linear_cp_mode="chunkwise", cp_layout=layout)
    x = torch.randn(sum(lengths) // 2, 1, layer.config.hidden_size, requires_grad=True)
    with patch.object(
        dist, "all_to_all_single", wraps=dist.all_to_all_single
    ) as exchange:
        layer(x, None, packed_seq_params=thd(lengths))[0].sum().backward()
    assert exchange.call_count == messages
    batch = layer.micro_batches.of(thd(lengths), layer.project(x))
    neighbours = batch.passage.neighbours
    assert (neighbours.history is None) == (neighbours.states is None)
    assert (neighbours.states is None) == (messages == 0)

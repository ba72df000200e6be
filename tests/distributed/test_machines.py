"""Ranks over several machines, which the option simulates: what travels, and its
price."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import agreement
from megatron_gdn.context_parallel.agreement import ranks_per_machine
from megatron_gdn.context_parallel.chunkwise import map_exchange
from megatron_gdn.context_parallel.chunkwise.fragments import SequencePartition
from megatron_gdn.context_parallel.price import map_exchange_traffic
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.distributed.layer_laws import over_ranks
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN
from tests.ranks import on_ranks

CPU = torch.device("cpu")


@pytest.mark.each_value
@pytest.mark.parametrize(
    ("size", "told"), [(8, 2), (8, 4), pytest.param(16, 8, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
@on_ranks("size")
def test_collectives_and_steps_are_those_that_are_priced(size, told, layout):
    """Collectives of one forward, bytes from this machine and from others, longest
    chain.

    The price counts a map and a state for every node. None is sent of the last node,
    and none to the first.
    """
    rank = dist.get_rank()
    heads = 16
    K = 4
    V = 3
    n = ranks_per_machine(dist.group.WORLD, told, CPU)
    layout = SequenceLayout.parse(layout)
    hosts = SequencePartition(size, layout, rank).nodes.ranks
    paths = map_exchange.StatePaths(hosts, (tuple(range(len(hosts))),))
    maps = torch.randn(len(paths.sending_nodes_of(rank)), heads, K, V + K)
    bytes_priced, steps = map_exchange_traffic(
        StateShape(heads, K, V), size, layout, 1, None
    )
    received = []
    products = []
    exchange = map_exchange.exchange_rows
    follow = map_exchange.follow_chains

    def count_bytes(rows, send, receive, group):
        of_one = rows.new_empty(rows.shape[1:]).nbytes
        received.append([count * of_one for count in receive])
        return exchange(rows, send, receive, group)

    def count_products(local, through, steps, *args):
        products.append(
            max(sum(place >= 0 for _, place in chain) for chain in steps.chains)
        )
        return follow(local, through, steps, *args)

    with (
        patch.object(map_exchange, "exchange_rows", count_bytes),
        patch.object(map_exchange, "follow_chains", count_products),
    ):
        local, through = maps.split([V, K], dim=-1)
        map_exchange.states_entering_nodes(local, through, paths, dist.group.WORLD)
    within = across = 0
    for of_collective in received:
        for giver, count in enumerate(of_collective):
            within += count * (giver // n == rank // n and giver != rank)
            across += count * (giver // n != rank // n)
    assert len(received) == 2
    from_others = bytes_priced * (size - n) / (size - 1)
    m = heads // size
    one_map = K * (K + V) * 4
    one_state = K * V * 4
    of_ranks = [r for r in range(size) if r != rank]
    maps_sent = sum(hosts[:-1].count(r) for r in of_ranks) * m * one_map
    states_sent = hosts[1:].count(rank) * len(of_ranks) * m * one_state
    assert within + across == maps_sent + states_sent
    assert within <= round(bytes_priced - from_others)
    assert across <= round(from_others)
    assert products == [steps - 1]  # nothing follows the last node


@pytest.mark.parametrize("ranks", [8, pytest.param(16, marks=pytest.mark.nightly)])
def test_ranks_of_two_machines_equal_one_rank(pools, ranks):
    two_key_heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    pools(ranks).run(
        parallel_equals_one_rank,
        GDN,
        1,
        ranks,
        lengths=(32, 0, 64),
        changes=two_key_heads,
        mode="chunkwise",
        cp_ranks_per_machine=ranks // 2,
    )


@on_ranks(4)
def test_the_hosts_say_how_many_ranks_a_machine_has():
    """They are exchanged once."""
    group = dist.group.WORLD
    agreement._agreements.pop(group, None)
    with patch.object(
        agreement, "_own_host", lambda: "one" if dist.get_rank() < 2 else "other"
    ):
        assert ranks_per_machine(group, None, CPU) == 2
    with patch.object(
        dist, "all_gather_into_tensor", side_effect=AssertionError("asked again")
    ):
        assert ranks_per_machine(group, None, CPU) == 2
    agreement._agreements.pop(group)
    assert ranks_per_machine(group, None, CPU) == 4  # this host's real name


@pytest.mark.slow
@on_ranks(cp=16)
def test_auto_follows_the_option():
    """4096 tokens on each of 16 ranks: 0.43 ms to 0.80 on one machine, 1.35 to 0.64 on
    two."""
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    sizes = {**heads, "linear_key_head_dim": 128, "linear_value_head_dim": 128}
    taken = {
        None: {4096: "headwise"},
        16: {4096: "headwise"},
        8: {1024: "headwise", 4096: "chunkwise"},
    }
    for told, schemes in taken.items():
        layer = over_ranks(sizes, linear_cp_mode="auto", cp_ranks_per_machine=told)
        for tokens, scheme in schemes.items():
            shape = (tokens, 1, layer.dims.layout.width)
            rows = torch.empty(shape, dtype=torch.bfloat16, device="meta")
            assert layer.micro_batches.of(None, rows).scheme.name == scheme, (
                tokens,
                told,
            )


@on_ranks(cp=2)
def test_what_is_no_number_of_ranks_is_refused():
    for told in (0, "eight"):
        with pytest.raises(ValueError, match="cp_ranks_per_machine"):
            over_ranks(cp_ranks_per_machine=told)


@on_ranks(4)
def test_ranks_that_are_told_different_numbers_refuse():
    """On every rank: one rank alone would wait."""
    for told in (3 if dist.get_rank() else None, 5 + dist.get_rank()):
        agreement._agreements.pop(dist.group.WORLD, None)
        with pytest.raises(
            ValueError, match="different cp_ranks_per_machine: .*by rank"
        ):
            ranks_per_machine(dist.group.WORLD, told, CPU)

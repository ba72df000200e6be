"""Run on every rank: context parallelism over machines, which the option or a patch simulates."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import machines
from megatron_gdn.context_parallel.chunkwise import map_exchange
from megatron_gdn.context_parallel.chunkwise.states import chain_nodes
from megatron_gdn.context_parallel.machines import ranks_per_machine
from megatron_gdn.context_parallel.price import map_exchanges
from megatron_gdn.ops.delta_rule.plain import PlainRule
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.distributed.layer_laws import build_layer, thd
from tests.distributed.mixer_laws import groups_of_megatron
from tests.parallel import make_config, parallel

CPU = torch.device("cpu")


def what_is_priced_is_sent(told: int, layout: str) -> None:
    """Collectives of one forward, bytes from this machine and from others, longest chain."""
    size, rank, heads, K, V = dist.get_world_size(), dist.get_rank(), 16, 4, 3
    n = ranks_per_machine(dist.group.WORLD, told, CPU)
    sequence_layout = SequenceLayout.parse(layout)
    nodes = chain_nodes(size, sequence_layout)
    maps = torch.randn(len(nodes.of(rank)), heads, K, V + K)
    priced = map_exchanges(StateShape(heads, K, V), size, sequence_layout, 1, None, n)["share"]
    received, products = [], []
    exchange, follow = map_exchange.exchange_rows, map_exchange.follow

    def count_bytes(rows, send, receive, group, async_op=False):
        received.append([rows_of_one * rows[0].nbytes for rows_of_one in receive])
        return exchange(rows, send, receive, group, async_op)

    def count_products(local, through, steps, *args):
        products.append(max(sum(place >= 0 for _, place in chain) for chain in steps.chains))
        return follow(local, through, steps, *args)

    with (
        patch.object(map_exchange, "exchange_rows", count_bytes),
        patch.object(map_exchange, "follow", count_products),
    ):
        map_exchange.share_and_fold(maps, V, nodes, dist.group.WORLD)
    within = across = 0
    for of_collective in received:
        for giver, count in enumerate(of_collective):
            within += count * (giver // n == rank // n and giver != rank)
            across += count * (giver // n != rank // n)
    assert len(received) == priced.collectives
    assert [within, across] == [round(x) for x in priced.received]
    assert products == [priced.steps - 1]  # nothing follows the last node


def hosts_are_exchanged_once() -> list[int]:
    """Ranks per machine with hosts of two names, then as this host's real name says."""
    group = dist.group.WORLD
    machines._agreed.pop(group, None)
    with patch.object(machines, "_own_host", lambda: "one" if dist.get_rank() < 2 else "other"):
        found = [ranks_per_machine(group, None, CPU)]
    with patch.object(dist, "all_gather_into_tensor", side_effect=AssertionError("asked again")):
        found.append(ranks_per_machine(group, None, CPU))
    machines._agreed.pop(group)
    return [*found, ranks_per_machine(group, None, CPU)]


def different_numbers_are_refused() -> None:
    """On every rank: one rank alone would wait."""
    for told in (3 if dist.get_rank() else None, 5 + dist.get_rank()):
        machines._agreed.pop(dist.group.WORLD, None)
        with pytest.raises(ValueError, match="different cp_ranks_per_machine: .*by rank"):
            ranks_per_machine(dist.group.WORLD, told, CPU)


def auto_over_machines(local: int, told: int | None) -> str:
    """What a layer of 16 and 32 heads of 128 takes in bf16 with so many tokens on every rank."""
    cp = dist.get_world_size()
    heads = {"linear_num_key_heads": 16, "linear_num_value_heads": 32}
    dims = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
    with parallel(cp=cp):
        config = make_config(context_parallel_size=cp, **heads, **dims)
        options = {"linear_cp_mode": "auto", "cp_ranks_per_machine": told}
        layer = build_layer(config, groups_of_megatron(), options)
        shape = (local, 1, layer.dims.layout.width)
        rows = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        return layer.micro_batches.of(None, rows).scheme.name


def exchanges_taken(batch_invariant: bool) -> list[str]:
    """What the plain rule takes for one row, for three rows, and for few and many documents."""
    cp, taken = dist.get_world_size(), []
    with parallel(cp=cp), patch.object(PlainRule, "batch_invariant", batch_invariant):
        options = {"linear_cp_mode": "chunkwise"}
        layer = build_layer(make_config(context_parallel_size=cp), groups_of_megatron(), options)
        for rows, lengths in ((1, None), (3, None), (1, (2 * cp,)), (1, (2 * cp,) * 8)):
            tokens = 2 * cp if lengths is None else sum(lengths)
            x = torch.empty(tokens // cp, rows, layer.dims.layout.width)
            batch = layer.micro_batches.of(None if lengths is None else thd(lengths), x)
            taken.append(batch.passage.neighbours.states._exchange.__name__)
    return taken


def bad_options_are_refused() -> None:
    with parallel(cp=2):
        for told in (0, "eight"):
            with pytest.raises(ValueError, match="cp_ranks_per_machine"):
                options = {"cp_ranks_per_machine": told}
                build_layer(make_config(context_parallel_size=2), groups_of_megatron(), options)

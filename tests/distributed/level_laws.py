"""Run on every rank: chains of states that are followed within machines, then across them."""

from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron_gdn import SequenceLayout
from megatron_gdn.context_parallel import machines, price
from megatron_gdn.context_parallel.chunkwise import map_exchange, scheme
from megatron_gdn.context_parallel.chunkwise.map_exchange import Nodes, pack, share_and_fold
from megatron_gdn.context_parallel.chunkwise.scheme import exchange_of
from megatron_gdn.context_parallel.chunkwise.states import chain_nodes
from megatron_gdn.context_parallel.machines import ranks_per_machine
from megatron_gdn.context_parallel.price import map_exchanges
from megatron_gdn.mixers import micro_batch
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.distributed.layer_laws import build_layer, by_way_of, randomise_, thd
from tests.distributed.mixer_laws import Mixers, groups_of_megatron, parallel_equals_one_rank
from tests.parallel import make_config, parallel

M, K, V = 5, 4, 3  # not a multiple of the ranks: shares differ, and some are empty
CPU = torch.device("cpu")


def levels_equal_one_level(
    told: int, layout: str, backwards: bool, cuts: tuple[int, ...], dtype: torch.dtype
) -> None:
    """The states that enter every node, to the rounding of both orders; a repeat bit for bit.

    A path through d products of K terms, each plus one term, is off by d (K + 1) roundings at
    most, of the sum of the absolute values along all paths. Before the last cut stands NaN.
    """
    size, rank = dist.get_world_size(), dist.get_rank()
    n = ranks_per_machine(dist.group.WORLD, told, CPU)
    nodes = chain_nodes(size, SequenceLayout.parse(layout), frozenset(cuts))
    nodes = nodes.backwards() if backwards else nodes
    local, through = _maps(nodes, dtype)
    state, entering = torch.zeros(M, K, V, dtype=torch.float64), []
    most, majorants = state, []  # the same chain of absolute values
    for j in range(len(nodes.hosts)):
        entering.append(state)
        majorants.append(most)
        state = through[j].double() @ state + local[j].double()
        most = through[j].double().abs() @ most + local[j].double().abs()

    own = nodes.of(rank)
    h = len(own)
    maps = torch.empty(h, M, K, V + K, dtype=dtype)
    for j, slot in own:
        maps[slot] = pack(local[j], through[j])
    one = share_and_fold(maps, V, nodes, dist.group.WORLD)
    levels = share_and_fold(maps, V, nodes, dist.group.WORLD, per_machine=n)
    again = share_and_fold(maps, V, nodes, dist.group.WORLD, per_machine=n)
    assert levels.dtype == dtype and torch.equal(levels, again)

    unit = torch.finfo(dtype).eps / 2
    steps_of_one, steps_of_levels = h * size, 2 * n + h * (size // n)
    for j, slot in own:
        for got, expected, steps in (
            (levels[slot], entering[j], steps_of_levels),
            (levels[slot], one[slot], steps_of_one + steps_of_levels),
        ):
            error = (got.double() - expected.double()).abs()
            bound = steps * (K + 1) * unit * majorants[j]
            assert (error <= bound).all(), (j, (error / bound).max())
            if dtype == torch.float64:
                assert error.max() <= 1e-12 * max(float(majorants[j].max()), 1.0)

    if nodes.cuts:
        last = max(nodes.cuts)
        for j, slot in own:
            if j < last:
                maps[slot] = float("nan")
            if j == last:
                maps[slot, ..., V:] = 0
        ill = share_and_fold(maps, V, nodes, dist.group.WORLD, per_machine=n)
        for j, slot in own:
            assert j <= last or torch.equal(ill[slot], levels[slot]), (j, last)


def _maps(nodes: Nodes, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """The same on every rank, of which each uses its own."""
    make = torch.Generator().manual_seed(0)
    count = len(nodes.hosts)
    local = torch.randn(count, M, K, V, dtype=dtype, generator=make)
    through = torch.randn(count, M, K, K, dtype=dtype, generator=make) / K**0.5
    through[list(nodes.cuts)] = 0
    return local, through


def layer_equals_one_rank(mixers: Mixers, told: int, cp: int, **options) -> None:
    with patch.object(micro_batch, "Chunkwise", by_way_of("levels")):
        parallel_equals_one_rank(
            mixers, 1, cp, mode="chunkwise", cp_ranks_per_machine=told, **options
        )


@contextmanager
def collectives():
    """All messages of maps and states, as ``(rows that every rank sends here, bytes of a row)``."""
    made, exchange = [], map_exchange.exchange_rows

    def count(rows, send, receive, group, async_op=False):
        made.append((receive, rows[:1].nbytes if len(rows) else 0))
        return exchange(rows, send, receive, group, async_op)

    with patch.object(map_exchange, "exchange_rows", count):
        yield made


def bytes_across_machines(told: int, layout: str) -> None:
    """Collectives of one forward and what each brings from other machines, as they are priced."""
    size, rank, heads = dist.get_world_size(), dist.get_rank(), 16
    n = ranks_per_machine(dist.group.WORLD, told, CPU)
    sequence_layout = SequenceLayout.parse(layout)
    nodes = chain_nodes(size, sequence_layout)
    h = len(nodes.of(rank))
    maps = torch.randn(h, heads, K, V + K)
    ways = map_exchanges(StateShape(heads, K, V), size, sequence_layout, 1, None, n)
    for name, per_machine in (("share", None), ("levels", n)):
        with collectives() as made:
            share_and_fold(maps, V, nodes, dist.group.WORLD, per_machine)
        assert len(made) == ways[name].collectives
        within = across = 0
        for receive, row in made:
            for giver, rows in enumerate(receive):
                if giver == rank:
                    continue
                if giver // n == rank // n:
                    within += rows * row
                else:
                    across += rows * row
        priced = [sum(part) for part in zip(*ways[name].received, strict=True)]
        assert [within, across] == [round(x) for x in priced], (name, within, across, priced)


def longest_chain(told: int, layout: str) -> list[int]:
    """Products that wait for each other: in one level, and in levels."""
    size, rank = dist.get_world_size(), dist.get_rank()
    n = ranks_per_machine(dist.group.WORLD, told, CPU)
    nodes = chain_nodes(size, SequenceLayout.parse(layout))
    maps, found = torch.randn(len(nodes.of(rank)), size, K, V + K), []
    for per_machine in (None, n):
        launches, follow = [], map_exchange.follow

        def count(local, through, steps, *args, launches=launches, follow=follow):
            launches.append(max(sum(place >= 0 for _, place in chain) for chain in steps.chains))
            return follow(local, through, steps, *args)

        with patch.object(map_exchange, "follow", count):
            share_and_fold(maps, V, nodes, dist.group.WORLD, per_machine)
        found.append(sum(launches))
    return found


def runs_repeat(cp: int, told: int, lengths: tuple[int, ...] | None, layout: str) -> None:
    """Forward and backward of a layer twice, with equal bits."""
    chunkwise = by_way_of("levels")
    with parallel(cp=cp), patch.object(micro_batch, "Chunkwise", chunkwise):
        torch.manual_seed(7)
        config = make_config(context_parallel_size=cp, deterministic_mode=True)
        options = {
            "linear_cp_mode": "chunkwise", "cp_layout": layout, "cp_ranks_per_machine": told,
        }  # fmt: skip
        layer = build_layer(config, groups_of_megatron(), options)
        randomise_(layer)
        tokens = 2 * cp * 2 if lengths is None else sum(lengths)
        x = torch.randn(tokens // cp, 1, layer.hidden_size)

        def run():
            leaf = x.clone().requires_grad_()
            packed = None if lengths is None else thd(lengths)
            out, _ = layer(leaf, None, packed_seq_params=packed)
            return [out, *torch.autograd.grad(out.sin().sum(), [leaf, *layer.parameters()])]

        assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


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


def exchanges_of_a_rule_that_knows_no_neighbours(told: int | None) -> list[str]:
    """What the plain rule takes for one row, for three rows, and for few and many documents."""
    cp, taken = dist.get_world_size(), []

    def count(name, per_machine):
        taken.append(name)
        return exchange_of(name, per_machine)

    with (
        parallel(cp=cp),
        patch.object(price, "LATENCY", 0),
        patch.object(scheme, "exchange_of", count),
    ):
        options = {"linear_cp_mode": "chunkwise", "cp_ranks_per_machine": told}
        layer = build_layer(make_config(context_parallel_size=cp), groups_of_megatron(), options)
        for rows, lengths in ((1, None), (3, None), (1, (2 * cp,)), (1, (2 * cp,) * 8)):
            tokens = 2 * cp if lengths is None else sum(lengths)
            x = torch.empty(tokens // cp, rows, layer.dims.layout.width)
            layer.micro_batches.of(None if lengths is None else thd(lengths), x)
    return taken


def bad_options_are_refused() -> None:
    with parallel(cp=2):
        for told in (0, "eight"):
            with pytest.raises(ValueError, match="cp_ranks_per_machine"):
                options = {"cp_ranks_per_machine": told}
                build_layer(make_config(context_parallel_size=2), groups_of_megatron(), options)

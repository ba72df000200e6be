"""Chains of states in two levels: within the ranks of a machine, then across machines.

Machines are simulated by the option. fp32 on gloo, tolerance of layers as in ``mixers``.
"""

import pytest
import torch

from tests.distributed import level_laws as laws
from tests.distributed.mixers import GDN, MAMBA2

LAYOUTS = ["zigzag", "zigzag_buffer", "contiguous"]
# Ranks, and ranks per machine as told. 6 over machines of 4, and 12 over machines of 8, are cut
# into stretches of 2 and 4, so that none is on two machines.
SIZES = [
    (8, 2),
    (8, 4),
    (6, 4),
    pytest.param(12, 8, marks=pytest.mark.slow),
    (16, 2),
    (16, 4),
    (16, 8),
]
sizes = pytest.mark.parametrize(("size", "told"), SIZES)
layouts = pytest.mark.parametrize("layout", ["zigzag", "contiguous"])


@sizes
@layouts
def test_states_are_those_of_one_level(pools, size, told, layout):
    for backwards in (False, True):
        for dtype in (torch.float32, torch.float64):
            pools(size).run(laws.levels_equal_one_level, told, layout, backwards, (), dtype)


@sizes
def test_nothing_passes_a_cut(pools, size, told):
    last = size - 1
    for cuts in ((0,), (1,), (told,), (0, told - 1, told, last - 1), (2, last), tuple(range(size))):
        for backwards in (False, True):
            args = (told, "contiguous", backwards, cuts, torch.float32)
            pools(size).run(laws.levels_equal_one_level, *args)


@pytest.mark.parametrize(("size", "told"), [(8, 2), (8, 4), (16, 8)])
@layouts
def test_collectives_and_bytes_are_those_that_are_priced(pools, size, told, layout):
    pools(size).run(laws.bytes_across_machines, told, layout)


def test_a_chain_waits_for_fewer_products(pools):
    """Of all nodes but the last; in levels of a leg, of all legs but the last, of a leg but one."""
    assert pools(16).run(laws.longest_chain, 8, "zigzag") == [[31, 8 + 3 + 7]] * 16
    assert pools(16).run(laws.longest_chain, 4, "zigzag") == [[31, 4 + 7 + 3]] * 16
    assert pools(16).run(laws.longest_chain, 4, "contiguous") == [[15, 4 + 3 + 3]] * 16


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("cp", "told"), [(4, 2), (8, 4), pytest.param(6, 4, marks=pytest.mark.slow)]
)
def test_a_layer_equals_one_rank(pools, cp, told, layout):
    units = (2, 0, 3, 1) if layout == "zigzag" else (1, 0, 4, 1)
    lengths = tuple(2 * cp * n for n in units)
    if layout != "zigzag":  # ends inside fragments, on both sides of a machine's end
        lengths = (lengths[0] + 3, 0, lengths[2] - 5, lengths[3] + 2)
    pools(cp).run(laws.layer_equals_one_rank, GDN, told, cp, lengths=lengths, layout=layout)
    pools(cp).run(laws.layer_equals_one_rank, GDN, told, cp, tokens=4 * cp, batch=2, layout=layout)


def test_sixteen_ranks_equal_one_rank(pools):
    two_key_heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    pools(16).run(
        laws.layer_equals_one_rank, GDN, 8, 16, lengths=(32, 0, 64), changes=two_key_heads
    )


def test_a_rule_that_mixes_no_rows_equals_one_rank(pools):
    pools(4).run(laws.layer_equals_one_rank, MAMBA2, 2, 4, lengths=(8, 0, 24, 16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_runs_are_bitwise_equal(pools, layout):
    pools(8).run(laws.runs_repeat, 8, 4, None, layout)
    pools(8).run(laws.runs_repeat, 8, 4, (16, 0, 48, 32), layout)


def test_the_hosts_say_how_many_ranks_a_machine_has(pools):
    assert pools(4).run(laws.hosts_are_exchanged_once) == [[2, 2, 4]] * 4


def test_auto_follows_the_option(pools):
    """4096 tokens on each of 16 ranks: 0.43 ms to 0.80 on one machine, 1.35 to 0.62 on two."""
    for told, taken in ((None, "headwise"), (16, "headwise"), (8, "chunkwise")):
        assert pools(16).run(laws.auto_over_machines, 4096, told) == [taken] * 16
    assert pools(16).run(laws.auto_over_machines, 1024, 8) == ["headwise"] * 16


def test_a_rule_that_knows_no_neighbours_takes_one_exchange_for_all_documents(pools):
    """By the machines alone. Without latencies few steps are always cheaper."""
    law = laws.exchanges_of_a_rule_that_knows_no_neighbours
    assert pools(8).run(law, 4) == [["levels"] * 4] * 8
    assert pools(8).run(law, None) == [["share"] * 4] * 8


def test_what_is_no_number_of_ranks_is_refused(pools):
    pools(2).run(laws.bad_options_are_refused)


def test_ranks_that_are_told_different_numbers_refuse(pools):
    pools(4).run(laws.different_numbers_are_refused)

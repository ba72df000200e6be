"""Ranks over several machines, which the option simulates: what travels, and what it is priced at.

fp32 on gloo, tolerance of layers as in ``mixers``.
"""

import pytest

from tests.distributed import machine_laws as laws
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN


@pytest.mark.parametrize(("size", "told"), [(8, 2), (8, 4), (16, 8)])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_collectives_bytes_and_steps_are_those_that_are_priced(pools, size, told, layout):
    pools(size).run(laws.what_is_priced_is_sent, told, layout)


def test_sixteen_ranks_equal_one_rank(pools):
    two_key_heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
    pools(16).run(
        parallel_equals_one_rank, GDN, 1, 16, lengths=(32, 0, 64), changes=two_key_heads,
        mode="chunkwise", cp_ranks_per_machine=8,
    )  # fmt: skip


def test_the_hosts_say_how_many_ranks_a_machine_has(pools):
    assert pools(4).run(laws.hosts_are_exchanged_once) == [[2, 2, 4]] * 4


def test_auto_follows_the_option(pools):
    """4096 tokens on each of 16 ranks: 0.43 ms to 0.80 on one machine, 1.35 to 0.64 on two."""
    for told, taken in ((None, "headwise"), (16, "headwise"), (8, "chunkwise")):
        assert pools(16).run(laws.auto_over_machines, 4096, told) == [taken] * 16
    assert pools(16).run(laws.auto_over_machines, 1024, 8) == ["headwise"] * 16


def test_a_rule_that_knows_no_neighbours_takes_one_exchange_for_all_documents(pools):
    """And another rule the cheaper: maps this small cost least in one collective."""
    law = laws.exchanges_taken
    assert pools(8).run(law, True) == [["share_and_fold"] * 4] * 8
    assert pools(8).run(law, False) == [["gather_and_fold"] * 4] * 8


def test_what_is_no_number_of_ranks_is_refused(pools):
    pools(2).run(laws.bad_options_are_refused)


def test_ranks_that_are_told_different_numbers_refuse(pools):
    pools(4).run(laws.different_numbers_are_refused)

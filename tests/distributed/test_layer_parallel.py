"""Parallelism law: any legal combination equals one rank, output and every parameter's gradient.

fp32 on gloo, largest difference over largest entry at most 1e-5: about 80 units of rounding, for
sums over at most a few hundred terms taken in another order.
"""

import pytest

from tests.distributed.layer_laws import parallel_equals_one_rank

UNEQUAL = (8, 24, 16, 8)  # multiples of 2 * cp for cp = 2 and 4
PADDED = ((8, 24, 16, 8), (5, 21, 16, 1))  # slots, and the real lengths in them

TWO_RANKS = [(2, 1, False), (2, 1, True), (1, 2, False)]
FOUR_RANKS = [(2, 2, False), (2, 2, True), (4, 1, True), (1, 4, False)]
COMBINATIONS = TWO_RANKS + FOUR_RANKS
ids = [f"tp{tp}-cp{cp}{'-sp' if sp else ''}" for tp, cp, sp in COMBINATIONS]
combinations = pytest.mark.parametrize(("tp", "cp", "sp"), COMBINATIONS, ids=ids)
with_cp = pytest.mark.parametrize(("tp", "cp", "sp"), [(1, 2, False), (2, 2, True), (1, 4, False)])


@combinations
def test_a_batch_of_sequences_equals_one_rank(pools, tp, cp, sp):
    pools(tp * cp).run(parallel_equals_one_rank, tp, cp, sp, batch=2)


@combinations
def test_packed_unequal_documents_equal_one_rank(pools, tp, cp, sp):
    pools(tp * cp).run(parallel_equals_one_rank, tp, cp, sp, lengths=UNEQUAL)


@with_cp
def test_padded_documents_equal_one_rank(pools, tp, cp, sp):
    slots, real = PADDED
    pools(tp * cp).run(parallel_equals_one_rank, tp, cp, sp, lengths=slots, real_lengths=real)


@with_cp
@pytest.mark.parametrize("layout", ["zigzag_buffer", "contiguous"])
def test_documents_of_any_length_in_whole_buffer_layouts_equal_one_rank(pools, tp, cp, sp, layout):
    pools(tp * cp).run(
        parallel_equals_one_rank, tp, cp, sp, lengths=(3, 0, 29, 7, 1), layout=layout
    )


@with_cp
def test_a_contiguous_batch_equals_one_rank(pools, tp, cp, sp):
    pools(tp * cp).run(parallel_equals_one_rank, tp, cp, sp, tokens=12, layout="contiguous")


@with_cp
@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
def test_biases_and_the_deterministic_mode_equal_one_rank(pools, tp, cp, sp, packed):
    pools(tp * cp).run(
        parallel_equals_one_rank,
        tp,
        cp,
        sp,
        lengths=packed,
        bias=True,
        conv_bias=True,
        sizes={"deterministic_mode": True, "layernorm_zero_centered_gamma": True},
    )


def test_recomputing_the_output_norm_equals_one_rank(pools):
    pools(4).run(parallel_equals_one_rank, 2, 2, True, lengths=UNEQUAL, sizes={"recompute": True})


def test_the_context_parallel_group_of_the_micro_batch_is_honoured(pools):
    pools(4).run(parallel_equals_one_rank, 2, 2, lengths=UNEQUAL, own_cp_group=True)


def test_three_value_heads_per_key_head_equal_one_rank(pools):
    pools(4).run(
        parallel_equals_one_rank,
        2,
        2,
        lengths=UNEQUAL,
        sizes={"linear_num_key_heads": 4, "linear_num_value_heads": 12},
    )


FEW_KEY_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}


@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
@pytest.mark.parametrize(("tp", "cp", "sp"), [(1, 4, False), (2, 2, True)])
def test_more_ranks_than_key_heads_equal_one_rank(pools, tp, cp, sp, packed):
    pools(tp * cp).run(
        parallel_equals_one_rank, tp, cp, sp, lengths=packed, conv_bias=True, sizes=FEW_KEY_HEADS
    )


def test_as_many_ranks_as_value_heads_equal_one_rank(pools):
    pools(4).run(
        parallel_equals_one_rank, 1, 4, lengths=UNEQUAL,
        sizes={"linear_num_key_heads": 1, "linear_num_value_heads": 4},
    )  # fmt: skip


@pytest.mark.parametrize("packed", [None, (16, 0, 48, 32)], ids=["batch", "packed"])
def test_eight_ranks_with_two_key_heads_equal_one_rank(pools, packed):
    pools(8).run(parallel_equals_one_rank, 1, 8, lengths=packed, sizes=FEW_KEY_HEADS)

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
slow = pytest.mark.slow
with_cp = pytest.mark.parametrize(
    ("tp", "cp", "sp"), [(1, 2, False), (2, 2, True), pytest.param(1, 4, False, marks=slow)]
)

modes = pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
BY_MODE = [(*c, m) for c in COMBINATIONS for m in ("headwise", "chunkwise")[: 1 + (c[1] > 1)]]
IDS_BY_MODE = [f"{ids[COMBINATIONS.index(c[:3])]}{f'-{c[3]}' if c[1] > 1 else ''}" for c in BY_MODE]


def in_every_mode(quick=COMBINATIONS):
    """Every combination in every mode; those that are not ``quick`` are left out of `make test`."""
    params = [pytest.param(*c, marks=[] if c[:3] in quick else slow) for c in BY_MODE]
    return pytest.mark.parametrize(("tp", "cp", "sp", "mode"), params, ids=IDS_BY_MODE)


@in_every_mode(quick=[*TWO_RANKS, (2, 2, True)])
def test_a_batch_of_sequences_equals_one_rank(pools, tp, cp, sp, mode):
    pools(tp * cp).run(parallel_equals_one_rank, tp, cp, sp, batch=2, linear_cp_mode=mode)


@in_every_mode()
def test_packed_unequal_documents_equal_one_rank(pools, tp, cp, sp, mode):
    pools(tp * cp).run(parallel_equals_one_rank, tp, cp, sp, lengths=UNEQUAL, linear_cp_mode=mode)


@modes
@with_cp
def test_padded_documents_equal_one_rank(pools, tp, cp, sp, mode):
    slots, real = PADDED
    pools(tp * cp).run(
        parallel_equals_one_rank,
        tp,
        cp,
        sp,
        lengths=slots,
        real_lengths=real,
        linear_cp_mode=mode,
    )


@modes
@with_cp
@pytest.mark.parametrize("layout", ["zigzag_buffer", "contiguous"])
def test_documents_of_any_length_in_whole_buffer_layouts_equal_one_rank(
    pools, tp, cp, sp, layout, mode
):
    pools(tp * cp).run(
        parallel_equals_one_rank,
        tp,
        cp,
        sp,
        lengths=(3, 0, 29, 7, 1),
        layout=layout,
        linear_cp_mode=mode,
    )


@modes
@with_cp
def test_a_contiguous_batch_equals_one_rank(pools, tp, cp, sp, mode):
    pools(tp * cp).run(
        parallel_equals_one_rank, tp, cp, sp, tokens=12, layout="contiguous", linear_cp_mode=mode
    )


@modes
@with_cp
@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
def test_biases_and_the_deterministic_mode_equal_one_rank(pools, tp, cp, sp, packed, mode):
    pools(tp * cp).run(
        parallel_equals_one_rank,
        tp,
        cp,
        sp,
        lengths=packed,
        linear_cp_mode=mode,
        bias=True,
        conv_bias=True,
        sizes={"deterministic_mode": True, "layernorm_zero_centered_gamma": True},
    )


@modes
@pytest.mark.parametrize("qkv", [False, True], ids=["norm", "norm and qkv"])
def test_recomputing_equals_one_rank(pools, mode, qkv):
    pools(4).run(
        parallel_equals_one_rank,
        2,
        2,
        True,
        lengths=UNEQUAL,
        sizes={"recompute": True},
        recompute_qkv=qkv,
        linear_cp_mode=mode,
    )


@modes
def test_the_context_parallel_group_of_the_micro_batch_is_honoured(pools, mode):
    pools(4).run(
        parallel_equals_one_rank, 2, 2, lengths=UNEQUAL, own_cp_group=True, linear_cp_mode=mode
    )


@modes
def test_three_value_heads_per_key_head_equal_one_rank(pools, mode):
    pools(4).run(
        parallel_equals_one_rank,
        2,
        2,
        lengths=UNEQUAL,
        linear_cp_mode=mode,
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

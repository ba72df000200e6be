"""Gated DeltaNet in parallel equals one rank: what is its own beside the laws of every mixer."""

import pytest

from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN
from tests.upstream import with_gdn_norm_out

UNEQUAL = (8, 24, 16, 8)  # multiples of 2 * cp for cp = 2 and 4
ANY = (3, 0, 29, 7, 1)
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


def equal(pools, tp, cp, *args, **options):
    pools(tp * cp).run(parallel_equals_one_rank, GDN, tp, cp, *args, **options)


def in_every_mode(quick=COMBINATIONS):
    """Every combination in every mode; those that are not ``quick`` are left out of `make test`."""
    params = [pytest.param(*c, marks=[] if c[:3] in quick else slow) for c in BY_MODE]
    return pytest.mark.parametrize(("tp", "cp", "sp", "mode"), params, ids=IDS_BY_MODE)


@in_every_mode(quick=[*TWO_RANKS, (2, 2, True)])
def test_a_batch_of_sequences_equals_one_rank(pools, tp, cp, sp, mode):
    equal(pools, tp, cp, sp, mode=mode)


@in_every_mode()
def test_packed_unequal_documents_equal_one_rank(pools, tp, cp, sp, mode):
    equal(pools, tp, cp, sp, lengths=UNEQUAL, mode=mode)


@modes
@with_cp
def test_padded_documents_equal_one_rank(pools, tp, cp, sp, mode):
    slots, real = PADDED
    equal(pools, tp, cp, sp, lengths=slots, real_lengths=real, mode=mode)


@modes
@pytest.mark.parametrize(("tp", "cp", "sp"), [(2, 2, True), pytest.param(1, 4, False, marks=slow)])
@pytest.mark.parametrize(
    ("layout", "lengths"),
    [("zigzag_buffer", ANY), ("contiguous", ANY), ("contiguous", None)],
    ids=["zigzag_buffer", "contiguous", "contiguous batch"],
)
def test_whole_buffer_layouts_equal_one_rank(pools, tp, cp, sp, layout, lengths, mode):
    equal(pools, tp, cp, sp, tokens=12, lengths=lengths, layout=layout, mode=mode)


@modes
@with_cp
@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
def test_biases_and_the_deterministic_mode_equal_one_rank(pools, tp, cp, sp, packed, mode):
    changes = {"deterministic_mode": True, "layernorm_zero_centered_gamma": True}
    biases = {"bias": True, "conv_bias": True}
    equal(pools, tp, cp, sp, lengths=packed, mode=mode, changes=changes, **biases)


@with_gdn_norm_out
@modes
@pytest.mark.parametrize("qkv", [False, True], ids=["norm", "norm and qkv"])
def test_recomputing_equals_one_rank(pools, mode, qkv):
    changes = {
        "recompute_granularity": "selective",
        "recompute_modules": ["gdn_norm_out"],
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 1,
    }
    equal(pools, 2, 2, True, lengths=UNEQUAL, mode=mode, changes=changes, recompute_qkv=qkv)


@modes
def test_the_context_parallel_group_of_the_micro_batch_is_honoured(pools, mode):
    equal(pools, 2, 2, lengths=UNEQUAL, own_cp_group=True, mode=mode)


@modes
def test_three_value_heads_per_key_head_equal_one_rank(pools, mode):
    changes = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
    equal(pools, 2, 2, lengths=UNEQUAL, mode=mode, changes=changes)


FEW_KEY_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}


@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
@pytest.mark.parametrize(("tp", "cp", "sp"), [(1, 4, False), (2, 2, True)])
def test_more_ranks_than_key_heads_equal_one_rank(pools, tp, cp, sp, packed):
    equal(pools, tp, cp, sp, lengths=packed, changes=FEW_KEY_HEADS, conv_bias=True)


def test_as_many_ranks_as_value_heads_equal_one_rank(pools):
    changes = {"linear_num_key_heads": 1, "linear_num_value_heads": 4}
    equal(pools, 1, 4, lengths=UNEQUAL, changes=changes)


@pytest.mark.parametrize("packed", [None, (16, 0, 48, 32)], ids=["batch", "packed"])
def test_eight_ranks_with_two_key_heads_equal_one_rank(pools, packed):
    equal(pools, 1, 8, lengths=packed, changes=FEW_KEY_HEADS)

"""Gated DeltaNet in parallel equals one rank: what is its own beside the laws of every mixer."""

import pytest

from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN
from tests.upstream import with_gdn_norm_out

UNEQUAL = (8, 24, 16, 8)  # multiples of 2 * cp for cp = 2 and 4
PADDED = {"lengths": UNEQUAL, "real_lengths": (5, 21, 16, 1)}
DETERMINISTIC = {
    "changes": {"deterministic_mode": True, "layernorm_zero_centered_gamma": True},
    "bias": True,
    "conv_bias": True,
}
THREE_TO_ONE = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
FEW_KEY_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
ONE_KEY_HEAD = {"linear_num_key_heads": 1, "linear_num_value_heads": 4}
FEW = {"changes": FEW_KEY_HEADS, "conv_bias": True}
# Ranks of tensor and context parallelism, whether they share the sequence, and how the layer runs.
IN_BOTH_SCHEMES = {
    "padded documents": (1, 2, False, PADDED),
    "padded documents, tp": (2, 2, True, PADDED),
    "biases and the deterministic mode": (2, 2, True, DETERMINISTIC),
    "packed, biases and the deterministic mode": (2, 2, True, DETERMINISTIC | {"lengths": UNEQUAL}),
    "a short contiguous batch": (2, 2, True, {"tokens": 12, "layout": "contiguous"}),
    "the group of the micro-batch": (2, 2, False, {"lengths": UNEQUAL, "own_cp_group": True}),
    "three value heads per key head": (2, 2, False, {"lengths": UNEQUAL, "changes": THREE_TO_ONE}),
}
IN_ONE_SCHEME = {
    "four tensor-parallel ranks": (4, 1, True, {"lengths": UNEQUAL}),
    "more ranks than key heads": (1, 4, False, FEW),
    "more ranks than key heads, packed": (1, 4, False, FEW | {"lengths": UNEQUAL}),
    "more ranks than key heads, tp": (2, 2, True, FEW),
    "as many ranks as value heads": (1, 4, False, {"lengths": UNEQUAL, "changes": ONE_KEY_HEAD}),
    "eight ranks": (1, 8, False, {"changes": FEW_KEY_HEADS}),
    "eight ranks, packed": (1, 8, False, {"lengths": (16, 0, 48, 32), "changes": FEW_KEY_HEADS}),
}
modes = pytest.mark.parametrize("mode", ["headwise", "chunkwise"])


def equal(pools, tp, cp, sequence_parallel, options, **more):
    pools(tp * cp).run(parallel_equals_one_rank, GDN, tp, cp, sequence_parallel, **options, **more)


@modes
@pytest.mark.parametrize("case", IN_BOTH_SCHEMES)
def test_the_layer_equals_one_rank_in_both_schemes(pools, case, mode):
    equal(pools, *IN_BOTH_SCHEMES[case], mode=mode)


@pytest.mark.parametrize("case", IN_ONE_SCHEME)
def test_the_layer_equals_one_rank(pools, case):
    equal(pools, *IN_ONE_SCHEME[case])


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
    options = {"lengths": UNEQUAL, "changes": changes, "recompute_qkv": qkv}
    equal(pools, 2, 2, True, options, mode=mode)

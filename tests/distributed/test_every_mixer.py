"""Every mixer equals itself on one rank in every parallel layout, and its checkpoint
moves."""

from dataclasses import replace
from functools import partial

import pytest

from tests.distributed.mixer_laws import (
    checkpoint_law,
    parallel_equals_one_rank,
    starts_as_one_rank,
)
from tests.distributed.mixers import (
    FULL_GATES,
    GDN,
    GDN2,
    GDP,
    KDA,
    KDA_FULL,
    MAMBA2,
    OLMO_HYBRID,
    TOY,
)

UNEQUAL = (16, 0, 8, 24)
ANY = (3, 0, 25, 3, 1)
modes = pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
each = pytest.mark.parametrize(
    "mixers",
    [GDN, OLMO_HYBRID, GDN2, GDP, MAMBA2, KDA, KDA_FULL, TOY],
    ids=["gdn", "olmo_hybrid", "gdn2", "gdp", "mamba2", "kda", "kda_full", "toy"],
)


@pytest.mark.each_pair
@each
@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
@modes
@pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
def test_every_scheme_and_layout_equals_one_rank(pools, layout, mode, packed, mixers):
    lengths = ANY if packed and layout != "zigzag" else packed
    pools(2).run(
        parallel_equals_one_rank,
        mixers,
        1,
        2,
        lengths=lengths,
        layout=layout,
        mode=mode,
    )


@pytest.mark.each_pair
@pytest.mark.parametrize(
    "mixers", [GDN, GDP, MAMBA2, KDA], ids=["gdn", "gdp", "mamba2", "kda"]
)
@pytest.mark.parametrize("cp", [2, 4])
@modes
@pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
def test_fixed_buffers_equal_one_rank(pools, layout, mode, cp, mixers):
    """They are full: where the whole buffer is cut, two ranks hold one piece more than
    there are documents."""
    lengths = UNEQUAL if layout == "zigzag" else (3, 25, 3, 1)
    pools(cp).run(
        parallel_equals_one_rank,
        mixers,
        1,
        cp,
        lengths=lengths,
        layout=layout,
        mode=mode,
        fixed_buffers=True,
    )


@pytest.mark.each_value
@pytest.mark.parametrize(
    "mixers",
    [GDN, GDN2, GDP, MAMBA2, KDA, KDA_FULL],
    ids=["gdn", "gdn2", "gdp", "mamba2", "kda", "kda_full"],
)
@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
@modes
def test_batch_invariant_mode_equals_one_rank(pools, mode, packed, mixers):
    aligned = replace(mixers, config=partial(mixers.config, batch_invariant_mode=True))
    pools(2).run(parallel_equals_one_rank, aligned, 1, 2, lengths=packed, mode=mode)


@pytest.mark.each_value
@each
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_tensor_and_sequence_parallel_equal_one_rank(pools, sequence_parallel, mixers):
    pools(2).run(parallel_equals_one_rank, mixers, 2, 1, sequence_parallel)


@pytest.mark.slow
@pytest.mark.each_pair
@pytest.mark.parametrize(
    "mixers",
    [GDN, GDN2, GDP, MAMBA2, KDA, KDA_FULL, TOY],
    ids=["gdn", "gdn2", "gdp", "mamba2", "kda", "kda_full", "toy"],
)
@modes
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (1, 4)])
def test_four_ranks_equal_one_rank(pools, tp, cp, mode, mixers):
    """More than groups of Mamba2, whose norm runs after the exchange then, and of the
    toy."""
    options = {"D_has_hdim": True} if mixers is MAMBA2 and tp == 1 else {}
    given = {"lengths": UNEQUAL, "mode": mode, **options}
    pools(4).run(parallel_equals_one_rank, mixers, tp, cp, tp > 1, **given)


@each
def test_the_same_model_starts_at_every_tensor_parallel_size(pools, mixers):
    pools(2).run(starts_as_one_rank, mixers)


@each
def test_a_checkpoint_moves_between_tensor_parallel_sizes(pools, mixers):
    pools(2).run(checkpoint_law, mixers)


MIXED = {"forget_rank": 4, "output_rank": 0, "gate_lower_bound": -5.0}


@modes
def test_fast_gates_cross_ranks(pools, mode):
    pools(2).run(
        parallel_equals_one_rank,
        KDA,
        1,
        2,
        tokens=272,
        batch=1,
        mode=mode,
        gate_lower_bound=-5.0,
        A_init_range=(4, 4),
    )


@pytest.mark.parametrize("options", [FULL_GATES, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_gates_of_every_rank_are_shared_by_tensor_parallel_ranks(
    pools, sequence_parallel, options
):
    pools(2).run(parallel_equals_one_rank, KDA, 2, 1, sequence_parallel, **options)


@pytest.mark.each_value
@pytest.mark.parametrize(
    "mixers", [GDP, KDA, KDA_FULL], ids=["gdp", "low rank", "full gates"]
)
@pytest.mark.parametrize("recompute", ["light", "full"])
@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
@modes
def test_what_is_computed_again_is_the_same(pools, mode, packed, recompute, mixers):
    given = {"lengths": packed, "mode": mode, "recompute": recompute}
    pools(2).run(parallel_equals_one_rank, mixers, 1, 2, **given)


# Of Gated DeltaNet alone:
SLOTS = (8, 24, 16, 8)  # multiples of 2 * cp for cp = 2 and 4
PADDED = {"lengths": SLOTS, "real_lengths": (5, 21, 16, 1)}
DETERMINISTIC = {
    "changes": {"deterministic_mode": True, "layernorm_zero_centered_gamma": True},
    "bias": True,
    "conv_bias": True,
}
THREE_TO_ONE = {"linear_num_key_heads": 4, "linear_num_value_heads": 12}
FEW_KEY_HEADS = {"linear_num_key_heads": 2, "linear_num_value_heads": 8}
ONE_KEY_HEAD = {"linear_num_key_heads": 1, "linear_num_value_heads": 4}
FEW = {"changes": FEW_KEY_HEADS, "conv_bias": True}
# Ranks of tensor and context parallelism, whether they share the sequence, and how the
# layer runs.
IN_BOTH_SCHEMES = {
    "padded documents": (1, 2, False, PADDED),
    "padded documents, tp": (2, 2, True, PADDED),
    "biases and the deterministic mode": (2, 2, True, DETERMINISTIC),
    "packed, biases and the deterministic mode": (
        2,
        2,
        True,
        DETERMINISTIC | {"lengths": SLOTS},
    ),
    "a short contiguous batch": (2, 2, True, {"tokens": 12, "layout": "contiguous"}),
    "the group of the micro-batch": (
        2,
        2,
        False,
        {"lengths": SLOTS, "own_cp_group": True},
    ),
    "three value heads per key head": (
        2,
        2,
        False,
        {"lengths": SLOTS, "changes": THREE_TO_ONE},
    ),
}
IN_ONE_SCHEME = {
    "four tensor-parallel ranks": (4, 1, True, {"lengths": SLOTS}),
    "more ranks than key heads, tp": (2, 2, True, FEW),
    "as many ranks as value heads": (
        1,
        4,
        False,
        {"lengths": SLOTS, "changes": ONE_KEY_HEAD},
    ),
    "eight ranks, packed": (
        1,
        8,
        False,
        {"lengths": (16, 0, 48, 32), "changes": FEW_KEY_HEADS},
    ),
}


def gdn_equals_one_rank(pools, tp, cp, sequence_parallel, options, **more):
    pools(tp * cp).run(
        parallel_equals_one_rank, GDN, tp, cp, sequence_parallel, **options, **more
    )


@pytest.mark.each_value
@modes
@pytest.mark.parametrize("case", IN_BOTH_SCHEMES)
def test_gdn_equals_one_rank_in_both_schemes(pools, case, mode):
    gdn_equals_one_rank(pools, *IN_BOTH_SCHEMES[case], mode=mode)


@pytest.mark.parametrize("case", IN_ONE_SCHEME)
def test_gdn_equals_one_rank(pools, case):
    gdn_equals_one_rank(pools, *IN_ONE_SCHEME[case])

"""Kimi Delta Attention over more ranks, with gates of every kind.

fp64, largest difference over largest entry at most 1e-11 (``mixers``).
"""

from dataclasses import replace
from functools import partial

import pytest

from tests.distributed.mixer_laws import checkpoint_law, parallel_equals_one_rank
from tests.distributed.mixers import KDA

FULL = {"forget_rank": 0, "output_rank": 0}
MIXED = {"forget_rank": 4, "output_rank": 0, "gate_lower_bound": -5.0}


@pytest.mark.parametrize("lengths", [None, (32, 0, 8, 56)], ids=["batch", "packed"])
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_four_context_parallel_ranks_equal_one(pools, mode, lengths):
    pools(4).run(parallel_equals_one_rank, KDA, 1, 4, tokens=96, lengths=lengths, mode=mode)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_fast_gates_cross_ranks(pools, mode):
    pools(2).run(
        parallel_equals_one_rank, KDA, 1, 2, tokens=272, batch=1, mode=mode, gate_lower_bound=-5.0,
        A_init_range=(4, 4),
    )  # fmt: skip


@pytest.mark.parametrize("options", [FULL, MIXED], ids=["full", "mixed"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_gates_of_every_rank_are_shared_by_tensor_parallel_ranks(pools, sequence_parallel, options):
    pools(2).run(parallel_equals_one_rank, KDA, 2, 1, sequence_parallel, **options)


@pytest.mark.parametrize("recompute", ["light", "full"])
def test_what_is_computed_again_is_the_same(pools, recompute):
    pools(2).run(parallel_equals_one_rank, KDA, 1, 2, mode="chunkwise", recompute=recompute)


def test_a_checkpoint_of_full_gates_moves_between_sizes(pools):
    pools(2).run(checkpoint_law, replace(KDA, build=partial(KDA.build, **FULL)))

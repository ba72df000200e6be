"""Every mixer equals itself on one rank in every parallel layout, and its checkpoint moves.

Tolerances are with the mixers, largest difference over largest entry.
"""

from dataclasses import replace
from functools import partial

import pytest

from tests.distributed.mixer_laws import checkpoint_law, parallel_equals_one_rank
from tests.distributed.mixers import GDN, KDA, MAMBA2, OLMO_HYBRID, TOY

UNEQUAL = (16, 0, 8, 24)
ANY = (3, 0, 25, 3, 1)
each = pytest.mark.parametrize(
    "mixers",
    [GDN, OLMO_HYBRID, MAMBA2, KDA, TOY],
    ids=["gdn", "olmo_hybrid", "mamba2", "kda", "toy"],
)


@each
@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("layout", ["zigzag", "zigzag_buffer", "contiguous"])
def test_every_scheme_and_layout_equals_one_rank(pools, layout, mode, packed, mixers):
    lengths = ANY if packed and layout != "zigzag" else packed
    pools(2).run(parallel_equals_one_rank, mixers, 1, 2, lengths=lengths, layout=layout, mode=mode)


@pytest.mark.parametrize("mixers", [GDN, MAMBA2], ids=["gdn", "mamba2"])
@pytest.mark.parametrize("packed", [None, UNEQUAL], ids=["batch", "packed"])
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
def test_batch_invariant_mode_equals_one_rank(pools, mode, packed, mixers):
    aligned = replace(mixers, config=partial(mixers.config, batch_invariant_mode=True))
    pools(2).run(parallel_equals_one_rank, aligned, 1, 2, lengths=packed, mode=mode)


@each
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_tensor_and_sequence_parallel_equal_one_rank(pools, sequence_parallel, mixers):
    pools(2).run(parallel_equals_one_rank, mixers, 2, 1, sequence_parallel)


@pytest.mark.parametrize("mixers", [MAMBA2, KDA, TOY], ids=["mamba2", "kda", "toy"])
@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize(("tp", "cp"), [(2, 2), (1, 4)])
def test_four_ranks_equal_one_rank(pools, tp, cp, mode, mixers):
    """More than groups of Mamba2, whose norm runs after the exchange then, and of the toy."""
    options = {"D_has_hdim": True} if mixers is MAMBA2 and tp == 1 else {}
    given = {"lengths": UNEQUAL, "mode": mode, **options}
    pools(4).run(parallel_equals_one_rank, mixers, tp, cp, tp > 1, **given)


@each
def test_a_checkpoint_moves_between_tensor_parallel_sizes(pools, mixers):
    pools(2).run(checkpoint_law, mixers)

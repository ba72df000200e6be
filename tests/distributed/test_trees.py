"""Documents that share prefixes, in parallel, equal the sequences packed separately on one rank."""

import pytest

from tests.distributed import tree_laws
from tests.distributed.mixer_laws import parallel_equals_one_rank
from tests.distributed.mixers import GDN, KDA, MAMBA2
from tests.parallel import assert_close
from tests.ranks import RankError
from tests.trees import random_tree

each = pytest.mark.parametrize("mixers", [GDN, MAMBA2, KDA], ids=["gdn", "mamba2", "kda"])


@each
@pytest.mark.parametrize("seed", [0, 6, 9])
@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_headwise_equals_one_rank(pools, layout, seed, mixers):
    tree = random_tree(seed, multiple=4)
    pools(2).run(parallel_equals_one_rank, mixers, 1, 2, tree=tree, layout=layout)


@each
def test_headwise_over_four_ranks_equals_one_rank(pools, mixers):
    tree = random_tree(3, multiple=8)
    pools(4).run(parallel_equals_one_rank, mixers, 1, 4, tree=tree, mode="headwise")


@each
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_tensor_and_sequence_parallel_equal_one_rank(pools, sequence_parallel, mixers):
    tree = random_tree(4, multiple=2)
    pools(2).run(parallel_equals_one_rank, mixers, 2, 1, sequence_parallel, tree=tree)


@pytest.mark.parametrize("recompute", ["light", "full"])
def test_recomputing_equals_one_rank(pools, recompute):
    tree = random_tree(5, multiple=4)
    pools(2).run(parallel_equals_one_rank, GDN, 1, 2, tree=tree, recompute=recompute)


@pytest.mark.parametrize("cp, recompute", [(1, False), (1, True), (2, False), (2, True)])
def test_a_model_on_shared_prompts_equals_separate_sequences(pools, cp, recompute):
    """fp64: losses of every response's token and every parameter's gradient."""
    pool = pools(2)
    apart = pool.run(tree_laws.separately)[0]
    shared = pool.run(tree_laws.as_tree, cp, recompute)[0]
    assert shared.keys() == apart.keys()
    for name, value in shared.items():
        assert_close(name, value, apart[name], 1e-11)


@each
def test_chunkwise_is_refused_in_words(pools, mixers):
    tree = random_tree(0, multiple=4)
    with pytest.raises(RankError, match="documents that continue others run on whole sequences"):
        pools(2).run(parallel_equals_one_rank, mixers, 1, 2, tree=tree, mode="chunkwise")

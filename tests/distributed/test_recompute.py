"""What is computed again, in every scheme, with a norm that the mixer computes or calls."""

import pytest

from tests.distributed import recompute_laws as laws


@pytest.mark.parametrize("called", [False, True], ids=["fused norm", "norm as a module"])
@pytest.mark.parametrize(("cp", "mode"), [(1, "auto"), (2, "headwise"), (2, "chunkwise")])
def test_the_norm_is_recomputed_without_megatrons_extension(pools, cp, mode, called):
    pools(cp).run(laws.norm_is_recomputed_without_an_extension, cp, mode, called)


@pytest.mark.parametrize("called", [False, True], ids=["fused norm", "norm as a module"])
@pytest.mark.parametrize(("cp", "mode"), [(2, "headwise"), (2, "chunkwise")])
def test_the_rule_runs_again_from_the_states_that_entered(pools, cp, mode, called):
    pools(cp).run(laws.norm_is_recomputed_without_an_extension, cp, mode, called, recompute="full")

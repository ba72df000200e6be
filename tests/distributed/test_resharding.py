"""Weights that Megatron reshards between models (refit) are shares of the same layer everywhere."""

import pytest

from tests.distributed import resharding_laws as laws


@pytest.mark.parametrize("mixer", ["gdn", "mamba2", "kda"])
def test_one_rank_to_two_to_four_to_one_is_the_identity(pools, mixer):
    for wrong in pools(4).run(laws.weights_that_are_not_a_share, mixer):
        assert not wrong

"""A built layer follows the process groups it is given: evaluation under another size."""

import pytest

from tests.distributed import bridge
from tests.distributed import rebinding_laws as laws
from tests.distributed.bridge import needs_bridge


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("linear_cp_mode", ["headwise", "chunkwise"])
def test_a_model_over_two_ranks_runs_on_one_and_over_two_again(pools, linear_cp_mode, packed):
    pools(2).run(laws.rebound_and_back, packed=packed, linear_cp_mode=linear_cp_mode)


@needs_bridge
@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
def test_bridges_own_context_for_evaluation_does_the_same(pools, packed):
    pools(2).run(laws.rebound_and_back, bridge.FOLDER, packed=packed)


def test_the_groups_of_one_forward_hold_for_that_forward(pools):
    pools(2).run(laws.groups_of_one_forward)


def test_sizes_under_upstreams_names_follow(pools):
    pools(2).run(laws.names_follow_the_group)


def test_what_cannot_be_followed_is_refused_by_name(pools):
    for size, tensor_ranks, in_forward, heads in pools(2).run(laws.refusals):
        assert "cp_size=2" in size and "pg_collection" in size
        assert "tensor-parallel group of 1 ranks" in tensor_ranks and tensor_ranks == in_forward
        assert "context_parallel_size=2" in heads and "linear_cp_mode='chunkwise'" in heads


def test_a_collection_that_is_given_another_group_is_followed(pools):
    pools(2).run(laws.groups_changed_in_place)


@pytest.mark.parametrize("change", ["replaced", "in place"])
def test_attention_follows_the_collection_that_it_holds(pools, change):
    pools(2).run(laws.attention_follows_its_collection, change)


def test_a_layout_that_is_set_later_counts(pools):
    pools(2).run(laws.layout_set_later)


def test_attention_between_two_groups_and_heads_in_another_layout_are_refused(pools):
    for attention, heads in pools(2).run(laws.attention_of_two_groups):
        assert "core_attention.cp_group" in attention and "pg_collection" in attention
        assert "cp_layout='contiguous' over 2 ranks" in heads

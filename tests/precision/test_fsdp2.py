"""torch's FSDP2 replaces parameters by casts of them: fp32 goes through, rounded gates do not."""

import pytest
import torch

from tests.precision import fsdp2_laws as laws


def test_an_fp32_layer_sharded_over_two_ranks_equals_one(pools):
    """fp32, and sums over two ranks in another order: 1e-5 of the largest entry."""
    pools(2).run(laws.fp32_equals_one_rank)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("called", [False, True], ids=["fused norm", "norm as a module"])
def test_with_tensor_parallelism_it_equals_one_rank(pools, called, sequence_parallel):
    pools(4).run(laws.tensor_parallel_equals_one_rank, called, sequence_parallel)


def test_with_tensor_parallelism_a_norm_sharded_by_itself_is_refused(pools):
    for message in pools(4).run(laws.refusal_of_a_norm_sharded_by_itself):
        assert "weight changed during the forward" in message, message
        assert "shard the whole GatedDeltaNet" in message


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_a_policy_that_rounds_the_gates_is_refused(pools, dtype):
    for message in pools(2).run(laws.refusal_of, dtype):
        assert f"A_log reached the layer in {dtype}" in message, message
        assert "MixedPrecisionPolicy without param_dtype" in message


@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_a_bf16_layer_with_fp32_gates_equals_the_unsharded_layer_to_the_bit(pools, mixer):
    pools(2).run(laws.equals_unsharded, mixer)


def test_a_policy_that_rounds_weights_leaves_gates_that_stand_apart(pools):
    pools(2).run(laws.a_policy_equals_a_cast)


def test_a_bf16_model_under_megatrons_wrapper_equals_the_unsharded_model_to_the_bit(pools):
    pools(2).run(laws.megatrons_wrapper_equals_unsharded)

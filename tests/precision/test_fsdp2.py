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


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("mixer", ["gdn", "mamba2"])
def test_a_bf16_layer_with_tensor_parallelism_equals_the_unsharded_layer_to_the_bit(
    pools, mixer, sequence_parallel
):
    pools(4).run(laws.bf16_tensor_parallel_equals_unsharded, mixer, sequence_parallel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_run_goes_on_from_a_torch_dcp_file(pools, tmp_path, dtype):
    pools(2).run(laws.a_run_goes_on_from_a_torch_dcp_file, str(tmp_path), dtype)


def test_torch_dist_is_refused_before_the_first_step_and_a_format_that_works_is_named(
    pools, tmp_path
):
    for at_the_save, at_the_start in pools(2).run(laws.refusals_of_torch_dist, str(tmp_path)):
        assert "in_proj.weight" in at_the_save and f"--save {tmp_path}" in at_the_start
        for message in (at_the_save, at_the_start):
            assert "Give --ckpt-format torch_dcp" in message
            assert "--use-distributed-optimizer in place of" in message

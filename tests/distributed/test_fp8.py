"""in_proj in FP8 with the rule's gates in the weights' dtype, on 1 and 2 ranks."""

import pytest

from tests.distributed import fp8_laws as laws

MIXERS = ["gdn", "mamba2"]


@pytest.mark.parametrize(("mixer", "bias"), [("gdn", False), ("gdn", True), ("mamba2", False)])
def test_gates_have_the_weights_dtype_and_the_rest_is_fp8(pools, mixer, bias):
    pools(2).run(laws.gates_have_the_weights_dtype_and_the_rest_is_fp8, mixer, bias)


@pytest.mark.parametrize("mixer", MIXERS)
def test_gradients_of_gates_do_not_pass_fp8(pools, mixer):
    pools(2).run(laws.gradients_of_gates_do_not_pass_fp8, mixer)


@pytest.mark.parametrize("zero_centered", [False, True], ids=["gamma", "1+gamma"])
@pytest.mark.parametrize("normalization", ["RMSNorm", "LayerNorm"])
def test_the_norm_in_front_comes_once(pools, normalization, zero_centered):
    pools(2).run(laws.the_norm_in_front_comes_once, normalization, zero_centered)


@pytest.mark.parametrize("mixer", MIXERS)
def test_both_parts_add_their_rows_of_main_grad_in_place(pools, mixer):
    pools(2).run(laws.the_linear_adds_rows_of_main_grad_in_place, mixer)


@pytest.mark.parametrize("mixer", MIXERS)
def test_megatrons_ddp_gets_both_parts(pools, mixer):
    pools(2).run(laws.megatrons_ddp_gets_both_parts, mixer)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_frozen_linear_gives_its_input_gradients(pools, mixer):
    pools(2).run(laws.a_frozen_linear_gives_its_input_gradients, mixer)


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
@pytest.mark.parametrize("normed", [False, True], ids=["linear", "norm+linear"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_ranks_share_the_gates(pools, mixer, normed, sequence_parallel, main_grad):
    pools(2).run(laws.ranks_share_the_gates, mixer, normed, sequence_parallel, main_grad)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tp", "sp"])
def test_an_adapter_gets_the_normed_rows(pools, sequence_parallel):
    pools(2).run(laws.an_adapter_gets_the_normed_rows, sequence_parallel)


@pytest.mark.parametrize("mixer", MIXERS)
def test_files_and_marks_are_those_of_a_launch_without_fp8(pools, mixer):
    pools(2).run(laws.files_and_marks_are_those_of_a_launch_without_fp8, mixer)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_checkpoint_moves_between_fp8_and_bf16(pools, mixer):
    pools(2).run(laws.a_checkpoint_moves_between_fp8_and_bf16, mixer)


@pytest.mark.parametrize("packed", [False, True], ids=["batch", "packed"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_gates_beside_the_rows_are_gates_in_the_rows(pools, mixer, packed):
    pools(2).run(laws.gates_beside_the_rows_are_gates_in_the_rows, mixer, packed)


@pytest.mark.parametrize("mixer", MIXERS)
def test_where_rows_must_be_whole_they_are_joined(pools, mixer):
    pools(2).run(laws.where_rows_must_be_whole_they_are_joined, mixer)


@pytest.mark.parametrize("mode", ["headwise", "chunkwise"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_context_parallel_ranks_equal_one(pools, mixer, mode):
    pools(2).run(laws.context_parallel_ranks_equal_one, mixer, mode)


@pytest.mark.parametrize("mixer", MIXERS)
def test_documents_of_a_tree_take_gates_beside_the_rows(pools, mixer):
    pools(2).run(laws.documents_of_a_tree_take_gates_beside_the_rows, mixer)

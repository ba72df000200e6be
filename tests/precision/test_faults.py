"""Each fault of megatron-core 0.19, without our remedy and with it.

A test that fails with the remedy *off* says that Megatron has repaired the fault: the part of
``megatron_gdn.compat.mixed_dtype_optimizers`` that it names can go.
"""

import pytest

from tests.precision import fault_laws as laws
from tests.precision import torch_file_laws
from tests.precision.training import DISTRIBUTED, FLOAT16, KINDS

remedies = pytest.mark.parametrize("remedied", [False, True], ids=["megatron alone", "remedied"])

WITHOUT = {
    FLOAT16: "AssertionError: Optimizer shape",
    "fully_reshardable": "RuntimeError: The size of tensor a",
    "dp_reshardable": "AssertionError: (torch.Size",
}


@remedies
@pytest.mark.parametrize("kind", KINDS)
def test_saving_a_bf16_model_with_fp32_parameters(pools, kind, remedied):
    for outcome in pools(2).run(laws.outcome_of_saving, kind, remedied):
        if remedied:
            assert outcome is None, outcome
        else:
            assert str(outcome).startswith(WITHOUT[kind]), outcome


@remedies
def test_equal_shapes_would_be_exchanged_in_silence(pools, tmp_path, remedied):
    kind = "fully_reshardable"
    found = pools(2).run(laws.state_stands_under_its_own_name, kind, remedied, str(tmp_path))
    assert found == [remedied, remedied]


MODELS = {
    "our layers": {},
    "upstream's": {"upstream_layer": True},
    "no layer of ours": {"pattern": "--"},
}


@remedies
@pytest.mark.parametrize("model", MODELS)
def test_several_buckets_save_the_states_that_one_bucket_saves(pools, tmp_path, model, remedied):
    """Megatron alone saves wrong ones in silence, of any model: a fault of upstream's."""
    law = laws.states_that_buckets_change
    for number, different in pools(2).run(law, remedied, str(tmp_path), **MODELS[model]):
        print(f"{len(different)} of {number} tensors differ")
        assert number > 10
        assert (not different) is remedied, different


@remedies
@pytest.mark.parametrize("kind", DISTRIBUTED)
def test_loading_writes_into_fp32_parameters(pools, tmp_path, kind, remedied):
    for outcome in pools(2).run(laws.outcome_of_loading, kind, remedied, str(tmp_path)):
        if kind == "dp_reshardable" and not remedied:
            assert outcome.startswith("RuntimeError: a view of a leaf Variable"), outcome
        else:
            assert outcome is None, outcome


@remedies
def test_the_torch_format_resumes_with_fp32_parameters(pools, tmp_path, remedied):
    for outcome in pools(2).run(torch_file_laws.outcome_of_resuming, remedied, str(tmp_path)):
        if remedied:
            assert outcome is None, outcome
        else:
            assert outcome.startswith("RuntimeError: a view of a leaf Variable"), outcome


@remedies
def test_replicas_of_a_parameter_loaded_from_bf16_are_equal(pools, tmp_path, remedied):
    kind = "fully_reshardable"
    ranks = pools(2).run(laws.replicas_after_loading_upstream, kind, remedied, str(tmp_path))
    assert all((one == other) is remedied for one, other in ranks)


def test_wrapping_is_reversible(pools):
    pools(2).run(laws.wrapping_is_reversible)


def test_a_repaired_optimizer_is_left_alone(pools):
    pools(2).run(laws.a_repaired_optimizer_is_left_alone)


def test_a_repaired_optimizer_gets_states_without_padding():
    laws.padding_is_left_to_a_repaired_optimizer()

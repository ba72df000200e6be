"""Muon orthogonalises matrices of one kind: sections of in_proj by themselves, on 1 and 2 ranks."""

import pytest
from megatron.core.optimizer import emerging_optimizers

from megatron_gdn.mixers.tensor_parallel import muon_reads_sections
from tests.distributed import muon_laws as laws

pytest.importorskip("emerging_optimizers", reason="Megatron's Muon needs emerging-optimizers")
if not muon_reads_sections():
    pytest.skip("Muon of this megatron-core knows no sections", allow_module_level=True)
# Megatron's main branch keeps Muon from parameters that ask for it, as Mamba2's in_proj does.
READS_USE_MUON = hasattr(emerging_optimizers, "_is_muon_excluded")
MIXERS = ["gdn", "kda"] if READS_USE_MUON else ["gdn", "mamba2", "kda"]


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("tp, tp_mode", [(1, "duplicated"), (2, "duplicated"), (2, "blockwise")])
@pytest.mark.parametrize("mixer", MIXERS)
def test_each_section_takes_its_own_muon_step(pools, mixer, tp, tp_mode, bf16):
    pools(2).run(laws.sections_step_as_if_alone, mixer, tp, tp_mode, bf16)


def test_it_does_so_where_ranks_add_up_their_parts_of_the_products(pools):
    pools(2).run(laws.sections_step_as_if_alone, "gdn", 2, "distributed", False)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("layer_wise", ["buffers", "lists"])
def test_it_does_so_where_data_parallel_ranks_share_the_optimizer(pools, layer_wise, ranks):
    """Two parameters are fp32: of four ranks some have 16-bit ones alone."""
    pools(ranks).run(laws.sections_step_as_if_alone, "gdn", 1, "duplicated", True, layer_wise)


@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("mixer", MIXERS)
def test_a_bf16_step_of_two_ranks_is_one_ranks_up_to_rounding(pools, mixer, sequence_parallel):
    pools(2).run(laws.two_ranks_step_within_the_rounding_of_one, mixer, sequence_parallel)


@pytest.mark.parametrize("mixer", ["gdn", "mamba2", "kda"])
def test_what_is_no_matrix_is_adams(pools, mixer):
    expected = {"in_proj.weight", "out_proj.weight"}
    if mixer == "kda":
        expected |= {"f_b_weight", "z_b_weight"}
    if mixer == "mamba2" and READS_USE_MUON:
        expected = {"out_proj.weight"}
    assert pools(2).run(laws.parameters_of_muon, mixer) == [expected] * 2

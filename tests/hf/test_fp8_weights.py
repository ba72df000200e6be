"""Weights that are stored in FP8, as ``--fp8-param-gather`` stores those of most linears."""

from tests.hf import fp8_weight_laws as laws


def test_an_export_has_the_values_of_weights_stored_in_fp8(pools, hf_folder, tmp_path):
    pools(1).run(laws.exports_have_its_values, hf_folder("dense"), tmp_path / "saved")


def test_the_optimizer_starts_from_the_loaded_values_of_weights_stored_in_fp8(pools, hf_folder):
    pools(1).run(laws.first_values_are_the_files, hf_folder("dense"))

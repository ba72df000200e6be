"""A model with low-rank adapters loads Hugging Face weights and is saved with them merged."""

import pytest
import torch

from megatron_gdn.hf import export_folder
from tests.distributed import bridge
from tests.distributed.bridge import needs_bridge
from tests.hf import adapter_laws as laws
from tests.hf.test_models import assert_logits_agree

by_hand = pytest.param(None, id="a wrapper like Bridge's")
by_bridge = pytest.param(bridge.FOLDER, id="Bridge's LoRA", marks=needs_bridge)


@pytest.fixture
def fp32_folder(hf_folder, tmp_path):
    return lambda name: laws.in_fp32(hf_folder(name), tmp_path / "fp32")


@pytest.mark.parametrize("folder", [by_hand, by_bridge])
@pytest.mark.parametrize("first", [False, True], ids=["loaded first", "adapted first"])
@pytest.mark.parametrize("name", ["dense", "next dense layer"])
def test_a_merged_export_is_the_model_with_its_adapters(
    pools, fp32_folder, tmp_path, name, first, folder
):
    """fp32; W x + B (A x) is another order: tokens that one rounding moves further are excepted."""
    (found,) = pools(1).run(
        laws.merged_export_agrees, fp32_folder(name), tmp_path / "saved", folder, first=first
    )
    assert_logits_agree(found, noisy=True)


@needs_bridge
def test_two_ranks_merge_what_they_share(pools, fp32_folder, tmp_path):
    source, target = fp32_folder("dense"), tmp_path / "saved"
    for found in pools(2).run(laws.merged_export_agrees, source, target, bridge.FOLDER, tp=2):
        assert_logits_agree(found, noisy=True)


def test_every_section_of_in_proj_is_merged(pools, fp32_folder):
    ((merged, expected),) = pools(1).run(laws.merged_rows, fp32_folder("dense"))
    assert list(merged) == ["query", "key", "value", "z", "beta", "alpha"]
    for name, rows in merged.items():
        assert torch.allclose(rows, expected[name], rtol=0, atol=1e-6), name


def test_an_adapter_that_cannot_be_merged_is_refused_by_name(pools, hf_folder, tmp_path):
    (said,) = pools(1).run(laws.saving_fails, hf_folder("dense"), tmp_path / "saved")
    assert said.startswith(f"{laws.GDN}.in_proj is a WithoutWeight"), said
    assert not (tmp_path / "saved").exists()


def test_a_checkpoint_with_adapters_is_not_exported_without_them(pools, hf_folder, tmp_path):
    pools(1).run(laws.save_adapted_checkpoint, hf_folder("dense"), tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=r"has adapters, .*save_hf_weights, which merges them"):
        export_folder(tmp_path / "checkpoint", tmp_path / "saved", like=hf_folder("dense"))

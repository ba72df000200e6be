"""Megatron-Bridge builds, loads and exports our layer after one call, behind
`te_on_cpu.py`."""

import pytest
import torch
import transformers
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from safetensors.torch import load_file, save_file

import megatron_gdn
from megatron_gdn.frameworks.bridge import in_published_dtypes
from tests.frameworks.bridge_models import bridged, logits, published
from tests.frameworks.conftest import page_lines
from tests.frameworks.tiny_models import (
    MODELS,
    require_exported,
    require_logits,
    tokens,
)

RANK = 4
ALPHA = 8

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_transformers_and_the_export_is_what_was_loaded(name, tmp_path):
    theirs = published(name, tmp_path, torch.float32)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path, torch.float32)
    layers = [layer.self_attention for layer in ours.decoder.layers]
    assert [isinstance(each, megatron_gdn.GatedDeltaNet) for each in layers] == [
        True
    ] * 3 + [False]
    with torch.no_grad():
        require_logits(name, logits(ours, tokens()), theirs(tokens()).logits)
    require_exported(exported(bridge, ours), tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_bf16_model_keeps_two_parameters_in_fp32_and_exports_what_was_loaded(
    name, tmp_path
):
    published(name, tmp_path, torch.bfloat16)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path, torch.bfloat16)
    layer = ours.module.decoder.layers[0].self_attention  # in a Float16Module
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    require_exported(exported(bridge, ours, weight_dtype=torch.bfloat16), tmp_path)


def exported(bridge, model, **settings):
    return bridge.export_hf_weights([model], cpu=True, show_progress=False, **settings)


FP32_IN_THE_FILES = {
    "Qwen3.5's": ("A_log", "linear_attn.norm.weight"),
    "A_log alone": ("A_log",),
}


@pytest.mark.parametrize("fp32", FP32_IN_THE_FILES.values(), ids=FP32_IN_THE_FILES)
def test_an_export_has_the_dtypes_of_the_files_and_their_bits(fp32, tmp_path):
    published("Qwen3.5", tmp_path, torch.float32)
    file = tmp_path / "model.safetensors"
    generator = torch.manual_seed(3)
    saved = load_file(file)
    for name, weight in saved.items():
        if name.endswith(("dt_bias", "linear_attn.norm.weight")):  # which start as ones
            weight.uniform_(0.2, 2, generator=generator)
        saved[name] = weight if name.endswith(fp32) else weight.bfloat16()
    save_file(saved, file, {"format": "pt"})
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path, torch.bfloat16)
    found = dict(in_published_dtypes(exported(bridge, ours), tmp_path))
    assert found.keys() == saved.keys()
    for name, expected in saved.items():
        assert found[name].dtype == expected.dtype, name
        # Megatron holds gamma - 1, in bf16
        if name.endswith("linear_attn.norm.weight"):
            expected = ((expected.float() - 1).bfloat16() + 1).to(expected.dtype)
        assert torch.equal(found[name], expected), name


def test_the_page_s_lines_write_files_of_the_same_dtypes(tmp_path):
    published("Qwen3.5", tmp_path, torch.bfloat16)
    build, export = page_lines("bridge")
    names = {
        "megatron_gdn": megatron_gdn,
        "AutoBridge": AutoBridge,
        "HF_FOLDER": tmp_path,
    }
    exec(build, names)
    ours, names["bridge"] = bridged(tmp_path, torch.bfloat16)
    exec(export, names | {"models": [ours], "NEW_FOLDER": tmp_path / "new"})
    assert isinstance(
        ours.module.decoder.layers[0].self_attention, megatron_gdn.GatedDeltaNet
    )
    files = (load_file(at / "model.safetensors") for at in (tmp_path / "new", tmp_path))
    new, saved = ({name: x.dtype for name, x in file.items()} for file in files)
    assert new == saved


def test_a_weight_that_the_files_do_not_have_is_refused(tmp_path):
    published("Qwen3.5", tmp_path, torch.float32)
    weights = [("model.layers.0.linear_attn.gate.weight", torch.ones(2))]
    with pytest.raises(
        KeyError, match="gate.weight is not in .* that the model was loaded from"
    ):
        list(in_published_dtypes(weights, tmp_path))


@pytest.fixture
def adapted(tmp_path):
    published("Qwen3.5", tmp_path, torch.float32)
    megatron_gdn.patch_megatron()
    model, bridge = bridged(tmp_path, torch.float32)
    lora = LoRA(
        target_modules=["in_proj", "out_proj", "linear_qkv", "linear_fc1"],
        dim=RANK,
        alpha=ALPHA,
        dropout=0.0,
    )
    model = lora(model, training=True)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert "adapter" in name
            torch.nn.init.normal_(parameter, std=0.1)
    return model, bridge, load_file(tmp_path / "model.safetensors")


def copies(weights) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in weights}


def test_merged_adapters_are_the_model_that_was_trained(adapted, tmp_path):
    model, bridge, base = adapted
    merged = copies(exported(bridge, model))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    sections = [f"in_proj_{x}" for x in ("qkv", "z", "b", "a")]
    assert {
        f"model.layers.0.linear_attn.{x}.weight" for x in (*sections, "out_proj")
    } <= changed
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path).eval()
    theirs.load_state_dict(merged)
    with torch.no_grad():
        # As without adapters, and each merged weight was rounded once more.
        require_logits(
            "merged", logits(model, tokens()), theirs(tokens()).logits, roundings=32
        )


def test_exported_adapters_are_what_the_merged_export_adds(adapted):
    model, bridge, base = adapted
    merged = copies(exported(bridge, model))
    alone = copies(bridge.export_adapter_weights([model], show_progress=False))
    places = {name.rpartition(".lora_")[0] for name in alone}
    assert any("in_proj_z" in place for place in places)
    for place in places:
        (name,) = (
            x
            for x in base
            if x.removesuffix(".weight") == place.split("model.", 2)[-1]
            or place.endswith(x.removesuffix(".weight"))
        )
        down, up = (alone[f"{place}.lora_{x}.weight"] for x in "AB")
        added = ALPHA / RANK * up @ down
        # The sum was rounded at the size of the merged weight, the product at its own.
        largest = max(x.abs().max().item() for x in (merged[name], added))
        rounding = 4 * torch.finfo(torch.float32).eps * largest
        torch.testing.assert_close(
            merged[name] - base[name], added, rtol=0, atol=rounding
        )

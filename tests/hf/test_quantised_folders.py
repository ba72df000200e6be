"""A quantised folder is refused in the words of its format, which name a weight and its
scales."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_gdn.hf import export_folder, import_folder, layer_from_hf
from megatron_gdn.hf.quantised import refuse_quantised
from megatron_gdn.hf.safetensors_files import SafetensorsFolder, TensorSpec
from megatron_gdn.mixers.tensor_map import bits_of
from tests.hf.test_layer_mapping import dims_of, random_file

MODULE = "model.layers.0.mlp.down_proj"
WEIGHT = f"{MODULE}.weight"
E4M3 = torch.float8_e4m3fn


def ones(*shape, dtype=torch.float32):
    return torch.ones(shape).to(dtype)


def integers(*shape, dtype=torch.uint8):
    return torch.ones(shape, dtype=dtype)


def scaled_fp8(scale, end="weight_scale"):
    """What stands for a weight [N, K] in FP8 with these scales."""
    return lambda n, k: {"weight": ones(n, k, dtype=E4M3), end: scale(n, k)}


def packed_int4(*others):
    """What GPTQ and AWQ store: eight values of 4 bits in an int32."""

    def tensors(n, k):
        found = {
            "qweight": integers(k // 8, n, dtype=torch.int32),
            "qzeros": integers(1, n // 8, dtype=torch.int32),
            "scales": ones(1, n, dtype=torch.float16),
        }
        return found | {name: integers(k, dtype=torch.int32) for name in others}

    return tensors


# For each format: what stands for a weight [N, K], by the end of the key; the words of
# the error.
FORMATS = {
    "block-scaled FP8": (
        scaled_fp8(lambda n, k: ones(1, 1), "weight_scale_inv"),
        "weight is block-scaled FP8 (F8_E4M3, scales F32 [1, 1] in "
        "{module}.weight_scale_inv)",
    ),
    "block-scaled FP8, bf16 scales": (
        scaled_fp8(lambda n, k: ones(1, 1, dtype=torch.bfloat16), "weight_scale_inv"),
        "weight is block-scaled FP8 (F8_E4M3, scales BF16 [1, 1] in "
        "{module}.weight_scale_inv)",
    ),
    "per-tensor FP8": (
        lambda n, k: {
            "input_scale": ones(),
            "weight": ones(n, k, dtype=E4M3),
            "weight_scale": ones(),
        },
        "weight is per-tensor FP8 (F8_E4M3, scales F32 [] in {module}.weight_scale)",
    ),
    "per-tensor FP8, inverse scale": (
        scaled_fp8(lambda n, k: ones(1), "weight_scale_inv"),
        "weight is per-tensor FP8 (F8_E4M3, scales F32 [1] in "
        "{module}.weight_scale_inv)",
    ),
    "per-channel FP8": (
        scaled_fp8(lambda n, k: ones(n, 1)),
        "weight is per-channel FP8 (F8_E4M3, scales F32 [24, 1] in "
        "{module}.weight_scale)",
    ),
    "MXFP8": (
        scaled_fp8(lambda n, k: integers(n, k // 8)),
        "weight is MXFP8 (F8_E4M3, scales U8 [24, 2] in {module}.weight_scale)",
    ),
    "FP8 without scales": (
        lambda n, k: {"weight": ones(n, k, dtype=E4M3)},
        "weight is FP8 (F8_E4M3, no scales)",
    ),
    "NVFP4": (
        lambda n, k: {
            "input_scale": ones(),
            "weight": integers(n, k // 2),
            "weight_scale": ones(n, k // 16, dtype=E4M3),
            "weight_scale_2": ones(),
        },
        "weight is NVFP4 (U8, scales F8_E4M3 [24, 1] in {module}.weight_scale)",
    ),
    "NVFP4 of compressed-tensors": (
        lambda n, k: {
            "weight_global_scale": ones(1),
            "weight_packed": integers(n, k // 2),
            "weight_scale": ones(n, k // 16, dtype=E4M3),
        },
        "weight_packed is NVFP4 (U8, scales F8_E4M3 [24, 1] in {module}.weight_scale)",
    ),
    "MXFP4 of compressed-tensors": (
        lambda n, k: {
            "weight_packed": integers(n, k // 2),
            "weight_scale": integers(n, 1),
        },
        "weight_packed is MXFP4 (U8, scales U8 [24, 1] in {module}.weight_scale)",
    ),
    "INT4 of compressed-tensors": (
        lambda n, k: {
            "weight_packed": integers(n, k // 8, dtype=torch.int32),
            "weight_scale": ones(n, 1, dtype=torch.bfloat16),
            "weight_shape": torch.tensor([n, k]),
        },
        "weight_packed is packed INT4 or INT8 (I32, scales BF16 [24, 1] in "
        "{module}.weight_scale)",
    ),
    "INT8": (
        lambda n, k: {
            "weight": integers(n, k, dtype=torch.int8),
            "weight_scale": ones(n, 1, dtype=torch.bfloat16),
        },
        "weight is INT8 (I8, scales BF16 [24, 1] in {module}.weight_scale)",
    ),
    "INT8 of bitsandbytes": (
        lambda n, k: {"SCB": ones(n), "weight": integers(n, k, dtype=torch.int8)},
        "weight is INT8 (I8, scales F32 [24] in {module}.SCB)",
    ),
    "4-bit of bitsandbytes": (
        lambda n, k: {
            "weight": integers(n * k // 2, 1),
            "weight.absmax": ones(12),
            "weight.quant_map": ones(16),
            "weight.quant_state.bitsandbytes__nf4": integers(80),
        },
        "weight is 4-bit of bitsandbytes (U8, scales F32 [12] in "
        "{module}.weight.absmax)",
    ),
    "GPTQ": (
        packed_int4("g_idx"),
        "qweight is GPTQ (I32, scales F16 [1, 24] in {module}.scales)",
    ),
    "AWQ": (
        packed_int4(),
        "qweight is AWQ or GPTQ (I32, scales F16 [1, 24] in {module}.scales)",
    ),
}
ADVICE = "; weights must be BF16, F16 or F32. Convert them to BF16 first."


@pytest.fixture
def copy(hf_folder, tmp_path):
    """A copy of the dense folder with all its weights in one file."""
    source = hf_folder("dense")
    folder = tmp_path / "source"
    folder.mkdir()
    shutil.copyfile(source / "config.json", folder / "config.json")
    tensors = {}
    for file in source.glob("*.safetensors"):
        tensors |= load_file(file)
    save_file(tensors, folder / "model.safetensors")
    return folder


def edit(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(("made", "words"), FORMATS.values(), ids=FORMATS)
def test_a_quantised_weight_is_refused_in_the_words_of_its_format(
    copy, tmp_path, refused, made, words
):
    def quantise(tensors):
        parts = made(*tensors.pop(WEIGHT).shape)
        tensors |= {f"{MODULE}.{end}": tensor for end, tensor in parts.items()}

    edit(copy, quantise)
    said = refused("import", copy, tmp_path / "imported")
    assert f"{MODULE}.{words.format(module=MODULE)}{ADVICE}" in said
    assert not (tmp_path / "imported").exists()


@pytest.mark.parametrize(
    "end", ["weight_scale_inv", "weight_scale", "weight_scale_2", "SCB"]
)
def test_scales_that_a_conversion_left_are_named(copy, tmp_path, refused, end):
    scale = f"{MODULE}.{end}"
    edit(
        copy, lambda tensors: tensors.update({scale: ones(1, 1, dtype=torch.bfloat16)})
    )
    said = refused("import", copy, tmp_path / "imported")
    assert f"{scale} has scales of a quantised weight, but {WEIGHT} is BF16; " in said
    assert "Convert the quantised weights again" in said


def test_scales_without_their_weight_are_named(copy, tmp_path, refused):
    scale = f"{MODULE}.weight_scale_inv"

    def lose(tensors):
        del tensors[WEIGHT]
        tensors[scale] = ones(1, 1)

    edit(copy, lose)
    said = refused("import", copy, tmp_path / "imported")
    assert (
        f"{scale} has scales of a quantised weight, but {WEIGHT} is missing; " in said
    )


def test_a_quantised_tensor_that_no_import_loads_is_copied(copy, tmp_path):
    added = {
        "mtp.fc.weight": integers(4, 4, dtype=torch.int8),
        "mtp.fc.weight_scale": ones(4, 1),
        "model.visual.fc.weight": ones(4, 4, dtype=E4M3),
        "model.visual.fc.weight_scale_inv": ones(1, 1),
    }
    edit(copy, lambda tensors: tensors.update(added))
    import_folder(copy, tmp_path / "imported")
    export_folder(tmp_path / "imported", tmp_path / "back", like=copy)
    for key, tensor in added.items():
        copied = SafetensorsFolder(tmp_path / "back").read(key)
        assert copied.dtype == tensor.dtype
        assert torch.equal(bits_of(copied), bits_of(tensor)), key


@pytest.mark.parametrize(("made", "words"), FORMATS.values(), ids=FORMATS)
def test_a_quantised_layer_is_refused_in_the_same_words(made, words):
    file = random_file(dims_of(), "flat")
    module = "out_proj"
    del file["out_proj.weight"]
    parts = made(24, 20)
    file |= {f"{module}.{end}": tensor for end, tensor in parts.items()}
    with pytest.raises(NotImplementedError) as raised:
        layer_from_hf(file, dims_of(), storage="flat")
    assert str(raised.value) == f"{module}.{words.format(module=module)}{ADVICE}"


@pytest.mark.parametrize(
    ("scale", "format"),
    [((4,), "per-tensor"), ((4, 8, 1), "per-channel"), ((4, 2, 3), "block-scaled")],
)
def test_experts_in_one_tensor_are_named_by_the_scales_of_one_expert(scale, format):
    experts = "experts.gate_up_proj"
    specs = {
        f"{experts}_scale_inv": TensorSpec("BF16", scale),
        experts: TensorSpec("F8_E4M3", (4, 8, 6)),
    }
    with pytest.raises(
        NotImplementedError, match=rf"^{experts} is {format} FP8 \(F8_E4M3"
    ):
        refuse_quantised(specs)


@pytest.mark.parametrize(
    "stored",
    [
        {"down_proj_blocks": "BF16", "down_proj_scales": "U8"},
        {"down_proj_blocks": "U8"},
        {"down_proj": "U8"},
        {"down_proj": "I8"},
        {"input_scale": "F32"},
    ],
    ids=str,
)
def test_a_tensor_without_the_scales_of_its_format_is_not_quantised(stored):
    """The shapes and dtypes that the config asks for are checked later."""
    refuse_quantised({key: TensorSpec(dtype, (4, 8)) for key, dtype in stored.items()})


def test_scales_of_experts_that_a_conversion_left_are_named():
    specs = {
        "experts.down_proj": TensorSpec("BF16", (4, 8, 6)),
        "experts.down_proj_scale": TensorSpec("F32", (4, 8, 1)),
    }
    said = r"^experts.down_proj_scale has scales .* but experts.down_proj is BF16"
    with pytest.raises(NotImplementedError, match=said):
        refuse_quantised(specs)


def test_four_bits_of_experts_in_blocks_are_named():
    specs = {
        f"experts.down_proj_{end}": TensorSpec("U8", (4, 8))
        for end in ("blocks", "scales")
    }
    with pytest.raises(
        NotImplementedError, match=r"^experts.down_proj_blocks is MXFP4 \(U8"
    ):
        refuse_quantised(specs)

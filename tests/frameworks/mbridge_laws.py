"""mbridge's Qwen3.5 builds, loads and exports our layer after one call.

`make test-frameworks` runs it, behind the stand-in for Transformer Engine (`te_on_cpu.py`), in an
environment of its own. Where mbridge's own settings ask for a fused kernel of a GPU, the plain one
is taken.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import transformers
from mbridge import AutoBridge
from megatron.core.transformer.moe import moe_utils
from safetensors.torch import load_file

import megatron_gdn
from megatron_gdn.compat.one_process import end_one_process, start_one_process

TOKENS = 24
TEXT = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 64, "vocab_size": 64, "intermediate_size": 48, "max_position_embeddings": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    # Published files have both; transformers drops the second where it stands alone.
    "layer_types": ["linear_attention"] * 3 + ["full_attention"], "full_attention_interval": 4,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2], "mrope_interleaved": True,
    },
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
VISION = {
    "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
    "num_position_embeddings": 16,
}  # fmt: skip
MARKS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62}
WITHOUT_GPU = {
    "moe_permute_fusion": False, "moe_shared_expert_overlap": False,
    "moe_token_dispatcher_type": "allgather", "variable_seq_lengths": False,
    "apply_rope_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False,
    "use_cpu_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
MODELS = {"Qwen3.5": ("Qwen3_5", {}), "Qwen3.5 MoE": ("Qwen3_5Moe", EXPERTS)}


@pytest.fixture(autouse=True)
def megatron(monkeypatch):
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module, device=None: module)
    start_one_process()
    yield
    megatron_gdn.patch_megatron(gdn=False)
    end_one_process()


def published(name: str, folder, dtype: torch.dtype = torch.float32):
    """A tiny model of transformers' class, saved with weights of ``dtype``."""
    family, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        text_config={**TEXT, **more}, vision_config=VISION, tie_word_embeddings=False, **MARKS
    )
    model = getattr(transformers, f"{family}ForConditionalGeneration")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and gates, which all begin as zeros or ones
                parameter.add_(0.1 * torch.randn_like(parameter))
    model = model.eval().to(dtype)
    model.save_pretrained(folder, save_original_format=False)  # experts in one tensor
    return model


def bridge_of(folder, dtype: torch.dtype = torch.float32):
    # It makes a config of its own settings first, which asks for these and does not call them.
    names = ("fused_permute", "fused_permute_with_probs", "fused_sort_chunks_by_index",
             "fused_sort_chunks_by_index_with_probs", "fused_unpermute")  # fmt: skip
    with patch.multiple(moe_utils, **dict.fromkeys(names, print)):
        bridge = AutoBridge.from_pretrained(folder, dtype=dtype)
    bridge.set_extra_args(**WITHOUT_GPU)
    return bridge


def bridged(folder, dtype: torch.dtype = torch.float32):
    """mbridge's model of that folder, with its weights, and the bridge."""
    bridge = bridge_of(folder, dtype)
    (model,) = bridge.get_model(weight_path=str(folder), bf16=dtype == torch.bfloat16)
    return model, bridge


def layers(model) -> list:
    return [each.self_attention for each in getattr(model, "module", model).decoder.layers]


def tokens() -> torch.Tensor:
    return torch.randint(50, (2, TOKENS), generator=torch.manual_seed(1))


def positions(ids: torch.Tensor) -> torch.Tensor:
    return torch.arange(ids.shape[1]).expand(3, len(ids), -1)


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_transformers_and_the_export_is_what_was_loaded(name, tmp_path):
    theirs = published(name, tmp_path)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path)
    found = [isinstance(each, megatron_gdn.GatedDeltaNet) for each in layers(ours)]
    assert found == [True] * 3 + [False]
    with torch.no_grad():
        expected = theirs(tokens()).logits
        difference = (ours(tokens(), positions(tokens())) - expected).abs().max().item()
    print(f"{name}: logits differ by {difference:.1e} of {expected.abs().max():.1e}")
    # Under 16 roundings on the way to a logit, each of at most the largest number's last place.
    assert difference <= 16 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    require_exported(bridge, ours, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_bf16_model_exports_the_bits_that_were_loaded(name, tmp_path):
    published(name, tmp_path, torch.bfloat16)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path, torch.bfloat16)
    layer = layers(ours)[0]
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    require_exported(bridge, ours, tmp_path)


def require_exported(bridge, model, folder) -> None:
    """Every tensor of the folder, bit for bit, and no other."""
    saved = load_file(folder / "model.safetensors")
    for name, weight in bridge.export_weights([model]):
        expected = saved.pop(name)
        gate = name.endswith(("A_log", "dt_bias"))  # which train in fp32
        assert weight.dtype == (torch.float32 if gate else expected.dtype), name
        assert torch.equal(weight.to(expected.dtype), expected), name
    assert not saved, sorted(saved)


def test_it_trains(tmp_path):
    published("Qwen3.5", tmp_path)
    megatron_gdn.patch_megatron()
    model, _ = bridged(tmp_path)
    parameters = list(model.language_model.parameters())
    optimizer = torch.optim.SGD(parameters, 0.1)
    ids, losses = tokens(), []
    for _ in range(3):
        loss = model(ids, positions(ids), labels=ids).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]


def test_undo_gives_mbridge_megatrons_layer_back(tmp_path):
    published("Qwen3.5", tmp_path)
    megatron_gdn.patch_megatron()
    megatron_gdn.patch_megatron(gdn=False)
    model, bridge = bridged(tmp_path)
    assert not any(isinstance(each, megatron_gdn.GatedDeltaNet) for each in layers(model))
    require_exported(bridge, model, tmp_path)


def test_the_lines_of_the_page_build_ours(tmp_path):
    published("Qwen3.5", tmp_path, torch.bfloat16)
    page = Path(__file__).parents[2] / "docs/frameworks/mbridge.md"
    (code,) = re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL)
    here = SimpleNamespace(from_pretrained=lambda folder: bridge_of(folder, torch.bfloat16))
    names = {"megatron_gdn": megatron_gdn, "AutoBridge": here, "HF_FOLDER": str(tmp_path)}
    exec(code, names)
    assert isinstance(layers(*names["models"])[0], megatron_gdn.GatedDeltaNet)


def test_qwen3_next_is_not_in_mbridge():
    assert "qwen3_next" not in AutoBridge.list_supported_models()

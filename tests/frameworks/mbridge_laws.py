"""mbridge's Qwen3.5 builds, loads and exports our layer after one call, behind
`te_on_cpu.py`."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from mbridge import AutoBridge
from megatron.core.transformer.moe import moe_utils

import megatron_gdn
from tests.frameworks import tiny_models
from tests.frameworks.conftest import page_lines
from tests.frameworks.tiny_models import (
    require_exported,
    require_falling,
    require_logits,
    tokens,
)

TEXT = {
    "head_dim": 64,
    # Published files have both; transformers drops the second where it stands alone.
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
MORE = {
    "moe_shared_expert_overlap": False,
    "variable_seq_lengths": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
MODELS = "Qwen3.5", "Qwen3.5 MoE"


@pytest.fixture(autouse=True)
def megatron(monkeypatch, one_process):
    monkeypatch.setattr(torch.nn.Module, "cuda", lambda module, device=None: module)


def published(name: str, folder, dtype: torch.dtype = torch.float32):
    return tiny_models.published(name, folder, dtype, **TEXT)


def bridge_of(folder, dtype: torch.dtype = torch.float32):
    # It makes a config of its own settings first, which asks for these and does not
    # call them.
    names = (
        "fused_permute",
        "fused_permute_with_probs",
        "fused_sort_chunks_by_index",
        "fused_sort_chunks_by_index_with_probs",
        "fused_unpermute",
    )
    with patch.multiple(moe_utils, **dict.fromkeys(names, print)):
        bridge = AutoBridge.from_pretrained(folder, dtype=dtype)
    bridge.set_extra_args(**tiny_models.WITHOUT_GPU, **MORE)
    return bridge


def bridged(folder, dtype: torch.dtype = torch.float32):
    bridge = bridge_of(folder, dtype)
    (model,) = bridge.get_model(weight_path=str(folder), bf16=dtype == torch.bfloat16)
    return model, bridge


def layers(model) -> list:
    return [
        each.self_attention for each in getattr(model, "module", model).decoder.layers
    ]


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
        found = ours(tokens(), positions(tokens()))
        require_logits(name, found, theirs(tokens()).logits)
    require_exported(bridge.export_weights([ours]), tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_bf16_model_exports_the_bits_that_were_loaded(name, tmp_path):
    published(name, tmp_path, torch.bfloat16)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path, torch.bfloat16)
    layer = layers(ours)[0]
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    require_exported(bridge.export_weights([ours]), tmp_path, gates_in_fp32=True)


def test_it_trains(tmp_path):
    published("Qwen3.5", tmp_path)
    megatron_gdn.patch_megatron()
    model, _ = bridged(tmp_path)
    ids = tokens()
    require_falling(
        lambda: model(ids, positions(ids), labels=ids).mean(),
        model.language_model.parameters(),
    )


def test_the_lines_of_the_page_build_ours(tmp_path):
    published("Qwen3.5", tmp_path, torch.bfloat16)
    (code,) = page_lines("mbridge")
    here = SimpleNamespace(
        from_pretrained=lambda folder: bridge_of(folder, torch.bfloat16)
    )
    names = {
        "megatron_gdn": megatron_gdn,
        "AutoBridge": here,
        "HF_FOLDER": str(tmp_path),
    }
    exec(code, names)
    assert isinstance(layers(*names["models"])[0], megatron_gdn.GatedDeltaNet)


def test_qwen3_next_is_not_in_mbridge():
    assert "qwen3_next" not in AutoBridge.list_supported_models()

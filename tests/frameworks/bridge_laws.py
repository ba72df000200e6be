"""Megatron-Bridge builds, loads and exports our layer after one call.

`make test-frameworks` runs it, behind the stand-in for Transformer Engine (`te_on_cpu.py`), in an
environment of its own. Where
Bridge's own settings ask for a fused kernel of a GPU, the plain one is taken.
"""

import pytest
import torch
import transformers
from megatron.bridge import AutoBridge
from safetensors.torch import load_file

import megatron_gdn
from megatron_gdn.compat.one_process import end_one_process, start_one_process

TOKENS = 24
SIZES = {
    "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 64, "intermediate_size": 48, "max_position_embeddings": 64,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {
    "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
}  # fmt: skip
WITHOUT_GPU = {
    "moe_permute_fusion": False, "moe_grouped_gemm": False, "moe_router_fusion": False,
    "moe_token_dispatcher_type": "allgather", "apply_rope_fusion": False,
    "gradient_accumulation_fusion": False, "persist_layer_norm": False,
    "use_cpu_initialization": True, "attention_dropout": 0.0, "hidden_dropout": 0.0,
}  # fmt: skip
MODELS = {
    "Qwen3-Next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", EXPERTS),
    "Qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {}),
    "Qwen3.5 MoE": ("Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", EXPERTS),
}


@pytest.fixture(autouse=True)
def megatron():
    start_one_process()
    yield
    megatron_gdn.patch_megatron(gdn=False)
    end_one_process()


def published(name: str, folder, dtype: torch.dtype):
    """A tiny model of transformers' class, saved with weights of ``dtype``."""
    config_class, model_class, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**SIZES, **more)
    model = getattr(transformers, model_class)(config).eval().to(dtype)
    model.save_pretrained(folder)
    return model


def bridged(folder, dtype: torch.dtype):
    """Bridge's model of that folder, with its weights, and the bridge."""
    bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=dtype)
    provider = bridge.to_megatron_provider(load_weights=True)
    half = dtype == torch.bfloat16
    settings = {"params_dtype": dtype, "pipeline_dtype": dtype, "bf16": half, **WITHOUT_GPU}
    for field, value in settings.items():
        assert hasattr(provider, field), field
        setattr(provider, field, value)
    provider.finalize()
    (model,) = provider.provide_distributed_model(
        wrap_with_ddp=False, use_cpu_initialization=True, bf16=half
    )
    return model, bridge


def tokens() -> torch.Tensor:
    return torch.randint(SIZES["vocab_size"], (2, TOKENS), generator=torch.manual_seed(1))


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, torch.arange(TOKENS).expand(len(ids), -1), None)


@pytest.mark.parametrize("name", MODELS)
def test_the_logits_are_transformers_and_the_export_is_what_was_loaded(name, tmp_path):
    theirs = published(name, tmp_path, torch.float32)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path, torch.float32)
    layers = [layer.self_attention for layer in ours.decoder.layers]
    assert [isinstance(each, megatron_gdn.GatedDeltaNet) for each in layers] == [True] * 3 + [False]
    with torch.no_grad():
        expected = theirs(tokens()).logits
        difference = (logits(ours, tokens()) - expected).abs().max().item()
    print(f"{name}: logits differ by {difference:.1e} of {expected.abs().max():.1e}")
    # Under 16 roundings on the way to a logit, each of at most the largest number's last place.
    assert difference <= 16 * torch.finfo(torch.float32).eps * expected.abs().max().item()
    require_exported(bridge, ours, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_a_bf16_model_keeps_two_parameters_in_fp32_and_exports_what_was_loaded(name, tmp_path):
    published(name, tmp_path, torch.bfloat16)
    megatron_gdn.patch_megatron()
    ours, bridge = bridged(tmp_path, torch.bfloat16)
    layer = ours.module.decoder.layers[0].self_attention  # in a Float16Module
    assert layer.A_log.dtype == layer.dt_bias.dtype == torch.float32
    require_exported(bridge, ours, tmp_path, torch.bfloat16)


def require_exported(bridge, model, folder, dtype: torch.dtype | None = None) -> None:
    """Every tensor of the folder, bit for bit and in its dtype, and no other."""
    saved = load_file(folder / "model.safetensors")
    exported = bridge.export_hf_weights([model], cpu=True, show_progress=False, weight_dtype=dtype)
    for name, weight in exported:
        expected = saved.pop(name)
        assert weight.dtype == expected.dtype, (name, weight.dtype)
        assert torch.equal(weight, expected), name
    assert not saved, sorted(saved)


def test_it_trains(tmp_path):
    published("Qwen3.5", tmp_path, torch.float32)
    megatron_gdn.patch_megatron()
    model, _ = bridged(tmp_path, torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    positions, ids, losses = torch.arange(TOKENS).expand(2, -1), tokens(), []
    for _ in range(3):
        loss = model(ids, positions, None, labels=ids).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[1] < losses[0]

"""Megatron-Bridge builds, loads and exports our layer after one call.

`make test-frameworks` runs it, behind the stand-in for Transformer Engine (`te_on_cpu.py`), in an
environment of its own. Where
Bridge's own settings ask for a fused kernel of a GPU, the plain one is taken.
"""

import pytest
import torch
import transformers
from megatron.bridge import AutoBridge
from megatron.bridge.peft.lora import LoRA
from safetensors.torch import load_file

import megatron_gdn
from megatron_gdn.compat.one_process import end_one_process, start_one_process

TOKENS, RANK, ALPHA = 24, 4, 8
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


@pytest.fixture
def adapted(tmp_path):
    """Bridge's Qwen3.5 with LoRA on all four kinds of linears, none of which does nothing."""
    published("Qwen3.5", tmp_path, torch.float32)
    megatron_gdn.patch_megatron()
    model, bridge = bridged(tmp_path, torch.float32)
    lora = LoRA(target_modules=["in_proj", "out_proj", "linear_qkv", "linear_fc1"], dim=RANK,
                alpha=ALPHA, dropout=0.0)  # fmt: skip
    model = lora(model, training=True)
    torch.manual_seed(2)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert "adapter" in name
            torch.nn.init.normal_(parameter, std=0.1)
    return model, bridge, load_file(tmp_path / "model.safetensors")


def exported(weights) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in weights}


def test_merged_adapters_are_the_model_that_was_trained(adapted, tmp_path):
    model, bridge, base = adapted
    merged = exported(bridge.export_hf_weights([model], cpu=True, show_progress=False))
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    sections = [f"in_proj_{x}" for x in ("qkv", "z", "b", "a")]
    assert {f"model.layers.0.linear_attn.{x}.weight" for x in (*sections, "out_proj")} <= changed
    theirs = transformers.Qwen3_5ForCausalLM.from_pretrained(tmp_path).eval()
    theirs.load_state_dict(merged)
    with torch.no_grad():
        expected = theirs(tokens()).logits
        difference = (logits(model, tokens()) - expected).abs().max().item()
    # As without adapters, and each merged weight was rounded once more.
    assert difference <= 32 * torch.finfo(torch.float32).eps * expected.abs().max().item()


def test_exported_adapters_are_what_the_merged_export_adds(adapted):
    model, bridge, base = adapted
    merged = exported(bridge.export_hf_weights([model], cpu=True, show_progress=False))
    alone = exported(bridge.export_adapter_weights([model], show_progress=False))
    places = {name.rpartition(".lora_")[0] for name in alone}
    assert any("in_proj_z" in place for place in places)
    for place in places:
        (name,) = (x for x in base if x.removesuffix(".weight") == place.split("model.", 2)[-1]
                   or place.endswith(x.removesuffix(".weight")))  # fmt: skip
        down, up = (alone[f"{place}.lora_{x}.weight"] for x in "AB")
        added = ALPHA / RANK * up @ down
        # The sum was rounded at the size of the merged weight, the product at its own.
        largest = max(x.abs().max().item() for x in (merged[name], added))
        rounding = 4 * torch.finfo(torch.float32).eps * largest
        torch.testing.assert_close(merged[name] - base[name], added, rtol=0, atol=rounding)

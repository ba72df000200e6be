"""Tiny models for the laws of Megatron-Bridge: saved by transformers, built by Bridge.

Where Bridge's own settings ask for a fused kernel of a GPU, the plain one is taken.
"""

import torch
import transformers
from megatron.bridge import AutoBridge

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


def published(name: str, folder, dtype: torch.dtype, **changes):
    """A tiny model of transformers' class, saved with weights of ``dtype``."""
    config_class, model_class, more = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**{**SIZES, **more, **changes})
    model = getattr(transformers, model_class)(config).eval().to(dtype)
    model.save_pretrained(folder)
    return model


def bridged(folder, dtype: torch.dtype, **changes):
    """Bridge's model of that folder, with its weights, and the bridge.

    Args:
        changes: settings of Bridge's provider.
    """
    bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=dtype)
    provider = bridge.to_megatron_provider(load_weights=True)
    half = dtype == torch.bfloat16
    settings = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": half,
        **WITHOUT_GPU,
        **changes,
    }
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

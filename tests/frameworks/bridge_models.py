"""Tiny models that Megatron-Bridge builds, without fused kernels of a GPU."""

import torch
from megatron.bridge import AutoBridge

from tests.frameworks import tiny_models
from tests.frameworks.tiny_models import TOKENS

MORE = {
    "moe_grouped_gemm": False,
    "moe_router_fusion": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def published(name: str, folder, dtype: torch.dtype = torch.float32, **changes):
    """Bridge's provider of a text model takes Qwen3.5 without its model of images."""
    return tiny_models.published(name, folder, dtype, vision=False, **changes)


def bridged(folder, dtype: torch.dtype, **changes):
    """Bridge's model of that folder, with its weights, and the bridge."""
    bridge = AutoBridge.from_hf_pretrained(folder, torch_dtype=dtype)
    provider = bridge.to_megatron_provider(load_weights=True)
    half = dtype == torch.bfloat16
    settings = {
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": half,
        **tiny_models.WITHOUT_GPU,
        **MORE,
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


def logits(model, ids: torch.Tensor) -> torch.Tensor:
    return model(ids, torch.arange(TOKENS).expand(len(ids), -1), None)

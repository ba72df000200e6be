"""Megatron's config, as the benchmarks build it."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def transformer_config(hidden: int, dtype: torch.dtype, **fields: Any) -> Any:
    """Megatron's config: ``fields``, and beside them what all benchmarks agree on."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    common = {
        "num_layers": 1,
        "num_attention_heads": 4,
        "linear_conv_kernel_dim": 4,
        "normalization": "RMSNorm",
        "activation_func": F.silu,
        "add_bias_linear": False,
        "gradient_accumulation_fusion": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": DEVICE == "cpu",
    }
    return TransformerConfig(
        hidden_size=hidden,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **(common | fields),
    )

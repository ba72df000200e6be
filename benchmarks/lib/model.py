"""Megatron's configs and hybrid models, as all benchmarks build them."""

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


def hybrid_model(
    config: Any, spec: Any, pattern: str, vocabulary: int, tokens: int, **more: Any
) -> Any:
    """A HybridModel with random weights; ``tokens``: of its longest sequence."""
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    return HybridModel(
        config,
        spec,
        vocab_size=vocabulary,
        max_sequence_length=tokens,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
        **more,
    )


def gdn_sizes(key_heads: int, value_heads: int, head_dim: int) -> dict[str, int]:
    """A Gated DeltaNet's fields of Megatron's config."""
    return {
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": head_dim,
        "linear_value_head_dim": head_dim,
    }

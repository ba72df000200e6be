"""Megatron models of an imported configuration, from modules that run without a GPU."""

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_gdn.hf import HFModelConfig
from megatron_gdn.specs import gpt_block_spec, hybrid_stack_spec

CPU_SETTINGS = {
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "transformer_impl": "local",
    "moe_token_dispatcher_type": "allgather",
}


def build_megatron(
    config: HFModelConfig, kind: str, pad_to: int = 8, stage: dict | None = None, **changes
):
    """A HybridModel or GPTModel of ``config``, with its vocabulary padded to ``pad_to`` rows."""
    settings = config.megatron_settings() | CPU_SETTINGS | changes
    arguments = {
        "vocab_size": -(-config.vocab_size // pad_to) * pad_to,
        "max_sequence_length": 64,
        "share_embeddings_and_output_weights": config.tied,
        "position_embedding_type": "rope",
        "rotary_percent": config.rotary_fraction,
        "rotary_base": config.rope_theta,
        "parallel_output": False,
        **(stage or {}),
    }
    if kind == "gpt":
        megatron_config = TransformerConfig(**settings)
        return GPTModel(megatron_config, gpt_block_spec(megatron_config), **arguments)
    pattern = config.hybrid_layer_pattern
    settings |= {"num_layers": len(pattern), "linear_attention_freq": 1, "moe_layer_freq": 1}
    return HybridModel(
        TransformerConfig(**settings),
        hybrid_stack_spec("local", qk_layernorm=True, num_moe_experts=config.num_experts or None),
        hybrid_layer_pattern=pattern,
        **arguments,
    )


def logits_of(model, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """``[B, S, vocab]`` of ``tokens [B, S]``, causal."""
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, hidden)[..., :vocab]

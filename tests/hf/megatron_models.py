"""Megatron models of an imported configuration, on the CPU."""

import torch

from megatron_gdn.hf import build_model


def build_megatron(config, kind, params_dtype=torch.float32, **changes):
    """A HybridModel or GPTModel of ``config`` that gives whole logits."""
    model, _ = build_model(config, kind, dtype=params_dtype, parallel_output=False, **changes)
    return model


def logits_of(model, tokens: torch.Tensor, vocab: int) -> torch.Tensor:
    """``[B, S, vocab]`` of ``tokens [B, S]``, causal."""
    length = tokens.shape[1]
    positions = torch.arange(length).expand_as(tokens)
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    return model(tokens, positions, hidden)[..., :vocab]

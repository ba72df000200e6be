"""Writes a few bytes with the trained model, carrying its states from each to the
next."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from megatron_gdn.inference.generate import generate
from pretraining.corpus import END_OF_DOCUMENT, VOCAB_SIZE


def sample(
    model: Any, prompt: str, num_tokens: int, temperature: float, seed: int
) -> tuple[str, float]:
    """Continue ``prompt`` by up to ``num_tokens`` bytes; every rank of the model takes
    part.

    Args:
        model: the (wrapped) HybridModel, not pipelined.
        temperature: 0 picks the likeliest byte.
        seed: of the draws, the same on every rank so that all continue the same text.

    Returns:
        prompt and continuation, which stops at the end of a document, and tokens per
        second.

    Raises:
        FloatingPointError: the model's logits are not finite.
        NotImplementedError: Transformer Engine's attention with context parallelism,
            see :func:`megatron_gdn.inference.generate.static_context`.
    """
    generator = torch.Generator().manual_seed(seed)

    def pick(logits: Tensor) -> Tensor:
        bytes_of = logits[:, :VOCAB_SIZE].cpu()
        if not bytes_of.isfinite().all():
            raise FloatingPointError("the model's logits are not finite")
        if temperature == 0:
            return bytes_of.argmax(-1).to(logits.device)
        weights = (bytes_of / temperature).softmax(-1)
        return torch.multinomial(weights, 1, generator=generator)[:, 0].to(
            logits.device
        )

    device = next(model.parameters()).device
    tokens = torch.tensor([[END_OF_DOCUMENT, *prompt.encode()]], device=device)
    begin = time.perf_counter()
    made = generate(model, tokens, num_tokens, pick=pick, stop=END_OF_DOCUMENT)[
        0
    ].tolist()
    rate = (len(made) - tokens.shape[1]) / (time.perf_counter() - begin)
    text = [token for token in made if token != END_OF_DOCUMENT]
    return bytes(text).decode(errors="replace"), rate

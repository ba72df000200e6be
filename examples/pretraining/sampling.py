"""Writes a few bytes with the trained model, by running it again over the text for each of them.

Slow and simple on purpose: it is the training forward pass, tensor and context parallel included.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_gdn.context_parallel.layouts import local_indices
from pretraining.corpus import END_OF_DOCUMENT, VOCAB_SIZE

_GRAIN = 64


@torch.no_grad()
def sample(
    model: Any, prompt: str, num_tokens: int, temperature: float, multiple: int, seed: int
) -> str:
    """Continue ``prompt`` by up to ``num_tokens`` bytes; every rank of the model takes part.

    Args:
        model: the (wrapped) HybridModel, not pipelined.
        temperature: 0 picks the likeliest byte.
        multiple: sequence lengths the parallel layout can cut.
        seed: of the draws, the same on every rank so that all continue the same text.

    Returns:
        prompt and continuation; it stops at the end of a document.
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = [END_OF_DOCUMENT, *prompt.encode()]
    first = len(tokens)
    while len(tokens) < first + num_tokens:
        logits = next_token_logits(model, tokens, multiple)
        if temperature == 0:
            token = int(logits.argmax())
        else:
            token = int(
                torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)
            )
        if token == END_OF_DOCUMENT:
            break
        tokens.append(token)
    model.train()
    return bytes(tokens[1:]).decode(errors="replace")


def next_token_logits(model: Any, tokens: list[int], multiple: int) -> Tensor:
    """Logits of what follows ``tokens``: float32 ``[VOCAB_SIZE]`` on the CPU, on every rank."""
    from megatron.core import parallel_state

    device = next(model.parameters()).device
    grain = multiple * -(-_GRAIN // multiple)
    width = -(-len(tokens) // grain) * grain
    padded = torch.full((1, width), END_OF_DOCUMENT, device=device)
    padded[0, : len(tokens)] = torch.tensor(tokens, device=device)
    cp = parallel_state.get_context_parallel_world_size()
    mine = local_indices([width], cp, parallel_state.get_context_parallel_rank())
    positions = torch.arange(width, device=device)[None]
    logits = model(padded[:, mine], positions[:, mine], None, runtime_gather_output=True)
    # One context-parallel rank holds the last token; the others contribute zeros to the sum.
    last = torch.zeros(logits.shape[-1], dtype=torch.float32, device=device)
    here = (mine == len(tokens) - 1).nonzero()
    if here.numel():
        last = logits[0, here.item()].float()
    torch.distributed.all_reduce(last, group=parallel_state.get_context_parallel_group())
    return last[:VOCAB_SIZE].cpu()

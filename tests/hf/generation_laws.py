"""Run on every rank: an imported model continues a text as transformers does."""

from pathlib import Path

import torch

from megatron_gdn.hf import load_hf_weights, read_hf_config
from megatron_gdn.inference.generate import generate
from tests.hf.megatron_models import build_megatron
from tests.hf.model_laws import hf_model
from tests.parallel import parallel


def continuations(folder: Path, kind: str, count: int = 20) -> tuple[list, list, float]:
    """Greedy tokens of both, and by how much theirs are the likeliest, at the closest."""
    config = read_hf_config(folder)
    torch.manual_seed(5)
    prompt = torch.randint(config.vocab_size, (2, 9))
    theirs_model = hf_model(folder)
    with torch.no_grad():
        theirs, out = prompt, theirs_model(prompt, use_cache=True)
        for _ in range(count):
            token = out.logits[:, -1:].argmax(-1)
            theirs = torch.cat([theirs, token], dim=1)
            out = theirs_model(token, past_key_values=out.past_key_values, use_cache=True)
        best = theirs_model(theirs, use_cache=False).logits[:, 8:-1].topk(2).values
    with parallel():
        model = build_megatron(config, kind)
        load_hf_weights(model, folder)
        ours = generate(
            model, prompt, count, pick=lambda logits: logits[:, : config.vocab_size].argmax(-1)
        )
    return ours.tolist(), theirs.tolist(), (best[..., 0] - best[..., 1]).min().item()

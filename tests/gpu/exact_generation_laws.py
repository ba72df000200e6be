"""Run on every rank: generation in batch-invariant mode has the bits of training, on
GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.custom_layers import batch_invariant_kernels as kernels
from torch import Tensor

from megatron_gdn.inference.generate import generate
from megatron_gdn.testing import GenerationGap, check_generation
from tests.distributed.layer_laws import thd
from tests.gpu.parallel_laws import DEVICE
from tests.parallel import hybrid_model, model_config, parallel

VOCABULARY = 64
TOKENS = 4096
SIZES = {
    "hidden_size": 256,
    "ffn_hidden_size": 512,
    "num_attention_heads": 4,
    "kv_channels": 64,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "mamba_num_heads": 8,
    "mamba_num_groups": 2,
    "mamba_head_dim": 64,
    "mamba_state_dim": 64,
}


def _model(pattern: str, tp: int) -> HybridModel:
    swiglu = {"gated_linear_unit": True, "add_bias_linear": False}
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "batch_invariant_mode": True}
    config = model_config(
        pattern, tensor_model_parallel_size=tp, **swiglu, **bf16, **SIZES
    )
    torch.manual_seed(3)
    lengths = {"vocab_size": VOCABULARY, "max_sequence_length": TOKENS}
    model = hybrid_model(config, pattern, position_embedding_type="rope", **lengths)
    return model.to(DEVICE).eval()


@contextmanager
def megatrons_kernels() -> Iterator[None]:
    """Megatron's batch-invariant mode, also without Transformer Engine.

    Megatron 0.19 replaces torch's products first. Then it imports Transformer Engine to
    replace those too, which raises where it is not installed, and leaves torch's
    replaced.
    """
    try:
        kernels.enable_batch_invariant_mode()
    except ModuleNotFoundError as error:
        if error.name != "transformer_engine":
            raise
    try:
        yield
    finally:
        kernels.disable_batch_invariant_mode()


def _drawn() -> Tensor:
    drawn = torch.Generator().manual_seed(1)
    return torch.randint(VOCABULARY, (1, TOKENS), generator=drawn).to(DEVICE)


def gaps(pattern: str, tp: int, steps: int) -> list[GenerationGap]:
    """Of 4,096 drawn and greedy tokens in steps of 97 and 1."""
    with parallel(tp=tp), megatrons_kernels():
        model = _model(pattern, tp)
        text = _drawn()
        greedy = generate(model, text[:, : TOKENS - steps], steps)
        cases = ((text, 61, 97), (text, TOKENS - steps, 1), (greedy, TOKENS - steps, 1))
        return [
            check_generation(model, x, prompt=n, at_once=count) for x, n, count in cases
        ]


@torch.no_grad()
def packing_changes_no_bit(pattern: str, tp: int) -> None:
    """Nor does a second row of the batch."""
    lengths = (1000, 37, 0, 2048, TOKENS - 3085)
    with parallel(tp=tp), megatrons_kernels():
        model = _model(pattern, tp)
        text = _drawn()

        def logits(tokens, positions, packed=None) -> Tensor:
            return model(
                tokens,
                positions,
                None,
                packed_seq_params=packed,
                runtime_gather_output=True,
            )

        positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]
        together = logits(text, positions, thd(lengths, DEVICE))
        for number, (n, end) in enumerate(
            zip(lengths, accumulate(lengths), strict=True)
        ):
            if n:
                piece = text[:, end - n : end]
                place = torch.arange(n, device=DEVICE)[None]
                alone = logits(piece, place)
                assert torch.equal(alone, together[:, end - n : end]), (
                    f"document {number}, packed"
                )
                rows = logits(torch.cat([piece, piece.flip(1)]), place.expand(2, -1))
                assert torch.equal(alone, rows[:1]), f"document {number}, in a row"

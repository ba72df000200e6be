"""Run on every rank: generation in batch-invariant mode has the bits of training, on GPUs."""

from __future__ import annotations

import torch
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.custom_layers.batch_invariant_kernels import (
    set_batch_invariant_mode,
)

from megatron_gdn.inference.generate import generate
from megatron_gdn.specs import hybrid_stack_spec
from megatron_gdn.testing import check_generation
from tests.distributed.layer_laws import thd
from tests.gpu.parallel_laws import DEVICE
from tests.parallel import make_config, parallel

VOCABULARY, TOKENS = 64, 4096
SIZES = {
    "hidden_size": 256, "ffn_hidden_size": 512, "num_attention_heads": 4, "kv_channels": 64,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "mamba_num_heads": 8, "mamba_num_groups": 2,
    "mamba_head_dim": 64, "mamba_state_dim": 64,
}  # fmt: skip


def _model(pattern: str, tp: int) -> HybridModel:
    config = make_config(
        num_layers=len(pattern),
        tensor_model_parallel_size=tp,
        params_dtype=torch.bfloat16,
        bf16=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gated_linear_unit=True,
        add_bias_linear=False,
        batch_invariant_mode=True,
        **SIZES,
    )
    torch.manual_seed(3)
    model = HybridModel(
        config,
        hybrid_stack_spec("local"),
        vocab_size=VOCABULARY,
        max_sequence_length=TOKENS,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
    )
    return model.to(DEVICE).eval()


def gaps(pattern: str, tp: int, steps: int) -> list:
    """Of 4,096 drawn tokens in steps of 97 and, the last ``steps``, of 1; then of greedy ones."""
    with parallel(tp=tp), set_batch_invariant_mode(True):
        model = _model(pattern, tp)
        drawn = torch.Generator().manual_seed(1)
        text = torch.randint(VOCABULARY, (1, TOKENS), generator=drawn).to(DEVICE)
        greedy = generate(model, text[:, : TOKENS - steps], steps)
        return [
            check_generation(model, text, prompt=61, at_once=97),
            check_generation(model, text, prompt=TOKENS - steps),
            check_generation(model, greedy, prompt=TOKENS - steps),
        ]


@torch.no_grad()
def packing_changes_no_bit(pattern: str, tp: int) -> None:
    """Nor does a second row of the batch."""
    lengths = (1000, 37, 0, 2048, TOKENS - 3085)
    with parallel(tp=tp), set_batch_invariant_mode(True):
        model = _model(pattern, tp)
        drawn = torch.Generator().manual_seed(1)
        text = torch.randint(VOCABULARY, (1, TOKENS), generator=drawn).to(DEVICE)

        def logits(tokens, positions, packed=None):
            return model(
                tokens, positions, None, packed_seq_params=packed, runtime_gather_output=True
            )

        positions = torch.cat([torch.arange(n, device=DEVICE) for n in lengths])[None]
        together = logits(text, positions, thd(lengths, DEVICE))
        pieces = zip(text.split(lengths, 1), together.split(lengths, 1), strict=True)
        for piece, packed in pieces:
            if piece.numel():
                rows = torch.cat([piece, piece.flip(1)])
                place = torch.arange(piece.shape[1], device=DEVICE).expand(2, -1)
                assert torch.equal(logits(piece, place[:1]), packed)
                assert torch.equal(logits(rows, place)[:1], packed)

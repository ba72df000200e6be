"""What the pages' launches do inside a rank: they go through Megatron's own parser."""

import contextlib
import io
import os
import sys
from unittest.mock import patch

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection

from megatron_gdn.context_parallel import local_indices
from tests.distributed.layer_laws import thd
from tests.parallel import parallel

LENGTHS = (16, 48)
# Given after the page's flags, of which the last one counts.
SMALL = """
    --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --kv-channels 16
    --linear-num-key-heads 2 --linear-key-head-dim 16 --linear-num-value-heads 4
    --linear-value-head-dim 16 --seq-length 64 --max-position-embeddings 64 --vocab-size 256
    --tensor-model-parallel-size 1
"""
WITHOUT_GPU = """
    --transformer-impl local --no-rope-fusion --use-cpu-initialization
    --no-gradient-accumulation-fusion
"""


def launch(script: str, flags: list[str]) -> tuple[list[str], float, int]:
    """One packed step over two context-parallel ranks: mixers, loss, absent gradients."""
    from megatron.training import argument_utils, arguments

    config_of = {
        "pretrain_hybrid.py": argument_utils.hybrid_config_from_args,
        "pretrain_gpt.py": argument_utils.gpt_config_from_args,
    }[script]
    with contextlib.redirect_stdout(io.StringIO()), parallel(cp=2):
        with patch.object(sys, "argv", [script, *flags, *SMALL.split(), *WITHOUT_GPU.split()]):
            args = arguments.parse_args()
        # What the launch sets, and what the GPUs it is for would answer.
        with (
            patch.dict(os.environ, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}),
            patch.object(arguments, "get_device_arch_version", lambda: 9),
        ):
            arguments.validate_args(args)
        config = config_of(args)
        assert config.transformer.context_parallel_size == 2
        model = config.get_builder_cls()(config).build_model(
            ProcessGroupCollection.use_mpu_process_groups()
        )
        torch.manual_seed(11)
        tokens = torch.randint(0, 256, (1, sum(LENGTHS) + 1))
        held = local_indices(LENGTHS, 2, parallel_state.get_context_parallel_rank())
        losses = model(
            tokens[:, :-1][:, held],
            held[None],
            None,
            labels=tokens[:, 1:][:, held],
            packed_seq_params=thd(LENGTHS),
        )
        losses.float().sum().backward()
        mixers = [
            type(layer.self_attention).__name__
            for layer in model.decoder.layers
            if hasattr(layer, "self_attention")
        ]
        missing = sum(p.grad is None or not p.grad.isfinite().all() for p in model.parameters())
        return mixers, losses.float().mean().item(), missing

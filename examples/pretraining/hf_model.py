"""A run of the model that a Hugging Face ``config.json`` describes, from its weights or
from none.

    python -m megatron_gdn.hf import HF_FOLDER IMPORTED
    python examples/pretrain_hybrid.py --hf-config HF_FOLDER --pretrained-checkpoint IMPORTED
    python -m megatron_gdn.hf export OUTPUT_DIR/checkpoints NEW_FOLDER --like HF_FOLDER

The text is bytes as tokens 0 to 256, and no tokenizer is read. So this shows the way
from and to Hugging Face; it is a finetuning only for a model of bytes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from pretraining.corpus import VOCAB_SIZE
from pretraining.settings import flag


def take_sizes(args: argparse.Namespace, named: set[str]) -> None:
    """Fill in the model's sizes from ``--hf-config``.

    Args:
        args: the settings, changed in place.
        named: settings on the command line; one that contradicts the sizes is refused.

    Raises:
        ValueError: such a flag, or a vocabulary without room for bytes.
        FileNotFoundError: no ``config.json``.
    """
    from megatron_gdn.hf import read_hf_config

    hf = read_hf_config(args.hf_config)
    if hf.vocab_size < VOCAB_SIZE:
        raise ValueError(
            f"--hf-config {args.hf_config} has a vocabulary of {hf.vocab_size} tokens; "
            f"this example's text needs {VOCAB_SIZE}, a byte each and the end of a "
            "document."
        )
    args.vocab_size = hf.vocab_size
    names = (
        "hidden_size",
        "ffn_hidden_size",
        "num_attention_heads",
        *hf.gdn.config_fields,
    )
    sizes: dict[str, Any] = {name: getattr(hf.sizes, name) for name in names}
    pattern = args.hybrid_layer_pattern
    if pattern.replace("|", "") != hf.hybrid_layer_pattern:
        # One with '|' in it cuts the model's own into pipeline stages.
        sizes["hybrid_layer_pattern"] = hf.hybrid_layer_pattern
    for name, size in sizes.items():
        if name in named and getattr(args, name) != size:
            raise ValueError(
                f"{flag(name)} {getattr(args, name)} is not the {size} of --hf-config "
                f"{args.hf_config}; leave it out."
            )
        setattr(args, name, size)


def build(args: argparse.Namespace) -> tuple[Any, Any]:
    """This rank's part of the HybridModel, with random weights, and its config."""
    from megatron_gdn.hf import build_model

    return build_model(
        args.hf_config,
        modules="te" if args.transformer_impl == "transformer_engine" else "local",
        dtype=torch.bfloat16 if args.bf16 else torch.float32,
        max_sequence_length=args.seq_length,
        layer_pattern=args.hybrid_layer_pattern,
        sequence_parallel=args.sequence_parallel,
        calculate_per_token_loss=True,
        deterministic_mode=args.deterministic,
    )


def load_pretrained(folder: str | Path, training: Any) -> None:
    """Fill the model with a checkpoint's weights; optimizer, schedule and data start
    afresh."""
    from megatron.core import dist_checkpointing
    from megatron.core.utils import unwrap_model

    from megatron_gdn.compat.untrusted_checkpoints import untrusted_checkpoint
    from megatron_gdn.hf.folders import find_checkpoint

    [model] = unwrap_model([training.model])
    wanted = {"model": model.sharded_state_dict()}
    with untrusted_checkpoint():
        state: Any = dist_checkpointing.load(wanted, str(find_checkpoint(folder)))
    model.load_state_dict(state["model"])
    # The optimizer holds fp32 copies of what was there before.
    training.optimizer.reload_model_params()

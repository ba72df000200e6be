"""Refuses a micro-batch that no memory holds, before anything is made."""

from __future__ import annotations

import argparse
import os

import torch

from pretraining.corpus import VOCAB_SIZE


def require_room(args: argparse.Namespace) -> None:
    """Refuse a micro-batch whose activations cannot fit into a rank's memory.

    The least that a rank keeps: the logits in fp32, and one row of the hidden size for
    each layer,

        tokens / cp * (4 V / tp + bytes * D * layers / (pp * tp if sequence parallel else pp))

    bytes. A real step takes several times that.

    Raises:
        ValueError: it is more than the memory of the device.
    """
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    rows = (
        args.hidden_size
        * args.num_layers
        / (pp * (tp if args.sequence_parallel else 1))
    )
    per_token = 4 * VOCAB_SIZE / tp + (2 if args.bf16 else 4) * rows
    tokens = args.micro_batch_size * args.seq_length
    least = tokens / args.context_parallel_size * per_token
    room = memory_of_a_rank()
    if least > room:
        raise ValueError(
            f"--seq-length {args.seq_length} with --micro-batch-size "
            f"{args.micro_batch_size} needs more than {least / 1e9:,.0f} GB for the "
            f"activations of each rank, which has {room / 1e9:,.0f} GB; make one of "
            f"the two at least {least / room:,.0f} times smaller."
        )


def memory_of_a_rank() -> float:
    """Bytes of the rank's GPU, or of its share of the machine."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    import psutil

    return psutil.virtual_memory().total / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

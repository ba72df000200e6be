"""Command line of `pretrain_hybrid.py`; flags that Megatron has keep Megatron's names."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path

import torch

from megatron_gdn.hf.checkpoint_files import find_checkpoint
from pretraining import places, settings
from pretraining.failures import rank, refuse
from pretraining.hf_model import take_sizes

LAYER_SYMBOLS = "G-*ME"


class _Parser(argparse.ArgumentParser):
    """Speaks on rank 0 only: every rank has the same command line."""

    def error(self, message: str):
        refuse(message, code=2, usage=self.format_usage())

    def print_help(self, file=None) -> None:
        if rank() == 0:
            super().print_help(file)


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The run's settings, complete: command line, then the checkpoint's, then defaults.

    Beside the flags it holds ``start``, the checkpoint's folder to continue from (or None), and
    ``settings_json``, what a checkpoint keeps of the settings.
    """
    parser = _parser()
    args = parser.parse_args(argv)
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    try:
        places.settle(
            args,
            given=_given(argv),
            shaping=set(_names(parser, "model")) - {"transformer_impl"},
        )
        _complete(args)
    except (OSError, ValueError) as error:
        refuse(str(error), code=2)
    names = [name for name in _names(parser) if name not in places.FLAGS]
    args.settings_json = settings.to_json(args, names)
    return args


def _names(parser: argparse.ArgumentParser, group: str | None = None) -> list[str]:
    """Names of the flags' values, of one group or of all."""
    groups = [g for g in parser._action_groups if group in (None, g.title)]
    return [a.dest for g in groups for a in g._group_actions if a.dest != "help"]


def _given(argv: list[str] | None) -> set[str]:
    """Names of the flags that stand on the command line."""
    bare = _parser()
    for action in bare._actions:
        action.default = argparse.SUPPRESS
    return set(vars(bare.parse_args(argv)))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_hybrid.py",
        usage="torchrun --nproc_per_node=N examples/%(prog)s [flags]     (--help lists them)",
        description="Pretrain a small Megatron HybridModel with Gated DeltaNet layers on text, "
        "byte by byte. On a machine without a GPU it runs on the CPU (gloo, fp32).",
        epilog="torchrun --nproc_per_node=2 examples/pretrain_hybrid.py",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    group = parser.add_argument_group("parallelism (number of ranks)")
    group.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--pipeline-model-parallel-size", type=int, default=1, metavar="N")
    group.add_argument("--context-parallel-size", type=int, default=2, metavar="N")
    group.add_argument(
        "--sequence-parallel", action="store_true", help="shard activations over tensor ranks"
    )
    group.add_argument(
        "--use-distributed-optimizer",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="shard optimizer state over data-parallel ranks; unset: on with --bf16",
    )

    group = parser.add_argument_group("model")
    group.add_argument(
        "--hf-config",
        type=Path,
        metavar="FOLDER",
        help="Hugging Face folder whose config.json gives every size of the model",
    )
    group.add_argument(
        "--hybrid-layer-pattern",
        default="G-G-G-*-",
        metavar="SYMBOLS",
        help="one symbol per layer: G Gated DeltaNet, M Mamba2, - MLP, * attention; | cuts "
        "pipeline stages",
    )
    group.add_argument("--hidden-size", type=int, default=128, help="channels")
    group.add_argument("--ffn-hidden-size", type=int, help="channels; unset: 3 x hidden size")
    group.add_argument("--num-attention-heads", type=int, default=4, help="heads of '*' layers")
    group.add_argument("--linear-num-key-heads", type=int, default=2, help="query and key heads")
    group.add_argument("--linear-num-value-heads", type=int, default=4, help="value heads")
    group.add_argument("--linear-key-head-dim", type=int, default=32, help="channels per key head")
    group.add_argument(
        "--linear-value-head-dim", type=int, default=32, help="channels per value head"
    )
    group.add_argument("--linear-conv-kernel-dim", type=int, default=4, help="tokens")
    group.add_argument("--mamba-num-heads", type=int, default=8, help="heads of 'M' layers")
    group.add_argument("--mamba-head-dim", type=int, default=32, help="channels per such head")
    group.add_argument("--mamba-state-dim", type=int, default=32, help="rows of its state")
    group.add_argument("--mamba-num-groups", type=int, default=2, help="groups that share B and C")
    group.add_argument(
        "--transformer-impl",
        choices=("auto", "local", "transformer_engine"),
        default="auto",
        help="modules around the Gated DeltaNet rule",
    )

    group = parser.add_argument_group("data")
    group.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help="text files or folders; unset: the Python standard library's own source",
    )
    group.add_argument("--seq-length", type=int, default=256, help="tokens of a sequence, at most")
    group.add_argument(
        "--micro-batch-size",
        type=int,
        default=8,
        help="sequences per forward pass; with packing, its buffer holds this x seq-length tokens",
    )
    group.add_argument(
        "--global-batch-size", type=int, help="sequences per step; unset: one micro-batch per rank"
    )
    group.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="every document a sequence of its own in a packed buffer, or dense [s, b] rows",
    )
    group.add_argument(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="visit sequences in a seeded order, a new one every epoch; off: as they stand",
    )

    group = parser.add_argument_group("training")
    group.add_argument("--train-iters", type=int, default=240, help="optimizer steps in all")
    group.add_argument("--lr", type=float, default=6e-3, help="peak learning rate")
    group.add_argument("--min-lr", type=float, help="final learning rate; unset: lr / 10")
    group.add_argument("--lr-warmup-iters", type=int, help="steps; unset: a tenth of train-iters")
    group.add_argument("--weight-decay", type=float, default=0.1)
    group.add_argument("--clip-grad", type=float, default=1.0, help="gradient norm; 0: off")
    group.add_argument("--seed", type=int, default=1234)
    group.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="bf16 compute; unset: on with a GPU, off without",
    )
    group.add_argument(
        "--deterministic", action="store_true", help="bitwise repeatable, also on a GPU"
    )

    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-dir",
        type=Path,
        help="base of the below; unset: runs/pretrain_hybrid, or where that holds a run -2, -3, "
        "...; with --resume the last of these",
    )
    group.add_argument("--save", type=Path, help="checkpoints; unset: OUTPUT_DIR/checkpoints")
    group.add_argument("--save-interval", type=int, default=50, help="steps; 0: only at the end")
    group.add_argument("--load", type=Path, help="continue in a new folder from these checkpoints")
    group.add_argument(
        "--pretrained-checkpoint",
        type=Path,
        metavar="FOLDER",
        help="folder of checkpoints whose weights a new run starts from; --load comes before it",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --output-dir, with the settings of its checkpoint where the "
        "command line has none",
    )
    group.add_argument("--ckpt-step", type=int, help="step to load; unset: the latest")
    group.add_argument("--tensorboard-dir", type=Path, help="unset: OUTPUT_DIR/tensorboard")
    group.add_argument("--sample-tokens", type=int, default=120, help="bytes to write at the end")
    group.add_argument("--sample-prompt", default="def ", help="text the sample starts from")
    group.add_argument(
        "--sample-temperature", type=float, default=0.7, help="0: always the likeliest byte"
    )
    return parser


def _complete(args: argparse.Namespace) -> None:
    """Fill in defaults that depend on others, and refuse what cannot work with the way out."""
    _require_positive(args)
    if args.hf_config:
        take_sizes(args, _parser())
    if args.pretrained_checkpoint and not args.load:
        find_checkpoint(args.pretrained_checkpoint)
    _complete_model(args)
    _complete_parallelism(args)
    _complete_data(args)
    _complete_precision(args)
    if args.min_lr is None:
        args.min_lr = args.lr / 10
    if args.min_lr > args.lr:
        raise ValueError(
            f"--min-lr {args.min_lr} is above --lr {args.lr}; give a smaller one beside --lr."
        )
    if args.lr_warmup_iters is None:
        args.lr_warmup_iters = args.train_iters // 10
    if args.lr_warmup_iters >= args.train_iters:
        raise ValueError(
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves no step of --train-iters "
            f"{args.train_iters} at full learning rate; make it smaller."
        )


def _require_positive(args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        is_size = name.endswith(
            ("_size", "_iters", "_heads", "_groups", "_dim", "_length", "_interval")
        )
        least = 0 if name in ("lr_warmup_iters", "save_interval") else 1
        if is_size and value is not None and value < least:
            raise ValueError(
                f"--{name.replace('_', '-')} {value} is not a size; it must be at least {least}."
            )


def _complete_model(args: argparse.Namespace) -> None:
    unknown = sorted(set(args.hybrid_layer_pattern) - set(LAYER_SYMBOLS) - {"|"})
    if unknown or not args.hybrid_layer_pattern.strip("|"):
        raise ValueError(
            f"--hybrid-layer-pattern {args.hybrid_layer_pattern!r}: unknown symbols "
            f"{''.join(unknown)!r}; use G (Gated DeltaNet), - (MLP), * (attention), M (Mamba2), "
            "E (experts), and | between pipeline stages."
        )
    args.num_layers = len(args.hybrid_layer_pattern.replace("|", ""))
    args.ffn_hidden_size = args.ffn_hidden_size or 3 * args.hidden_size
    if not args.hf_config and args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not a multiple of --num-attention-heads "
            f"{args.num_attention_heads}."
        )


def _complete_parallelism(args: argparse.Namespace) -> None:
    tp, pp, cp = (
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        args.context_parallel_size,
    )
    if args.world_size % (tp * pp * cp):
        raise ValueError(
            f"{args.world_size} processes cannot form groups of tensor x pipeline x context = "
            f"{tp} x {pp} x {cp} = {tp * pp * cp} ranks. Launch "
            f"`torchrun --nproc_per_node={tp * pp * cp} ...`, or choose smaller "
            "--tensor-model-parallel-size, --pipeline-model-parallel-size, "
            "--context-parallel-size."
        )
    if args.sequence_parallel and tp == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size of at least 2.")
    args.data_parallel_size = args.world_size // (tp * pp * cp)


def _complete_precision(args: argparse.Namespace) -> None:
    if args.bf16 is None:
        args.bf16 = torch.cuda.is_available()
    if args.use_distributed_optimizer is None:
        args.use_distributed_optimizer = args.bf16


def _complete_data(args: argparse.Namespace) -> None:
    # A context-parallel rank holds two chunks of every sequence, and sequence parallelism cuts
    # what it holds once more.
    cp = args.context_parallel_size
    args.pad_multiple = 2 * cp if cp > 1 else 1
    multiple = args.pad_multiple
    if args.sequence_parallel:
        multiple = math.lcm(multiple, cp * args.tensor_model_parallel_size)
    if args.seq_length % multiple:
        raise ValueError(
            f"--seq-length {args.seq_length} must be a multiple of {multiple} with "
            f"context_parallel_size={cp}; use {-(-args.seq_length // multiple) * multiple}."
        )
    per_step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = per_step
    if args.global_batch_size % per_step:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of "
            f"micro-batch-size x data-parallel-size = {args.micro_batch_size} x "
            f"{args.data_parallel_size}; use {-(-args.global_batch_size // per_step) * per_step}."
        )
    args.num_micro_batches = args.global_batch_size // per_step

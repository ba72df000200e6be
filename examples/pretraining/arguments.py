"""The run's settings: flags, those of a checkpoint, defaults; what cannot work is
refused."""

from __future__ import annotations

import argparse
import math
import os

import torch

from megatron_gdn.hf.folders import find_checkpoint
from pretraining import places, settings
from pretraining.corpus import VOCAB_SIZE
from pretraining.failures import refuse
from pretraining.flags import LR, PRETRAINED_LR, make_parser, with_flags
from pretraining.hf_model import take_sizes
from pretraining.launch import NPROC
from pretraining.memory import require_room

LAYER_SYMBOLS = "G-*MEK"
_MOST_MINUTES = 100_000  # for one collective; torch counts them in milliseconds
# How the names of flags end that count something.
_SIZES = [
    "size",
    "iters",
    "heads",
    "groups",
    "dim",
    "length",
    "interval",
    "tokens",
    "node",
]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """The run's settings, complete: command line, then the checkpoint's, then defaults.

    Added to the flags: ``start``, the checkpoint's folder to continue from (or None),
    ``vocab_size`` without padding, and ``settings_json``, the settings that a
    checkpoint keeps.
    """
    parser = make_parser()
    args = parser.parse_args(argv)
    args.world_size = int(os.environ.get("WORLD_SIZE", "1"))
    given = _given(argv)
    try:
        places.settle(
            args,
            given=given,
            shaping=set(_names(parser, "model")) - {"transformer_impl"},
        )
        _complete(args, given)
    except (OSError, ValueError) as error:
        refuse(with_flags(str(error)), code=2)
    names = [
        name for name in _names(parser) if name not in (*places.FLAGS, "nproc_per_node")
    ]
    args.settings_json = settings.to_json(args, names)
    return args


def _names(parser: argparse.ArgumentParser, group: str | None = None) -> list[str]:
    """Names of the flags' values, of one group or of all."""
    groups = [g for g in parser._action_groups if group in (None, g.title)]
    return [a.dest for g in groups for a in g._group_actions if a.dest != "help"]


def _given(argv: list[str] | None) -> set[str]:
    """Names of the flags that stand on the command line."""
    bare = make_parser()
    for action in bare._actions:
        action.default = argparse.SUPPRESS
    return set(vars(bare.parse_args(argv)))


def _complete(args: argparse.Namespace, given: set[str]) -> None:
    """Fill in defaults that depend on others, and refuse what cannot work with the way
    out."""
    _require_sizes(args)
    args.vocab_size = VOCAB_SIZE
    if args.hf_config:
        take_sizes(args, given)
    if args.pretrained_checkpoint and not args.load:
        find_checkpoint(args.pretrained_checkpoint)
    _complete_model(args, given)
    _complete_parallelism(args)
    _complete_data(args)
    _complete_precision(args)
    _complete_schedule(args)
    require_room(args)


def _require_sizes(args: argparse.Namespace) -> None:
    for name, value in vars(args).items():
        is_size = name.rpartition("_")[2] in _SIZES
        least = (
            0 if name in ("lr_warmup_iters", "save_interval", "sample_tokens") else 1
        )
        if is_size and value is not None and value < least:
            raise ValueError(
                f"{settings.flag(name)} {value} is not a size; use {least} or more."
            )
        if isinstance(value, float) and not 0 <= value < math.inf:
            raise ValueError(
                f"{settings.flag(name)} {value}: use a number of 0 or more."
            )


def _complete_schedule(args: argparse.Namespace) -> None:
    args.lr_note = ""
    if args.lr is None and args.pretrained_checkpoint and not args.start:
        args.lr = PRETRAINED_LR
        args.lr_note = (
            f" (the default with --pretrained-checkpoint; a new run's is {LR:g})"
        )
    elif args.lr is None:
        args.lr = LR
    if args.min_lr is None:
        args.min_lr = args.lr / 10
    if args.min_lr > args.lr:
        raise ValueError(
            f"--min-lr {args.min_lr} is above --lr {args.lr}; give a smaller one "
            "beside --lr."
        )
    if args.lr_warmup_iters is None:
        args.lr_warmup_iters = args.train_iters // 10
    if args.lr_warmup_iters >= args.train_iters:
        raise ValueError(
            f"--lr-warmup-iters {args.lr_warmup_iters} leaves no step of --train-iters "
            f"{args.train_iters} at full learning rate; make it smaller."
        )


def _complete_model(args: argparse.Namespace, given: set[str]) -> None:
    legal = set(LAYER_SYMBOLS) | {"|"}
    if args.hf_config:
        legal.add("+")  # latent attention, whose sizes only a config.json has
    unknown = sorted(set(args.hybrid_layer_pattern) - legal)
    if unknown or not args.hybrid_layer_pattern.strip("|"):
        raise ValueError(
            f"--hybrid-layer-pattern {args.hybrid_layer_pattern!r}: unknown symbols "
            f"{''.join(unknown)!r}; use G (Gated DeltaNet), - (MLP), * (attention), M "
            "(Mamba2), K (Kimi Delta Attention), E (experts), and | between pipeline "
            "stages."
        )
    for prefix, symbols in (("linear_", "GK"), ("mamba_", "M")):
        unread = sorted(name for name in given if name.startswith(prefix))
        if unread and not set(symbols) & set(args.hybrid_layer_pattern):
            raise ValueError(
                f"{settings.flag(unread[0])} is of {' and '.join(symbols)} layers, and "
                f"the pattern {args.hybrid_layer_pattern} has none; leave it out."
            )
    args.num_layers = len(args.hybrid_layer_pattern.replace("|", ""))
    args.ffn_hidden_size = args.ffn_hidden_size or 3 * args.hidden_size
    if not args.hf_config and args.hidden_size % args.num_attention_heads:
        raise ValueError(
            f"--hidden-size {args.hidden_size} is not a multiple of "
            f"--num-attention-heads {args.num_attention_heads}."
        )


def _complete_parallelism(args: argparse.Namespace) -> None:
    started = int(os.environ.get("LOCAL_WORLD_SIZE") or args.world_size)
    if args.nproc_per_node not in (None, started):
        raise ValueError(
            f"{NPROC} {args.nproc_per_node} beside torchrun, which has started "
            f"{started} processes on this machine; leave out one of the two."
        )
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if args.context_parallel_size is None:
        args.context_parallel_size = 1 if args.world_size % (tp * pp * 2) else 2
    cp = args.context_parallel_size
    if args.world_size % (tp * pp * cp):
        processes = (
            "1 process" if args.world_size == 1 else f"{args.world_size} processes"
        )
        raise ValueError(
            f"{processes} cannot form groups of tensor x pipeline x context = {tp} x "
            f"{pp} x {cp} = {tp * pp * cp} ranks. Use {NPROC} {tp * pp * cp}, or "
            "smaller --tensor-model-parallel-size, --pipeline-model-parallel-size, "
            "--context-parallel-size."
        )
    if args.sequence_parallel and tp == 1:
        raise ValueError(
            "--sequence-parallel needs --tensor-model-parallel-size of at least 2; use "
            "that, or --no-sequence-parallel where it comes from a checkpoint."
        )
    args.data_parallel_size = args.world_size // (tp * pp * cp)
    minutes = args.distributed_timeout_minutes
    if not 0 < minutes <= _MOST_MINUTES:
        raise ValueError(
            f"--distributed-timeout-minutes {minutes:g}: use a number above 0 and at "
            f"most {_MOST_MINUTES}."
        )


def _complete_precision(args: argparse.Namespace) -> None:
    if args.bf16 is None:
        args.bf16 = torch.cuda.is_available()
    if args.use_distributed_optimizer is None:
        args.use_distributed_optimizer = args.bf16


def _complete_data(args: argparse.Namespace) -> None:
    # A context-parallel rank holds two chunks of every sequence, and sequence
    # parallelism cuts what it holds once more.
    cp = args.context_parallel_size
    args.pad_multiple = 2 * cp if cp > 1 else 1
    multiple = args.pad_multiple
    if args.sequence_parallel:
        multiple = math.lcm(multiple, cp * args.tensor_model_parallel_size)
    if args.seq_length % multiple:
        raise ValueError(
            f"--seq-length {args.seq_length} must be a multiple of {multiple} with "
            f"--context-parallel-size {cp}; use "
            f"{-(-args.seq_length // multiple) * multiple}."
        )
    per_step = args.micro_batch_size * args.data_parallel_size
    if args.global_batch_size is None:
        args.global_batch_size = per_step
    if args.global_batch_size % per_step:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} must be a multiple of "
            f"--micro-batch-size x data-parallel ranks = {args.micro_batch_size} x "
            f"{args.data_parallel_size}; use "
            f"{-(-args.global_batch_size // per_step) * per_step}."
        )
    args.num_micro_batches = args.global_batch_size // per_step

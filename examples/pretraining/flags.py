"""The flags of `pretrain_hybrid.py`; those that Megatron has keep Megatron's names."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

from pretraining import settings
from pretraining.failures import rank, refuse
from pretraining.launch import NPROC

LR = 6e-3
# Weights that are trained already are near a minimum, which the rate of a new run
# leaves at once.
PRETRAINED_LR = 1e-5


class _Parser(argparse.ArgumentParser):
    """Speaks on rank 0 only: every rank has the same command line."""

    def error(self, message: str):
        refuse(f"{message} (--help lists the flags)", code=2)

    def print_help(self, file=None) -> None:
        if rank() == 0:
            super().print_help(file)


class _Defaults(argparse.ArgumentDefaultsHelpFormatter):
    """Leaves out a default of None: the flag's own help says the value when unset."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return (
            action.help if action.default is None else super()._get_help_string(action)
        )


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="pretrain_hybrid.py",
        usage="python examples/%(prog)s [--nproc-per-node N] [flags]",
        description="Pretrain a small Megatron HybridModel with Gated DeltaNet layers on text, "
        "byte by byte. On a machine without a GPU it runs on the CPU (gloo, fp32).",
        epilog="On several machines: torchrun ... examples/pretrain_hybrid.py [flags]",
        formatter_class=_Defaults,
        allow_abbrev=False,
    )
    group = parser.add_argument_group("parallelism (number of ranks)")
    group.add_argument(
        NPROC,
        type=int,
        metavar="N",
        help="processes to start on this machine; unset: 1",
    )
    for dimension, cut in (("tensor", "weights"), ("pipeline", "layers")):
        group.add_argument(
            f"--{dimension}-model-parallel-size",
            type=int,
            default=1,
            metavar="N",
            help=f"ranks that share the {cut}",
        )
    group.add_argument(
        "--context-parallel-size",
        type=int,
        metavar="N",
        help="ranks that share the tokens of a sequence; unset: 2, or 1 where the number of "
        "processes does not allow 2",
    )
    group.add_argument(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="shard activations over tensor ranks",
    )
    group.add_argument(
        "--use-distributed-optimizer",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="shard optimizer state over data-parallel ranks; unset: on with --bf16",
    )
    group.add_argument(
        "--distributed-timeout-minutes",
        type=float,
        default=10,
        metavar="N",
        help="how long a rank waits for another one before the run fails",
    )

    group = parser.add_argument_group("model")
    group.add_argument(
        "--hf-config",
        type=Path,
        metavar="FOLDER",
        help="Hugging Face folder whose config.json gives every size of the model; unset: the "
        "sizes below",
    )
    group.add_argument(
        "--hybrid-layer-pattern",
        default="G-G-G-*-",
        metavar="SYMBOLS",
        help="one symbol per layer: G Gated DeltaNet, K Kimi Delta Attention, M Mamba2, - MLP, "
        "* attention; | cuts pipeline stages",
    )
    group.add_argument("--hidden-size", type=int, default=128, help="channels")
    group.add_argument(
        "--ffn-hidden-size", type=int, help="channels; unset: 3 x hidden size"
    )
    group.add_argument(
        "--num-attention-heads", type=int, default=4, help="heads of '*' layers"
    )
    group.add_argument(
        "--linear-num-key-heads", type=int, default=2, help="query and key heads"
    )
    group.add_argument(
        "--linear-num-value-heads", type=int, default=4, help="value heads"
    )
    group.add_argument(
        "--linear-key-head-dim", type=int, default=32, help="channels per key head"
    )
    group.add_argument(
        "--linear-value-head-dim", type=int, default=32, help="channels per value head"
    )
    group.add_argument("--linear-conv-kernel-dim", type=int, default=4, help="tokens")
    group.add_argument(
        "--mamba-num-heads", type=int, default=8, help="heads of 'M' layers"
    )
    group.add_argument(
        "--mamba-head-dim", type=int, default=32, help="channels per such head"
    )
    group.add_argument(
        "--mamba-state-dim", type=int, default=32, help="rows of its state"
    )
    group.add_argument(
        "--mamba-num-groups", type=int, default=2, help="groups that share B and C"
    )
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
    group.add_argument(
        "--seq-length", type=int, default=256, help="tokens of a sequence, at most"
    )
    group.add_argument(
        "--micro-batch-size",
        type=int,
        default=8,
        help=(
            "sequences per forward pass; with packing, its buffer holds this x "
            "seq-length tokens"
        ),
    )
    group.add_argument(
        "--global-batch-size",
        type=int,
        help="sequences per step; unset: one micro-batch per rank",
    )
    group.add_argument(
        "--packing",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=(
            "every document a sequence of its own in a packed buffer, or dense [s, "
            "b] rows"
        ),
    )
    group.add_argument(
        "--shuffle",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=(
            "visit sequences in a seeded order, a new one every epoch; off: as they "
            "stand"
        ),
    )

    group = parser.add_argument_group("training")
    group.add_argument(
        "--train-iters", type=int, default=240, help="optimizer steps in all"
    )
    group.add_argument(
        "--lr",
        type=float,
        help=f"peak learning rate; unset: {LR:g}, or {PRETRAINED_LR:g} with "
        "--pretrained-checkpoint",
    )
    group.add_argument(
        "--min-lr", type=float, help="final learning rate; unset: lr / 10"
    )
    group.add_argument(
        "--lr-warmup-iters", type=int, help="steps; unset: a tenth of train-iters"
    )
    group.add_argument(
        "--weight-decay", type=float, default=0.1, help="AdamW's, times lr"
    )
    group.add_argument(
        "--clip-grad", type=float, default=1.0, help="gradient norm; 0: off"
    )
    group.add_argument(
        "--seed", type=int, default=1234, help="of weights and data order"
    )
    group.add_argument(
        "--bf16",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="bf16 compute; unset: on with a GPU, off without",
    )
    group.add_argument(
        "--deterministic",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="bitwise repeatable, also on a GPU",
    )

    group = parser.add_argument_group("output")
    group.add_argument(
        "--output-dir",
        type=Path,
        help="base of the below; unset: runs/pretrain_hybrid, or where that holds a run -2, -3, "
        "...; with --resume the last of these",
    )
    group.add_argument(
        "--save", type=Path, help="checkpoints; unset: OUTPUT_DIR/checkpoints"
    )
    group.add_argument(
        "--save-interval", type=int, default=50, help="steps; 0: only at the end"
    )
    group.add_argument(
        "--load",
        type=Path,
        help="continue in a new folder from these checkpoints; unset: a new run",
    )
    group.add_argument(
        "--pretrained-checkpoint",
        type=Path,
        metavar="FOLDER",
        help="folder of checkpoints whose weights a new run starts from; --load comes before it; "
        "unset: random weights",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in --output-dir, with the settings of its checkpoint where the "
        "command line has none",
    )
    group.add_argument("--ckpt-step", type=int, help="step to load; unset: the latest")
    group.add_argument(
        "--tensorboard-dir", type=Path, help="unset: OUTPUT_DIR/tensorboard"
    )
    group.add_argument(
        "--sample-tokens", type=int, default=120, help="bytes to write at the end"
    )
    group.add_argument(
        "--sample-prompt", default="def ", help="text the sample starts from"
    )
    group.add_argument(
        "--sample-temperature",
        type=float,
        default=0.7,
        help="0: always the likeliest byte",
    )
    return parser


def with_flags(message: str) -> str:
    """``message``, with flags of this program in place of fields of Megatron's
    config."""
    names = [a.dest for a in make_parser()._actions if "_" in a.dest]
    return re.sub(
        rf"(?<![\w./-])({'|'.join(names)})\b",
        lambda name: settings.flag(name[0]),
        message,
    )

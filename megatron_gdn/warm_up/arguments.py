"""The command line of ``python -m megatron_gdn.warm_up``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

KERNELS = ("flash_qla", "triton", "fla")
PARTS = ("cut", "rows", "uncut", "states")  # as in flash_qla.py, which needs torch
_DESCRIPTION = """\
Compile ahead of a run the kernels that its Gated DeltaNet layers need, for Hopper GPUs, in parallel
processes. No GPU is needed. What lies in the caches already is left alone: a second run takes
seconds.

    python -m megatron_gdn.warm_up --config config.json --tp 2 --cp 2
    python -m megatron_gdn.warm_up --heads 16:32
    python -m megatron_gdn.warm_up --heads 16:32 8:16 --operands bf16 --parts cut states
"""
_EPILOG = """\
Kernels go to TILELANG_CACHE_DIR (or ~/.tilelang/cache) and TRITON_CACHE_DIR (or ~/.triton/cache).
The run must see the same folders and have the same versions of the packages.
"""
# Of a group: its title, then flags with what argparse takes.
_FLAGS: dict[str, dict[str, dict]] = {
    "the model (--config or --heads)": {
        "--config": {
            "metavar": "FILE",
            "help": "config.json or a Hugging Face folder; or a launch script or YAML that names "
            "Megatron's linear_* arguments, and parallel sizes if it has them",
        },
        "--heads": {
            "nargs": "+",
            "metavar": "KEY:VALUE",
            "help": "heads of the whole layer, as 16:32",
        },
        "--head-dim": {"type": int, "metavar": "N", "help": "of keys and values (128)"},
        "--conv": {"type": int, "metavar": "N", "help": "taps of the convolution (4)"},
    },
    "the run": {
        "--tp": {"type": int, "metavar": "N", "help": "tensor parallel ranks (1)"},
        "--cp": {"type": int, "metavar": "N", "help": "context parallel ranks (1)"},
        "--linear-cp-mode": {
            "choices": ("auto", "headwise", "chunkwise"),
            "default": "auto",
            "help": "how context parallelism works; auto may do both (auto)",
        },
        "--operands": {
            "nargs": "+",
            "choices": ("fp16", "bf16"),
            "default": ["fp16"],
            "help": "the layer's rule_operands; deterministic mode takes bf16 (fp16)",
        },
        "--kernels": {
            "nargs": "+",
            "choices": KERNELS,
            "default": ["flash_qla", "triton"],
            "help": "which to compile; fla's are tuned by running them, on a GPU "
            "(flash_qla triton)",
        },
        "--parts": {
            "nargs": "+",
            "choices": PARTS,
            "metavar": "PART",
            "help": "of FlashQLA: cut (long sequences), rows (a batch), uncut (short documents), "
            "states (chunkwise). All of them; without context parallelism all but states",
        },
    },
    "how": {
        "--processes": {
            "type": int,
            "metavar": "N",
            "help": "side by side, at most (one per core)",
        },
        "--multiprocessors": {
            "type": int,
            "metavar": "N",
            "help": "of the GPU; FlashQLA chooses among its kernels by them (132)",
        },
        "--dry-run": {"action": "store_true", "help": "say what is there and what is missing"},
        "--for-a-run": {"action": "store_true", "help": argparse.SUPPRESS},
        "--unless-first-part-is-there": {"action": "store_true", "help": argparse.SUPPRESS},
    },
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see --help)\n")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse and check the arguments; exits with status 2 and a message if they are not legal."""
    parser = _Parser(
        prog="python -m megatron_gdn.warm_up",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    for title, flags in _FLAGS.items():
        group = parser.add_argument_group(title)
        for flag, options in flags.items():
            group.add_argument(flag, **options)
    arguments = parser.parse_args(argv)
    if (arguments.config is None) == (arguments.heads is None):
        parser.error("give --config FILE or --heads KEY:VALUE, and not both")
    for flag in ("head_dim", "conv", "tp", "cp", "processes", "multiprocessors"):
        value = getattr(arguments, flag)
        if value is not None and value < 1:
            parser.error(f"--{flag.replace('_', '-')} {value} is not at least 1")
    try:
        arguments.heads = arguments.heads and [heads_of(text) for text in arguments.heads]
    except ValueError as error:
        parser.error(str(error))
    return arguments


def heads_of(text: str) -> tuple[int, int]:
    """``"16:32"`` -> ``(16, 32)``, key and value heads."""
    key, _, value = text.partition(":")
    if not (key.isdecimal() and value.isdecimal() and int(key) and int(value)):
        raise ValueError(f"--heads {text} is not KEY:VALUE, two numbers of heads such as 16:32")
    return int(key), int(value)

"""The command line of ``python -m megatron_gdn.warm_up``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

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
    model = parser.add_argument_group("the model").add_mutually_exclusive_group(required=True)
    model.add_argument(
        "--config", metavar="FILE",
        help="config.json or a Hugging Face folder; or a launch script or YAML that names "
        "Megatron's linear_* arguments, and parallel sizes if it has them",
    )  # fmt: skip
    model.add_argument(
        "--heads", nargs="+", type=_heads, metavar="KEY:VALUE",
        help="heads of the whole layer, as 16:32",
    )  # fmt: skip

    def number(flag: str, help: str, default: int | None = None) -> None:
        parser.add_argument(flag, type=_at_least_1, metavar="N", help=help, default=default)

    def several(flag: str, choices: tuple[str, ...], help: str, *default: str) -> None:
        parser.add_argument(flag, nargs="+", choices=choices, help=help, default=default or None)

    number("--head-dim", "of keys and values, beside --heads (128)")
    number("--conv", "taps of the convolution, beside --heads (4)")
    number("--tp", "tensor parallel ranks (1)")
    number("--cp", "context parallel ranks (1)")
    parser.add_argument(
        "--linear-cp-mode", choices=("auto", "headwise", "chunkwise"), default="auto",
        help="how context parallelism works; auto may do both (auto)",
    )  # fmt: skip
    several(
        "--operands", ("fp16", "bf16"),
        "the layer's rule_operands; deterministic mode takes bf16 (fp16)", "fp16",
    )  # fmt: skip
    several(
        "--kernels", ("flash_qla", "triton", "fla"),
        "which to compile; fla's are tuned by running them, on a GPU (flash_qla triton)",
        "flash_qla", "triton",
    )  # fmt: skip
    several(
        "--parts", ("cut", "rows", "uncut", "states", "aligned", "again"),
        "of FlashQLA: cut (long sequences), rows (a batch), uncut (short documents), states "
        "(chunkwise), aligned (batch_invariant_mode), again (recompute=full). All but the last "
        "two; without context parallelism all but the last three",
    )  # fmt: skip
    number("--processes", "side by side, at most (one per core)")
    number("--multiprocessors", "of the GPU; FlashQLA chooses among its kernels by them (132)", 132)
    parser.add_argument(
        "--dry-run", action="store_true", help="say what is there and what is missing"
    )
    parser.add_argument("--for-a-run", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _at_least_1(text: str) -> int:
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 1")
    return int(text)


def _heads(text: str) -> tuple[int, int]:
    """``"16:32"`` -> ``(16, 32)``, key and value heads."""
    try:
        key, value = map(_at_least_1, text.split(":"))
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise argparse.ArgumentTypeError(
            f"{text} is not KEY:VALUE, two numbers of heads such as 16:32"
        ) from error
    return key, value

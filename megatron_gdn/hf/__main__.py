"""``python -m megatron_gdn.hf import | export | compare``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from .compare import compare_folders
from .imported_folder import export_folder, import_folder


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: done, or equal. 1: the compared weights differ. 2: said by name on stderr."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_gdn.hf", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="import | export | compare")

    command = commands.add_parser("import", help="Hugging Face folder to Megatron shards")
    command.add_argument("source", help="folder with config.json and safetensors weights")
    command.add_argument("target", help="new folder for the shards")
    command.add_argument("--tensor-model-parallel-size", type=int, default=1, metavar="RANKS")
    command.add_argument("--model", choices=("hybrid", "gpt"), default="hybrid")
    command.add_argument(
        "--make-vocab-size-divisible-by",
        type=int,
        default=1,
        metavar="ROWS",
        help="pad the vocabulary to a multiple of ROWS * RANKS (default: 1)",
    )
    command.add_argument(
        "--plain-norms",
        action="store_true",
        help="for a model without layernorm_zero_centered_gamma",
    )
    command.set_defaults(run=_import)

    command = commands.add_parser("export", help="Megatron shards back to the same files")
    command.add_argument("source", help="a folder that import made")
    command.add_argument("target", help="new Hugging Face folder")
    command.add_argument(
        "--fp32-gates",
        action="store_true",
        help="write A_log and dt_bias as F32 even where the source had BF16",
    )
    command.set_defaults(run=_export)

    command = commands.add_parser("compare", help="bits and dtypes of two folders of either kind")
    command.add_argument("left")
    command.add_argument("right")
    command.set_defaults(run=_compare)
    return parser


def _import(arguments: argparse.Namespace) -> int:
    import_folder(
        arguments.source,
        arguments.target,
        tp_size=arguments.tensor_model_parallel_size,
        model=arguments.model,
        zero_centered_gamma=not arguments.plain_norms,
        vocab_divisible_by=arguments.make_vocab_size_divisible_by,
        progress=True,
    )
    print(f"imported {arguments.source} to {arguments.target}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    export_folder(arguments.source, arguments.target, arguments.fp32_gates, progress=True)
    print(f"exported {arguments.source} to {arguments.target}")
    return 0


def _compare(arguments: argparse.Namespace) -> int:
    differences = 0
    for difference in compare_folders(arguments.left, arguments.right, progress=True):
        print(difference)
        differences += 1
    print(f"{differences} tensors differ" if differences else "every tensor is equal")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m megatron_gdn.hf import | export | compare | flags``."""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
import warnings
from collections.abc import Sequence
from functools import partial

from torch.distributed.checkpoint.api import CheckpointException

from .build import megatron_flags
from .checkpoint_folder import export_folder, import_folder
from .compare import compare_folders
from .damage import in_one_line
from .model_config import read_hf_config


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: done, or equal. 1: the compared weights differ. 2: an error, on stderr."""
    arguments = _parser().parse_args(argv)
    # Megatron and torch warn of absent packages and of their own old names.
    warnings.simplefilter("ignore")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return arguments.run(arguments)
    except (Exception, CheckpointException) as error:
        given = vars(arguments)
        sources = [given[name] for name in ("source", "left", "right") if name in given]
        said = in_one_line(error, sources, given.get("target"))
        if said is None:
            raise
        print(f"error: {said}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_gdn.hf", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="import | export | compare | flags")
    add = partial(commands.add_parser, allow_abbrev=False)

    command = add("import", help="Hugging Face folder to a Megatron checkpoint")
    command.add_argument("source", help="folder with config.json and safetensors weights")
    command.add_argument("target", help="new folder, for Megatron's --load")
    _add_model(command)
    command.set_defaults(run=_import)

    command = add("export", help="a Megatron checkpoint to Hugging Face files")
    command.add_argument("source", help="folder of checkpoints, or of one iteration")
    command.add_argument("target", help="new Hugging Face folder")
    command.add_argument(
        "--like", required=True, metavar="FOLDER", help="the Hugging Face folder it was made from"
    )
    command.add_argument(
        "--fp32-gates",
        action="store_true",
        help="write A_log and dt_bias as F32 even where the source had BF16",
    )
    command.add_argument(
        "--plain-norms",
        action="store_true",
        help="the checkpoint is of a model without layernorm_zero_centered_gamma",
    )
    command.set_defaults(run=_export)

    command = add("flags", help="flags of a Megatron launch that builds the model")
    command.add_argument("source", help="folder with config.json")
    _add_model(command)
    command.set_defaults(run=_flags)

    command = add("compare", help="bits and dtypes of a folder and another, or a checkpoint")
    command.add_argument("left")
    command.add_argument("right")
    command.set_defaults(run=_compare)
    return parser


def _add_model(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", choices=("hybrid", "gpt"), default="hybrid")
    command.add_argument(
        "--plain-norms",
        action="store_true",
        help="for a model without layernorm_zero_centered_gamma",
    )


def _import(arguments: argparse.Namespace) -> int:
    import_folder(
        arguments.source,
        arguments.target,
        model=arguments.model,
        zero_centered_gamma=not arguments.plain_norms,
        progress=True,
    )
    print(f"imported {arguments.source} to {arguments.target}")
    return 0


def _export(arguments: argparse.Namespace) -> int:
    export_folder(
        arguments.source,
        arguments.target,
        like=arguments.like,
        fp32_gates=arguments.fp32_gates,
        zero_centered_gamma=False if arguments.plain_norms else None,
        progress=True,
    )
    print(f"exported {arguments.source} to {arguments.target}")
    return 0


def _flags(arguments: argparse.Namespace) -> int:
    config = read_hf_config(arguments.source)
    print(shlex.join(megatron_flags(config, arguments.model, not arguments.plain_norms)))
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

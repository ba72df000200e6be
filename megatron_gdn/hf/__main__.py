"""``python -m megatron_gdn.hf import | export | compare | flags``."""

from __future__ import annotations

import argparse
import errno
import logging
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

from .build import megatron_flags
from .folders import compare_folders, export_folder, import_folder
from .model_config import read_hf_config
from .model_map import Architecture

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EXPECTED = (ValueError, NotImplementedError, ImportError, OSError, CheckpointException)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: done, or equal. 1: the compared weights differ. 2: an error, on stderr."""
    given = vars(_parser().parse_args(argv))
    run = given.pop("run")
    # Megatron and torch warn of absent packages and of their own old names.
    warnings.simplefilter("ignore")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        return run(**given)
    except _EXPECTED as error:
        print(f"error: {_in_one_line(error, given)}", file=sys.stderr)
        return 2


def _in_one_line(error: BaseException, given: dict) -> str:
    """The cause in words that name a folder, which torch and Megatron do not do."""
    names_nothing = isinstance(error, CheckpointException)
    if isinstance(error, CheckpointException):  # errors of ranks, with their tracebacks
        error = next(found for found, _ in error.failures.values())
    said = str(error) or type(error).__name__
    if isinstance(error, OSError) and error.errno and not error.filename:
        names_nothing, said = True, error.strerror or said
        if error.errno in _FULL:
            place = given.get("target")
            return f"{place} cannot be written: {said}. Make room, or choose another place."
    if names_nothing:
        folders = [given[name] for name in ("source", "left", "right", "target") if name in given]
        return f"{' or '.join(folders)} cannot be read or written: {said.splitlines()[0]}"
    return said


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m megatron_gdn.hf", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="import | export | compare | flags")

    def add(name: str, run: Callable[..., int], about: str) -> Callable[..., Any]:
        command = commands.add_parser(name, allow_abbrev=False, help=about)
        command.set_defaults(run=run)
        return command.add_argument

    def add_model(argument: Callable[..., Any]) -> None:
        argument("--model", choices=("hybrid", "gpt"), default="hybrid")
        about = "for a model without layernorm_zero_centered_gamma"
        argument("--plain-norms", action="store_true", help=about)

    argument = add("import", _import, "Hugging Face folder to a Megatron checkpoint")
    argument("source", help="folder with config.json and safetensors weights")
    argument("target", help="new folder, for Megatron's --load")
    add_model(argument)

    argument = add("export", _export, "a Megatron checkpoint to Hugging Face files")
    argument("source", help="folder of checkpoints, or of one iteration")
    argument("target", help="new Hugging Face folder")
    about = "the Hugging Face folder it was made from"
    argument("--like", required=True, metavar="FOLDER", help=about)
    about = "write A_log and dt_bias as F32 even where the source had BF16"
    argument("--fp32-gates", action="store_true", help=about)
    about = "the checkpoint is of a model without layernorm_zero_centered_gamma"
    argument("--plain-norms", action="store_true", help=about)

    argument = add("flags", _flags, "flags of a Megatron launch that builds the model")
    argument("source", help="folder with config.json")
    add_model(argument)

    argument = add("compare", _compare, "bits and dtypes of a folder and another, or a checkpoint")
    argument("left")
    argument("right")
    return parser


def _import(source: str, target: str, model: Architecture, plain_norms: bool) -> int:
    import_folder(source, target, model, zero_centered_gamma=not plain_norms, progress=True)
    print(f"imported {source} to {target}")
    return 0


def _export(source: str, target: str, like: str, fp32_gates: bool, plain_norms: bool) -> int:
    zero_centered = False if plain_norms else None
    export_folder(source, target, like, fp32_gates, zero_centered, progress=True)
    print(f"exported {source} to {target}")
    return 0


def _flags(source: str, model: Architecture, plain_norms: bool) -> int:
    print(shlex.join(megatron_flags(read_hf_config(source), model, not plain_norms)))
    return 0


def _compare(left: str, right: str) -> int:
    differences = 0
    for difference in compare_folders(left, right, progress=True):
        print(difference)
        differences += 1
    print(f"{differences} tensors differ" if differences else "every tensor is equal")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())

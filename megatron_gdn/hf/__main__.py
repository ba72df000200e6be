"""``python -m megatron_gdn.hf import | export | compare | flags``."""

from __future__ import annotations

import errno
import logging
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..command_line import Parser, refuse

_DESCRIPTION = "Weights between Hugging Face folders and Megatron checkpoints."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_EXPECTED = (ValueError, NotImplementedError, ImportError, OSError)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status 0: done, or equal. 1: the compared weights differ. 2: an error, on stderr."""
    given = vars(_parser().parse_args(argv))
    # Megatron and torch warn of absent packages and of deprecated names.
    warnings.simplefilter("ignore")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return _run(**given)
    except CheckpointException as error:  # errors of ranks, with their tracebacks
        cause = next(found for found, _ in error.failures.values())
        return refuse(_in_one_line(cause, given, names_nothing=True))
    except _EXPECTED as error:
        return refuse(_in_one_line(error, given))


def _in_one_line(error: BaseException, given: dict, names_nothing: bool = False) -> str:
    """The cause of an error in one line that names a folder."""
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


def _parser() -> Parser:
    parser = Parser("python -m megatron_gdn.hf", description=_DESCRIPTION)
    metavar = "import | export | compare | flags"
    commands = parser.add_subparsers(required=True, dest="command", metavar=metavar)

    def add(name: str, about: str) -> Callable[..., Any]:
        return commands.add_parser(name, help=about).add_argument

    def add_model(argument: Callable[..., Any]) -> None:
        argument("--model", choices=("hybrid", "gpt"), default="hybrid")
        about = "for a model without layernorm_zero_centered_gamma"
        argument("--plain-norms", action="store_true", help=about)

    argument = add("import", "Hugging Face folder to a Megatron checkpoint")
    argument("source", help="folder with config.json and safetensors weights")
    argument("target", help="new folder, for Megatron's --load")
    add_model(argument)

    argument = add("export", "a Megatron checkpoint to Hugging Face files")
    argument("source", help="folder of checkpoints, or of one iteration")
    argument("target", help="new Hugging Face folder")
    about = "the Hugging Face folder it was made from"
    argument("--like", required=True, metavar="FOLDER", help=about)
    about = "write A_log and dt_bias as F32 even where the source had BF16"
    argument("--fp32-gates", action="store_true", help=about)
    about = "the checkpoint is of a model without layernorm_zero_centered_gamma"
    argument("--plain-norms", action="store_true", help=about)

    argument = add("flags", "flags of a Megatron launch that builds the model")
    argument("source", help="folder with config.json")
    add_model(argument)

    argument = add("compare", "bits and dtypes of a folder and another, or a checkpoint")
    argument("left")
    argument("right")
    return parser


def _run(command: str, plain_norms: bool = False, **given: Any) -> int:
    if command == "flags":
        from .build import megatron_flags
        from .model_config import read_hf_config

        config = read_hf_config(given["source"])
        print(shlex.join(megatron_flags(config, given["model"], not plain_norms)))
        return 0
    from . import folders  # imports Megatron, which --help and flags do without

    if command == "import":
        folders.import_folder(**given, zero_centered_gamma=not plain_norms, progress=True)
    elif command == "export":
        centred = False if plain_norms else None
        folders.export_folder(**given, zero_centered_gamma=centred, progress=True)
    else:
        differences = 0
        for difference in folders.compare_folders(**given, progress=True):
            print(difference)
            differences += 1
        print(f"{differences} tensors differ" if differences else "every tensor is equal")
        return 1 if differences else 0
    print(f"{command}ed {given['source']} to {given['target']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

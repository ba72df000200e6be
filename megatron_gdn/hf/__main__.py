"""``python -m megatron_gdn.hf import | export | compare | flags``."""

from __future__ import annotations

import logging
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..command_line import Parser, print_error

_DESCRIPTION = "Weights between Hugging Face folders and Megatron checkpoints."


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns 0 for success, 1 if compared weights differ, 2 for an error."""
    given = vars(_parser().parse_args(argv))
    # Hide warnings of Megatron and torch about absent packages and deprecated names.
    warnings.simplefilter("ignore")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    from safetensors import SafetensorError

    try:
        return _run(**given)
    except (ValueError, NotImplementedError, ImportError, OSError, SafetensorError) as error:
        said = (str(error) or type(error).__name__).splitlines()[0]
        folders = [given[name] for name in ("source", "left", "right", "target") if name in given]
        if not any(folder in said for folder in folders):  # for example if the disk is full
            said = f"{' or '.join(folders)} cannot be read or written: {said}"
        return print_error(said)


def _parser() -> Parser:
    parser = Parser("python -m megatron_gdn.hf", description=_DESCRIPTION)
    metavar = "import | export | compare | flags"
    commands = parser.add_subparsers(required=True, dest="command", metavar=metavar)

    def add(name: str, about: str) -> Callable[..., Any]:
        """Add the command ``name`` with the help text ``about``; return its ``add_argument``."""
        return commands.add_parser(name, help=about).add_argument

    argument = add("import", "Hugging Face folder to a Megatron checkpoint")
    argument("source", help="folder with config.json and safetensors weights")
    argument("target", help="new folder, for Megatron's --load")
    argument("--model", choices=("hybrid", "gpt"), default="hybrid")

    argument = add("export", "a Megatron checkpoint to Hugging Face files")
    argument("source", help="folder of checkpoints, or of one iteration")
    argument("target", help="new Hugging Face folder")
    about = "the Hugging Face folder it was made from"
    argument("--like", required=True, metavar="FOLDER", help=about)
    about = "write A_log and dt_bias as F32 even where the source had BF16"
    argument("--fp32-gates", action="store_true", help=about)

    argument = add("flags", "flags of a Megatron launch that builds the model")
    argument("source", help="folder with config.json")
    argument("--model", choices=("hybrid", "gpt"), default="hybrid")

    argument = add("compare", "keys, bits and dtypes of two Hugging Face folders")
    argument("left")
    argument("right")
    return parser


def _run(command: str, **given: Any) -> int:
    """Run ``command`` with its arguments; return the exit code of :func:`main`."""
    if command == "flags":
        from .build import megatron_flags
        from .model_map import read_hf_config

        print(shlex.join(megatron_flags(read_hf_config(given["source"]), given["model"])))
        return 0
    if command == "compare":
        from .safetensors_files import compare_folders

        differences = 0
        for difference in compare_folders(**given):
            print(difference)
            differences += 1
        print(f"{differences} tensors differ" if differences else "every tensor is equal")
        return 1 if differences else 0
    from . import folders  # imports Megatron, which flags and compare do not need

    convert = folders.import_folder if command == "import" else folders.export_folder
    convert(**given)
    print(f"{command}ed {given['source']} to {given['target']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

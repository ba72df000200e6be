"""``python -m megatron_gdn.hf import | export | compare | flags``."""

from __future__ import annotations

import logging
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from ..command_line import Parser, one_line, print_error

_DESCRIPTION = "Weights between Hugging Face folders and Megatron checkpoints."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (None: the arguments of this process). Return the exit
    code: 0 for success, 1 if compared weights differ, 2 for an error."""
    options = vars(_parser().parse_args(argv))
    # Hide warnings of Megatron and torch about absent packages and deprecated names.
    warnings.simplefilter("ignore")
    for name in ("megatron.core", "torch.utils.cpp_extension"):
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        from safetensors import SafetensorError
    except ImportError:
        return print_error(
            "this command needs safetensors, which is not installed: pip install "
            "'megatron-gdn[hf]', in a clone pip install '.[hf]'"
        )

    try:
        return _run(**options)
    except (
        ValueError,
        NotImplementedError,
        ImportError,
        OSError,
        SafetensorError,
    ) as error:
        return print_error(_message_with_folder(error, options))


def _message_with_folder(error: Exception, options: dict[str, Any]) -> str:
    """The message of ``error`` in one line; it names a folder of the ``options``.

    A folder's name may hold line breaks, so these are escaped before the message is cut
    to its first line.
    """
    message = str(error) or type(error).__name__
    folders = []
    for name in ("source", "left", "right", "target"):
        if name in options:
            folder = one_line(options[name])
            message = message.replace(options[name], folder)
            folders.append(folder)
    message = message.splitlines()[0]
    # The error of a full disk, for example, names no folder.
    if not any(folder in message for folder in folders):
        message = f"{' or '.join(folders)} cannot be read or written: {message}"
    return message


def _parser() -> Parser:
    """The parser of the four commands' options."""
    parser = Parser("python -m megatron_gdn.hf", description=_DESCRIPTION)
    metavar = "import | export | compare | flags"
    commands = parser.add_subparsers(required=True, dest="command", metavar=metavar)

    def add(name: str, help_text: str) -> Callable[..., Any]:
        """Add the command ``name``; return its parser's method ``add_argument``."""
        return commands.add_parser(name, help=help_text).add_argument

    argument = add("import", "Hugging Face folder to a Megatron checkpoint")
    argument("source", help="folder with config.json and safetensors weights")
    argument("target", help="new folder, for Megatron's --load")
    argument("--model", choices=("hybrid", "gpt"), default="hybrid")

    argument = add("export", "a Megatron checkpoint to Hugging Face files")
    argument("source", help="folder of checkpoints, or of one iteration")
    argument("target", help="new Hugging Face folder")
    help_text = "the Hugging Face folder it was made from"
    argument("--like", required=True, metavar="FOLDER", help=help_text)
    help_text = (
        "write A_log, dt_bias and experts' biases as F32 even where the source had BF16"
    )
    argument("--fp32-gates", action="store_true", help=help_text)

    argument = add("flags", "flags of a Megatron launch that builds the model")
    argument("source", help="folder with config.json")
    argument("--model", choices=("hybrid", "gpt"), default="hybrid")

    argument = add("compare", "keys, bits and dtypes of two Hugging Face folders")
    argument("left")
    argument("right")
    return parser


def _run(command: str, **options: Any) -> int:
    """Run ``command`` with its ``options``; return the exit code."""
    if command == "flags":
        from .build import megatron_flags
        from .model_map import read_hf_config

        config = read_hf_config(options["source"])
        print(shlex.join(megatron_flags(config, options["model"])))
        return 0
    if command == "compare":
        from .safetensors_files import compare_folders

        differences = 0
        for difference in compare_folders(**options):
            print(difference)
            differences += 1
        if differences:
            print(f"{differences} tensors differ")
            return 1
        print("every tensor is equal")
        return 0
    # this imports Megatron, which `flags` and `compare` do not need
    from . import folders

    if command == "import":
        convert = folders.import_folder
    else:
        convert = folders.export_folder
    convert(**options)
    print(one_line(f"{command}ed {options['source']} to {options['target']}"))
    return 0


if __name__ == "__main__":
    sys.exit(main())

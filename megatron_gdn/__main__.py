"""``python -m megatron_gdn``: the commands of the package."""

import sys
from importlib import import_module

from . import __version__
from .command_line import Parser, did_you_mean

COMMANDS = {
    "doctor": "checks whether this machine can run Gated DeltaNet layers, and how",
    "launch": "runs a Megatron script with the layers of this package",
    "warm_up": "compiles the kernels of a run before the run",
    "models": "prints published models: sizes, FLOPs, memory, flags of a launch",
    "hf": "converts weights between Hugging Face and Megatron",
}


def main(argv: list[str] | None = None) -> int:
    """Run the command ``argv[0]`` with the other arguments, or print the list of
    commands; return the exit status.

    ``argv`` is by default the command line without the program.
    """
    if argv is None:
        argv = sys.argv[1:]
    if argv and argv[0] in COMMANDS:
        module = f"{argv[0]}.__main__"
        if argv[0] == "launch":
            module = "launch"
        return import_module(f"{__package__}.{module}").main(argv[1:])
    lines = (
        f"    python -m megatron_gdn.{name:8}  {about}"
        for name, about in COMMANDS.items()
    )
    parser = Parser(
        "python -m megatron_gdn",
        description="The commands; each has --help.\n\n" + "\n".join(lines),
    )
    parser.add_argument(
        "--version", action="version", version=f"megatron-gdn {__version__}"
    )
    parser.add_argument(
        "command", nargs="?", help="one of the commands above, and its options"
    )
    name = parser.parse_args(argv[:1]).command
    if name is not None:
        parser.error(f"no command {name!r}{did_you_mean([name], COMMANDS)}")
    print(parser.description)
    return 0


if __name__ == "__main__":
    sys.exit(main())

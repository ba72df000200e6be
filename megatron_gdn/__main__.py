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
    """Run the command ``argv[0]``, or print the commands; ``argv``: by default the
    command line."""
    if argv is None:
        given = sys.argv[1:]
    else:
        given = argv
    if given and given[0] in COMMANDS:
        if given[0] == "launch":
            place = "launch"
        else:
            place = f"{given[0]}.__main__"
        return import_module(f"{__package__}.{place}").main(given[1:])
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
    name = parser.parse_args(given[:1]).command
    if name is not None:
        parser.error(f"no command {name!r}{did_you_mean([name], COMMANDS)}")
    print(parser.description)
    return 0


if __name__ == "__main__":
    sys.exit(main())

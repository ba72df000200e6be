"""``python -m megatron_gdn``: the commands of the package."""

import sys

from .command_line import Parser, did_you_mean

COMMANDS = {
    "doctor": "checks whether this machine can run Gated DeltaNet layers, and how",
    "launch": "runs a Megatron script with the layers of this package",
    "warm_up": "compiles the kernels of a run before the run",
    "models": "prints published models: sizes, FLOPs, memory, flags of a launch",
    "hf": "converts weights between Hugging Face and Megatron",
}


def main(argv: list[str] | None = None) -> int:
    """Print the list of commands; ``argv`` (by default the command line) must be empty."""
    lines = (f"    python -m megatron_gdn.{name:8}  {about}" for name, about in COMMANDS.items())
    parser = Parser(
        "python -m megatron_gdn",
        description="The commands; each has --help.\n\n" + "\n".join(lines),
    )
    parser.add_argument("command", nargs="?", help="not allowed: a command follows a dot")
    name = parser.parse_args(argv).command
    if name is not None:
        near = did_you_mean([name], COMMANDS)
        parser.error(f"a command follows a dot, as in python -m megatron_gdn.doctor{near}")
    print(parser.description)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""``python -m megatron_gdn``: the commands of the package."""

import sys

from .command_line import Parser, did_you_mean

COMMANDS = {
    "doctor": "what runs a Gated DeltaNet layer on this machine, and what is wrong",
    "launch": "a Megatron script that exists, with the layers of this package",
    "warm_up": "compiles before a run the kernels that it needs",
    "models": "the published models: sizes, FLOPs, memory, flags of a launch",
    "hf": "weights from Hugging Face to Megatron and back",
}


def main(argv: list[str] | None = None) -> int:
    lines = (f"    python -m megatron_gdn.{name:8}  {about}" for name, about in COMMANDS.items())
    parser = Parser(
        "python -m megatron_gdn",
        description="The commands; each has --help.\n\n" + "\n".join(lines),
    )
    parser.add_argument("command", nargs="?", help="none: a command follows a dot, without a space")
    name = parser.parse_args(argv).command
    if name is not None:
        near = did_you_mean([name], COMMANDS)
        parser.error(f"a command follows a dot, as in python -m megatron_gdn.doctor{near}")
    print(parser.description)
    return 0


if __name__ == "__main__":
    sys.exit(main())

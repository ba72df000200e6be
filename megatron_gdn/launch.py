"""``torchrun ... -m megatron_gdn.launch SCRIPT ARGS`` runs a Megatron script with our
layers."""

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

from .command_line import Parser, print_error

_DESCRIPTION = """\
Run SCRIPT with its arguments as python does, with the Gated DeltaNet layers of this package.

    torchrun --nproc_per_node=8 -m megatron_gdn.launch pretrain_hybrid.py FLAGS

SCRIPT is a file, or the name of a script in a clone of Megatron-LM, such as pretrain_hybrid. The
clone is the folder that the environment variable MEGATRON_LM names, or the current folder. The
training loop of Megatron-LM counts FLOPs as megatron_gdn.models does, and its parser takes
--kda-f-lora-rank, --kda-gate-lora-rank, --kda-lower-bound and --kda-safe-gate of newer Megatrons.
MEGATRON_GDN=gdn,mamba replaces Mamba2 layers too; the default is gdn.
"""


def script_file(script: str) -> Path:
    """The file of ``script``, a path or the name of a script in the clone of
    Megatron-LM."""
    folders = [Path()]
    if clone := os.environ.get("MEGATRON_LM"):
        folders.append(Path(clone))
    for folder in folders:
        for path in (folder / script, folder / f"{script}.py"):
            if path.is_file():
                return path.resolve()
    raise FileNotFoundError(
        f"no script {script!r} in "
        f"{' or '.join(str(folder.resolve()) for folder in folders)}; give the path of "
        "a file, or `git clone https://github.com/NVIDIA/Megatron-LM` at the tag of "
        "the installed megatron-core, whose wheel holds no scripts, and set "
        "MEGATRON_LM to that folder."
    )


def main(arguments: list[str]) -> int:
    """Run the script ``arguments[0]`` with the other arguments; return 0, or 2 if it
    cannot run."""
    # Options before SCRIPT are the launcher's, options after it the script's.
    if not arguments or arguments[0].startswith("-"):
        parser = Parser(
            "python -m megatron_gdn.launch",
            description=_DESCRIPTION,
            usage="%(prog)s SCRIPT ...",
        )
        parser.parse_args(arguments)
        parser.error("give the script to run")
    try:
        path = script_file(arguments[0])
    except OSError as error:
        return print_error(error)
    sys.argv = [str(path)] + arguments[1:]
    # Python imports from the script's folder first: a script in a clone gets the
    # clone's Megatron.
    sys.path[0] = str(path.parent)
    try:
        import_module("megatron_gdn.enable")
    except ValueError as error:  # the environment names layers that do not exist
        return print_error(error)
    # Only scripts that use megatron.training have Megatron's count of FLOPs and its
    # parser of flags.
    if "megatron.training" in path.read_text(encoding="utf-8", errors="ignore"):
        import_module("megatron_gdn.models.stack").count_flops_in_megatron()
        import_module("megatron_gdn.frameworks.patch").add_flags_of_kda()
    runpy.run_path(str(path), run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

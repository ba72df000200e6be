"""``torchrun ... -m megatron_gdn.launch SCRIPT ARGS``: a launch that exists, with our layers."""

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

from .command_line import Parser, refuse

_DESCRIPTION = """\
Run SCRIPT with its arguments as python does, with Gated DeltaNet layers of this package.

    torchrun --nproc_per_node=8 -m megatron_gdn.launch pretrain_hybrid.py FLAGS

SCRIPT is a file, or the name of a script in a clone of Megatron-LM, such as pretrain_hybrid. The
clone is the folder that the environment variable MEGATRON_LM names, or the current one. The
training loop of such a script counts FLOPs as megatron_gdn.models does. MEGATRON_GDN=gdn,mamba
builds Mamba2 layers too (gdn).
"""


def script_file(script: str) -> Path:
    """The file that ``script`` names.

    Raises:
        FileNotFoundError: there is none, neither here nor in the clone.
    """
    folders = [Path(), *map(Path, filter(None, [os.environ.get("MEGATRON_LM")]))]
    for folder in folders:
        for path in (folder / script, folder / f"{script}.py"):
            if path.is_file():
                return path.resolve()
    raise FileNotFoundError(
        f"no script {script!r} in {' or '.join(str(folder.resolve()) for folder in folders)}; give "
        f"the path of a file, or `git clone https://github.com/NVIDIA/Megatron-LM` at the tag of "
        f"the installed megatron-core, whose wheel holds no scripts, and set MEGATRON_LM to that "
        f"folder."
    )


def main(arguments: list[str]) -> int:
    """2 if there is no such script; else the script's own end."""
    if not arguments or arguments[0].startswith("-"):  # what follows SCRIPT is the script's
        parser = Parser(
            "python -m megatron_gdn.launch", description=_DESCRIPTION, usage="%(prog)s SCRIPT ..."
        )
        parser.parse_args(arguments)
        parser.error("give the script to run")
    try:
        path = script_file(arguments[0])
    except FileNotFoundError as error:
        return refuse(error)
    sys.argv = [str(path), *arguments[1:]]
    # Where Python looks first when it runs a file: Megatron too comes from a script's clone.
    sys.path[0] = str(path.parent)
    import_module("megatron_gdn.enable")
    _say_what_the_gpu_takes()
    if "megatron.training" in path.read_text(encoding="utf-8", errors="ignore"):
        import_module("megatron_gdn.models.stack").count_in_megatron()
    runpy.run_path(str(path), run_name="__main__")
    return 0


def _say_what_the_gpu_takes() -> None:
    """Choose the rule of bf16 heads of 128, which warns if it is slow."""
    import torch

    from .gdn.rule import resolve_rule
    from .ops.delta_rule.base import HeadSizes

    if torch.cuda.is_available():
        resolve_rule(device="cuda", dtype=torch.bfloat16, sizes=HeadSizes(2, 4, 128, 128))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

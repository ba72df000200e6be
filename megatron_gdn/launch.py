"""``torchrun ... -m megatron_gdn.launch SCRIPT ARGS``: a launch that exists, with our layers.

Runs ``SCRIPT ARGS`` as ``python SCRIPT ARGS`` does, after :mod:`megatron_gdn.enable`. ``SCRIPT`` is
a file, or the name of a script in a clone of Megatron-LM, such as ``pretrain_hybrid``. The clone is
the folder that the environment variable ``MEGATRON_LM`` names, or the current one. The training
loop of such a script counts FLOPs as :mod:`megatron_gdn.models.megatron_count` does.
"""

import os
import runpy
import sys
from importlib import import_module
from pathlib import Path

import torch

from .gdn.rule import resolve_rule
from .ops.delta_rule.base import HeadSizes


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
        f"No script {script!r} in {' or '.join(str(folder.resolve()) for folder in folders)}. Give "
        f"the path of a file; or, for a script of Megatron-LM, which its wheel does not hold, "
        f"`git clone https://github.com/NVIDIA/Megatron-LM` at the tag of the installed "
        f"megatron-core, and set MEGATRON_LM to that folder."
    )


def main(arguments: list[str]) -> None:
    if not arguments or arguments[0] in ("-h", "--help"):
        raise SystemExit(__doc__)
    path = script_file(arguments[0])
    sys.argv = [str(path), *arguments[1:]]
    # Where Python looks first when it runs a file: Megatron too comes from a script's clone.
    sys.path[0] = str(path.parent)
    import_module("megatron_gdn.enable")
    if torch.cuda.is_available():  # what a layer of bf16 heads of 128 takes; warns if it is slow
        resolve_rule(device="cuda", dtype=torch.bfloat16, sizes=HeadSizes(2, 4, 128, 128))
    if "megatron.training" in path.read_text(encoding="utf-8", errors="ignore"):
        import_module("megatron_gdn.models.megatron_count").install()
    runpy.run_path(str(path), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

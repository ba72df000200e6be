"""Write Hugging Face folders that appear only when they are complete, one file in memory."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from ..progress import progress_bar
from .safetensors_reader import INDEX_NAME, SafetensorsFolder


def refuse_existing(target: str | Path) -> None:
    """Raise FileExistsError if ``target`` exists and is not an empty folder."""
    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists; remove it or choose another name.")


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """A folder to fill, which becomes ``target`` on success and vanishes on any error.

    Raises:
        FileExistsError: ``target`` exists and is not an empty folder.
        OSError: no folder can be made beside ``target``.
    """
    refuse_existing(target)
    target = Path(target).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # A sibling, so that the rename stays on one file system and is atomic.
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise OSError(
            f"no folder can be made in {target.parent} ({error.strerror}); choose another place."
        ) from error
    try:
        yield scratch
        scratch.chmod(0o755)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def write_like(
    folder: Path, like: SafetensorsFolder, read: Callable[[str], Tensor], progress: bool = False
) -> None:
    """Write the files of ``like`` with the tensors that ``read(key)`` gives, a file at a time.

    Files that are not weights are copied; the index's size is corrected.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    for path in like.other_files():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(like.folder / path, folder / path)
    size = 0
    for name, file in progress_bar(like.files.items(), "export", progress):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        # Copies: safetensors refuses views of one storage, as the pieces of a projection are.
        tensors = {
            key: read(key).detach().cpu().clone(memory_format=torch.contiguous_format)
            for key in file.offset_keys()
        }
        size += sum(tensor.nbytes for tensor in tensors.values())
        try:
            save_file(tensors, folder / name, metadata=file.metadata() or None)
        except SafetensorError as error:  # it has the number of the system's error in its words
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    index = folder / INDEX_NAME
    if index.is_file():
        content = json.loads(index.read_text())
        if content.get("metadata", {}).get("total_size", size) != size:
            content["metadata"]["total_size"] = size
            index.write_text(json.dumps(content, indent=2) + "\n")

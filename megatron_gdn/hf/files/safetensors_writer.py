"""Write safetensors files a tensor at a time, and folders that appear only when they are complete.

The safetensors package needs every tensor of a file in memory at once. Here shapes and dtypes are
known in advance: the header is written first, then each tensor at its offset when it is ready. The
peak of memory is one tensor, not one file.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from ..progress import progress_bar
from .safetensors_reader import INDEX_NAME, FileSpec

# The format wants tensor data to start on this boundary.
_ALIGNMENT = 8


class StreamingWriter:
    """A safetensors file whose header is written at once and whose tensors follow in any order.

    Args:
        folder: where the file goes.
        spec: its name, tensors in storage order, and metadata.
    """

    def __init__(self, folder: Path, spec: FileSpec) -> None:
        self.spec = spec
        self._missing = set(spec.tensors)
        header: dict[str, object] = {"__metadata__": spec.metadata} if spec.metadata else {}
        self._starts: dict[str, int] = {}
        end = 0
        for key, tensor in spec.tensors.items():
            start, end = end, end + prod(tensor.shape) * tensor.torch_dtype.itemsize
            self._starts[key] = start
            header[key] = {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        text += b" " * (-len(text) % _ALIGNMENT)
        self._data_start = 8 + len(text)
        path = folder / spec.name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._data_start + end)

    def write(self, key: str, tensor: Tensor) -> None:
        """Put ``tensor`` in its place; shape and dtype must be those announced."""
        spec = self.spec.tensors[key]
        assert (tensor.dtype, tuple(tensor.shape)) == (spec.torch_dtype, spec.shape), (
            f"{key}: announced {spec}, got {tensor.dtype} {tuple(tensor.shape)}"
        )
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        self._file.seek(self._data_start + self._starts[key])
        self._file.write(memoryview(raw.numpy()))
        self._missing.discard(key)

    def __enter__(self) -> StreamingWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._file.close()
        assert kind or not self._missing, f"{self.spec.name}: never written: {self._missing}"


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


def write_hf_files(
    folder: Path, files: Sequence[FileSpec], read: Callable[[str], Tensor], progress: bool = False
) -> None:
    """Write weight files with the tensors that ``read(key)`` gives; correct the index's size."""
    total = sum(len(file.tensors) for file in files)
    keys = ((file, key) for file in files for key in file.tensors)
    writer: StreamingWriter | None = None
    with ExitStack() as stack:
        for file, key in progress_bar(keys, "export", progress, total):
            if writer is None or writer.spec is not file:
                stack.close()
                writer = stack.enter_context(StreamingWriter(folder, file))
            writer.write(key, read(key))
    index = folder / INDEX_NAME
    if index.is_file():
        content = json.loads(index.read_text())
        size = sum(
            torch.Size(spec.shape).numel() * spec.torch_dtype.itemsize
            for file in files
            for spec in file.tensors.values()
        )
        if content.get("metadata", {}).get("total_size", size) != size:
            content["metadata"]["total_size"] = size
            index.write_text(json.dumps(content, indent=2) + "\n")

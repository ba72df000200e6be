"""Read, write and compare Hugging Face folders of weights, one tensor at a time."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..mixers.tensor_map import bits_of

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


class TensorSpec(NamedTuple):
    """Dtype (as safetensors spells it) and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


class SafetensorsFolder:
    """The weights of a Hugging Face folder; `file_of` and `specs` have keys in storage order."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self._read_index()
        names = [SINGLE_NAME] if index is None else sorted(set(index.values()))
        self.files = {name: self._open(name) for name in names}
        pairs = [(key, name) for name in names for key in self.files[name].offset_keys()]
        if index is not None:
            self._require_index_matches(index, pairs)
        self.file_of = dict(pairs)
        self.specs = {key: self._read_spec(key) for key in self.file_of}

    def read(self, key: str, expert: int | None = None) -> Tensor:
        """Read the tensor ``key``, or only its slice ``[expert]``."""
        file = self.files[self.file_of[key]]
        return file.get_tensor(key) if expert is None else file.get_slice(key)[expert]

    def read_finite(self, key: str, expert: int | None = None) -> Tensor:
        """Read as `read` does; raise a ValueError if a value is NaN or inf."""
        piece = self.read(key, expert)
        # If a value is NaN or inf, so is the minimum or the maximum. aminmax copies nothing.
        if piece.numel() and not all(bool(end.isfinite()) for end in torch.aminmax(piece)):
            which = "" if expert is None else f" (expert {expert})"
            number = int(piece.isfinite().logical_not().sum())
            raise ValueError(
                f"{key}{which} in {self.path_of(key)} holds {number} of {piece.numel()} values "
                f"that are NaN or inf; weights must be finite. Download the file again, or take a "
                f"checkpoint from before the training diverged."
            )
        return piece

    def path_of(self, key: str) -> Path:
        return self.folder / self.file_of[key]

    def other_files(self) -> Iterator[Path]:
        """Yield the paths, relative to the folder, of files without weights that are not hidden."""
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            if path.is_file() and not hidden and str(relative) not in self.files:
                yield relative

    def _read_index(self) -> dict[str, str] | None:
        """The index's table of tensor keys and file names; None if the folder has no index."""
        path = self.folder / INDEX_NAME
        if not path.is_file():
            if (self.folder / SINGLE_NAME).is_file():
                return None
            raise FileNotFoundError(
                f"{self.folder} has no weights: neither {INDEX_NAME} nor {SINGLE_NAME}."
            )
        try:
            listed = json.loads(path.read_text())["weight_map"].items()
            return {key: str(name) for key, name in listed}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not an index of weights: it needs a 'weight_map' ({error})."
            ) from error

    def _require_index_matches(self, index: dict[str, str], pairs: list[tuple[str, str]]) -> None:
        """Raise if ``index`` is not equal to ``pairs``, the keys and the files that store them."""
        if wrong := set(pairs) ^ set(index.items()):
            key = min(wrong)[0]
            files = [name for stored_key, name in pairs if stored_key == key]
            raise ValueError(
                f"{self.folder / INDEX_NAME} says that {key!r} is in {index.get(key, 'no file')}, "
                f"but it is stored in {' and '.join(files) or 'no file'}. Each tensor must be in "
                f"the one file that the index names. Download the index and all files of one "
                f"revision again."
            )

    def _read_spec(self, key: str) -> TensorSpec:
        """Read the dtype and the shape of the tensor ``key``, not its values."""
        view = self.files[self.file_of[key]].get_slice(key)
        dtype = view.get_dtype()
        if dtype not in TORCH_DTYPES:
            raise NotImplementedError(
                f"{key} in {self.path_of(key)} has dtype {dtype}; known: {', '.join(TORCH_DTYPES)}."
            )
        return TensorSpec(dtype, tuple(view.get_shape()))

    def _open(self, name: str) -> Any:
        """Open the safetensors file ``name`` of this folder; errors name the file."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing.")
        try:
            return safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or not a safetensors file ({path.stat().st_size} bytes): "
                f"{error}. Download it again."
            ) from error


def progress_bar[Item](items: Collection[Item], label: str) -> Iterable[Item]:
    """Return ``items``; rank 0 shows a bar named ``label`` if a terminal and tqdm exist."""
    if not sys.stderr.isatty() or (dist.is_initialized() and dist.get_rank()):
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=label, unit="part")


def refuse_existing(target: str | Path) -> None:
    """Raise FileExistsError if ``target`` exists and is not an empty folder."""
    target = Path(target).absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists; remove it or choose another name.")


@contextmanager
def new_folder(target: str | Path) -> Iterator[Path]:
    """Yield an empty folder, which becomes ``target`` at the end, and is deleted on any error."""
    refuse_existing(target)
    target = Path(target).absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    # The new folder lies beside the target: a rename within one file system is atomic.
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield scratch
        scratch.chmod(0o755)
        scratch.rename(target)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def write_folder(
    target: str | Path, like: SafetensorsFolder, read: Callable[[str], Tensor]
) -> None:
    """Write folder ``target``: files as in ``like``, but each tensor ``key`` is ``read(key)``."""
    from safetensors.torch import save_file

    with new_folder(target) as folder:
        for path in like.other_files():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(like.folder / path, folder / path)
        size = 0
        for name, file in progress_bar(like.files.items(), "export"):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            # safetensors refuses tensors that share storage, as the pieces of one projection do.
            tensors = {
                key: read(key).detach().cpu().clone(memory_format=torch.contiguous_format)
                for key in file.offset_keys()
            }
            size += sum(tensor.nbytes for tensor in tensors.values())
            save_file(tensors, folder / name, metadata=file.metadata() or None)
        index = folder / INDEX_NAME
        if index.is_file():
            content = json.loads(index.read_text())
            if content.get("metadata", {}).get("total_size", size) != size:
                content["metadata"]["total_size"] = size
                index.write_text(json.dumps(content, indent=2) + "\n")


class Difference(NamedTuple):
    """One tensor that differs between two folders."""

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def compare_folders(left: str | Path, right: str | Path) -> Iterator[Difference]:
    """Yield the tensors whose key, dtype, shape or bits differ between folders left and right."""
    left_files, right_files = SafetensorsFolder(left), SafetensorsFolder(right)
    for key in progress_bar(left_files.specs, "compare"):
        if key not in right_files.specs:
            yield Difference(key, f"only in {left}")
            continue
        a, b = left_files.specs[key], right_files.specs[key]
        if a != b:
            yield Difference(key, f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}")
            continue
        left_tensor, right_tensor = left_files.read(key), right_files.read(key)
        if count := int((bits_of(left_tensor) != bits_of(right_tensor)).sum()):
            largest = (left_tensor.double() - right_tensor.double()).abs().max().item()
            difference = f"{count} of {left_tensor.numel()} differ, by at most {largest:.3g}"
            yield Difference(key, difference)
    for key in sorted(right_files.specs.keys() - left_files.specs.keys()):
        yield Difference(key, f"only in {right}")

"""Read, write and compare Hugging Face folders of weights, one tensor at a time."""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..command_line import one_line
from ..mixers.tensor_map import bits_of
from .json_files import parse_object, read_object, short_text
from .new_folder import new_folder

logger = logging.getLogger(__name__)

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"

# Names of the files from which transformers may load weights.
_WEIGHT_FILE_PATTERNS = (
    "model*.safetensors",
    "pytorch_model*.bin",
    "pytorch_model*.bin.index.json",
    "adapter_model.*",
    "adapter_config.json",
)
# Endings of files that may hold weights or pickles. An export never copies such a file.
_WEIGHT_FILE_ENDINGS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".bin.index.json",
    ".pt",
    ".pth",
    ".ckpt",
    ".pkl",
    ".pickle",
    ".h5",
    ".msgpack",
    ".gguf",
    ".onnx",
    ".npz",
    ".npy",
    ".distcp",
)
_MAX_KEY_LENGTH = 512  # characters

# dtypes by the names of safetensors
TORCH_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


class TensorSpec(NamedTuple):
    """Dtype (as safetensors spells it) and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]

    @classmethod
    def of(cls, tensor: Tensor) -> TensorSpec:
        """The dtype and shape with which safetensors would store ``tensor``."""
        names = {dtype: name for name, dtype in TORCH_DTYPES.items()}
        return cls(names.get(tensor.dtype, str(tensor.dtype)), tuple(tensor.shape))


class SafetensorsFolder:
    """The weights of a Hugging Face folder.

    ``files``: the opened safetensors files by name. ``file_of``: the name of the file
    that stores each key. ``specs``: the `TensorSpec` of each key. ``file_of`` and
    ``specs`` have the keys in the order in which files store the tensors.
    """

    def __init__(self, folder: str | Path) -> None:
        """Read the headers of the folder's files, not their tensors.

        Raises:
            FileNotFoundError: the index, or a file that it names, is missing.
            ValueError: an index or a file is damaged or contradicts another one, the
                index names a file outside the folder, or the folder has two sets of
                weights.
            NotImplementedError: a tensor has a dtype that is not known here.
        """
        self.folder = Path(folder)
        index = self._read_index()
        if index is None:
            names = [SINGLE_FILE]
        else:
            names = sorted(set(index.values()))
        self._refuse_other_weights(names)
        self.files = {name: self._open_file(name) for name in names}
        # offset_keys: the keys of a file in the order of its tensors
        pairs = [
            (key, name) for name in names for key in self.files[name].offset_keys()
        ]
        if index is not None:
            self._require_index_matches(index, pairs)
        if not pairs:
            raise ValueError(f"{self.folder} has no weights: its files hold no tensor.")
        self.file_of = dict(pairs)
        self.specs = {key: self._read_spec(key) for key in self.file_of}

    def read(self, key: str, expert: int | None = None) -> Tensor:
        """Read the tensor ``key``. If ``expert`` is given, the tensor has stacked
        experts, and only ``tensor[expert]`` is read."""
        from safetensors import SafetensorError

        file = self.files[self.file_of[key]]
        try:
            if expert is None:
                return file.get_tensor(key)
            return file.get_slice(key)[expert]
        except (SafetensorError, RuntimeError, TypeError, IndexError) as error:
            cause = str(error).partition("\n")[0]
            raise ValueError(
                f"{key} in {self.path_of(key)} cannot be read: {cause}"
            ) from error

    def read_finite(self, key: str, expert: int | None = None) -> Tensor:
        """Read as `read` does; raise a ValueError if a value is NaN or inf."""
        tensor = self.read(key, expert)
        where = f"{key} in {self.path_of(key)}"
        if expert is not None:
            where = f"{key} (expert {expert}) in {self.path_of(key)}"
        require_finite(tensor, where, "Download the file again")
        return tensor

    def path_of(self, key: str) -> Path:
        """The path of the file that stores the tensor ``key``."""
        return self.folder / self.file_of[key]

    def other_files(self) -> tuple[list[Path], list[Path]]:
        """Two lists: files that an export copies, and files that an export leaves out
        because they may hold weights.

        The paths are relative to the folder. Hidden files and the files of this object's
        tensors are in neither list.

        Raises:
            ValueError: a file is a link out of the folder, or a subfolder is a link.
        """
        copied = []
        left_out = []
        for path in self._visible_files():
            relative = path.relative_to(self.folder)
            if str(relative) in self.files or str(relative) == INDEX_FILE:
                self._refuse_link_out(path)
            elif path.name.lower().endswith(_WEIGHT_FILE_ENDINGS):
                left_out.append(relative)
            else:
                self._refuse_link_out(path)
                copied.append(relative)
        return copied, left_out

    def _visible_files(self) -> Iterator[Path]:
        """Yield the paths of the files in the folder and its subfolders, except hidden
        ones; raise a ValueError if a subfolder is a link."""
        for base, subfolders, names in os.walk(self.folder):
            here = Path(base)
            subfolders[:] = sorted(
                name for name in subfolders if not name.startswith(".")
            )
            if links := [name for name in subfolders if (here / name).is_symlink()]:
                raise ValueError(
                    f"{here / links[0]} is a link to a folder; an export copies no "
                    "linked folder. Remove the link."
                )
            for name in sorted(names):
                if not name.startswith(".") and (here / name).is_file():
                    yield here / name

    def _refuse_link_out(self, path: Path) -> None:
        """Raise if the file ``path`` is a link to a file outside the folder.

        In the cache of Hugging Face's hub, ``snapshots/REVISION`` is the folder, and its
        files are links into ``blobs`` beside ``snapshots``. These links are legal.
        """
        folder = self.folder.resolve()
        legal_folders = [folder]
        if folder.parent.name == "snapshots":
            legal_folders.append(folder.parent.parent / "blobs")
        linked = path.resolve()
        if not any(linked.is_relative_to(legal) for legal in legal_folders):
            raise ValueError(
                f"{path} is a link out of the folder, to {linked}; an export copies "
                "only files of the folder. Put the file itself there."
            )

    def _refuse_other_weights(self, names: list[str]) -> None:
        """Raise if the folder has files of weights beside the files ``names``."""
        others = []
        for entry in self.folder.iterdir():
            is_weight_file = any(
                fnmatchcase(entry.name.lower(), pattern)
                for pattern in _WEIGHT_FILE_PATTERNS
            )
            if is_weight_file and entry.name not in names:
                others.append(entry.name)
        others.sort()
        if others:
            raise ValueError(
                f"{self.folder} has two sets of weights: {names[0]} and {others[0]}. "
                "transformers may load another set than this package. Remove "
                f"{others[0]}, or the older set."
            )
        if SINGLE_FILE in names and len(names) > 1:
            raise ValueError(
                f"{self.folder / INDEX_FILE} names {SINGLE_FILE} beside other files; "
                f"transformers would load {SINGLE_FILE} alone. Rename the file and its "
                "entries in the index."
            )

    def _read_index(self) -> dict[str, str] | None:
        """The index: tensor key -> file name; None if the folder has no index."""
        path = self.folder / INDEX_FILE
        if not path.is_file():
            if (self.folder / SINGLE_FILE).is_file():
                return None
            raise FileNotFoundError(
                f"{self.folder} has no weights: neither {INDEX_FILE} nor {SINGLE_FILE}."
            )
        index = read_object(path)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ValueError(
                f"{path} is not an index of weights: it needs a 'weight_map' of keys "
                f"and file names, but has {short_text(weight_map)}."
            )
        if not isinstance(index.get("metadata", {}), dict):
            raise ValueError(
                f"{path}: 'metadata' must be an object such as {{'total_size': 1234}}, "
                f"but is {short_text(index['metadata'])}."
            )
        for key, name in weight_map.items():
            if not _is_plain_name(name):
                raise ValueError(
                    f"{path} says that {short_text(key)} is in {short_text(name)}; "
                    "legal are names of .safetensors files inside the folder, without "
                    "a path. Download the index again."
                )
        return weight_map

    def _require_index_matches(
        self, index: dict[str, str], pairs: list[tuple[str, str]]
    ) -> None:
        """Raise if ``index`` differs from ``pairs``, which are pairs (key, name of a
        file that stores it)."""
        if wrong := set(pairs) ^ set(index.items()):
            key = min(wrong)[0]
            files = [name for stored_key, name in pairs if stored_key == key]
            raise ValueError(
                f"{self.folder / INDEX_FILE} says that {key!r} is in "
                f"{index.get(key, 'no file')}, but it is stored in "
                f"{' and '.join(files) or 'no file'}. Each tensor must be in the one "
                "file that the index names. Download the index and all files of one "
                "revision again."
            )

    def _read_spec(self, key: str) -> TensorSpec:
        """Read the dtype and the shape of the tensor ``key``, not its values."""
        view = self.files[self.file_of[key]].get_slice(key)
        dtype = view.get_dtype()
        if dtype not in TORCH_DTYPES:
            raise NotImplementedError(
                f"{key} in {self.path_of(key)} has dtype {dtype}; known: "
                f"{', '.join(TORCH_DTYPES)}. Convert the folder to BF16 first."
            )
        return TensorSpec(dtype, tuple(view.get_shape()))

    def _open_file(self, name: str) -> Any:
        """Open the safetensors file ``name`` of this folder, as an object of
        ``safe_open``; errors name the file."""
        from safetensors import SafetensorError, safe_open

        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing.")
        try:
            file = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or not a safetensors file ({path.stat().st_size} "
                f"bytes): {error}. Download it again."
            ) from error
        _require_legal_header(path)
        return file


def _is_plain_name(name: object) -> bool:
    """Whether ``name`` is the name of a visible safetensors file, without a path."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and name.isprintable()
        and not name.startswith(".")
        and "/" not in name
        and "\\" not in name
    )


def _require_legal_header(path: Path) -> None:
    """Raise a ValueError if the header of the safetensors file ``path`` has a key twice,
    a key that is too long, or a key that is not printable.

    The package safetensors must have opened the file before, since it checks the
    header's size.
    """
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_object(file.read(size), f"the header of {path}")
    for key in header:
        if not key.isprintable() or len(key) > _MAX_KEY_LENGTH:
            raise ValueError(
                f"{path} has a tensor with the key {short_text(key)}; legal are at "
                f"most {_MAX_KEY_LENGTH} printable characters."
            )


def require_finite(tensor: Tensor, where: str, advice: str) -> None:
    """Raise a ValueError if a value is NaN or inf; its message says that ``where`` holds
    such values, and gives ``advice``."""
    # If a value is NaN or inf, so is the minimum or the maximum. aminmax copies
    # nothing.
    smallest, largest = torch.aminmax(tensor)
    if bool(smallest.isfinite()) and bool(largest.isfinite()):
        return
    number = int(tensor.isfinite().logical_not().sum())
    raise ValueError(
        f"{where} holds {number} of {tensor.numel()} values that are NaN or inf; "
        f"weights must be finite. {advice}, or take a checkpoint from before the "
        "training diverged."
    )


def progress_bar[Item](items: Collection[Item], label: str) -> Iterable[Item]:
    """The ``items``. On rank 0, iterating over them shows a progress bar named
    ``label``, if stderr is a terminal and tqdm is installed."""
    if not sys.stderr.isatty() or (dist.is_initialized() and dist.get_rank()):
        return items
    try:
        from tqdm import tqdm
    except ImportError:
        return items
    return tqdm(items, desc=label, unit="part")


def write_folder(
    target: str | Path, like: SafetensorsFolder, read: Callable[[str], Tensor]
) -> None:
    """Write the new folder ``target``: the files of ``like``, but with ``read(key)`` in
    place of each tensor ``key``.

    The other files of ``like`` are copied, except those that may hold the old weights;
    a warning counts these.
    """
    from safetensors.torch import save_file

    copied, left_out = like.other_files()
    if left_out:
        logger.warning(
            "%d files of %s are not copied, because they may hold old weights; the "
            "first is %s.",
            len(left_out),
            one_line(like.folder),
            one_line(left_out[0]),
        )
    with new_folder(target) as folder:
        for path in copied:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(like.folder / path, folder / path)
        if (like.folder / INDEX_FILE).is_file():
            shutil.copyfile(like.folder / INDEX_FILE, folder / INDEX_FILE)
        total_bytes = 0
        for name, file in progress_bar(like.files.items(), "export"):
            tensors = {}
            for key in file.offset_keys():
                tensor = read(key).detach().cpu()
                # safetensors refuses tensors that share storage, as several tensors of
                # one fused projection do.
                tensors[key] = tensor.clone(memory_format=torch.contiguous_format)
                total_bytes += tensor.nbytes
            save_file(tensors, folder / name, metadata=file.metadata() or None)
        # The copied index has the size of the old tensors; fp32 gates may be larger.
        index = folder / INDEX_FILE
        if index.is_file():
            content = read_object(index)
            if (
                content.get("metadata", {}).get("total_size", total_bytes)
                != total_bytes
            ):
                content["metadata"]["total_size"] = total_bytes
                index.write_text(json.dumps(content, indent=2) + "\n")


class Difference(NamedTuple):
    """One tensor that differs between two folders."""

    key: str
    description: str  # how the tensor differs

    def __str__(self) -> str:
        return one_line(f"{self.key}: {self.description}")


def compare_folders(left: str | Path, right: str | Path) -> Iterator[Difference]:
    """Yield a `Difference` for each tensor that is only in ``left`` or only in
    ``right``, and for each whose dtype, shape or bits differ between the two."""
    left_files = SafetensorsFolder(left)
    right_files = SafetensorsFolder(right)
    for key in progress_bar(left_files.specs, "compare"):
        if key not in right_files.specs:
            yield Difference(key, f"only in {left}")
            continue
        left_spec = left_files.specs[key]
        right_spec = right_files.specs[key]
        if left_spec != right_spec:
            description = (
                f"{left_spec.dtype} {list(left_spec.shape)} against "
                f"{right_spec.dtype} {list(right_spec.shape)}"
            )
            yield Difference(key, description)
            continue
        left_tensor = left_files.read(key)
        right_tensor = right_files.read(key)
        if count := int((bits_of(left_tensor) != bits_of(right_tensor)).sum()):
            largest = (left_tensor.double() - right_tensor.double()).abs().max().item()
            description = (
                f"{count} of {left_tensor.numel()} differ, by at most {largest:.3g}"
            )
            yield Difference(key, description)
    for key in sorted(right_files.specs.keys() - left_files.specs.keys()):
        yield Difference(key, f"only in {right}")

"""Read the weights of a Hugging Face folder tensor by tensor; errors name the file or key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype (as safetensors spells it) and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


class SafetensorsFolder:
    """The weights of a Hugging Face folder: one ``model.safetensors``, or shards with an index.

    Opening maps the files and reads their headers; `read` touches one tensor.

    Attributes:
        files: the open files by name.
        file_of: the file's name of every key, in storage order.
        specs: dtype and shape of every key.

    Raises:
        FileNotFoundError: no weights, or a file of the index is missing.
        ValueError: a file is truncated or not safetensors, or index and files disagree.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self._index()
        names = [SINGLE_NAME] if index is None else sorted(set(index.values()))
        self.files = {name: self._opened(name) for name in names}
        self.file_of = {key: name for name in names for key in self.files[name].offset_keys()}
        self.specs = {key: self._spec(key) for key in self.file_of}
        misplaced = {
            key: name for key, name in (index or {}).items() if self.file_of.get(key) != name
        }
        unlisted = self.file_of.keys() - (index or self.file_of).keys()
        if misplaced or unlisted:
            key = min(misplaced or unlisted)
            where = f"in {misplaced[key]}" if misplaced else "nowhere"
            raise ValueError(
                f"{self.folder / INDEX_NAME} and the files disagree about "
                f"{len(misplaced) + len(unlisted)} tensors; the first is missing key {key!r}, "
                f"which the index puts {where}, and which is in {self.file_of.get(key, 'no file')}."
            )

    def __iter__(self) -> Iterator[str]:
        """Every key, in storage order."""
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def spec(self, key: str) -> TensorSpec:
        return self.specs[key]

    def read(self, key: str, expert: int | None = None) -> Tensor:
        """The tensor ``key``, or its slice ``[expert]`` without the rest."""
        file = self.files[self.file_of[key]]
        return file.get_tensor(key) if expert is None else file.get_slice(key)[expert]

    def other_files(self) -> Iterator[Path]:
        """Everything in the folder that is not a weight file, relative to it."""
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            if path.is_file() and not hidden and str(relative) not in self.files:
                yield relative

    def _index(self) -> dict[str, str] | None:
        path = self.folder / INDEX_NAME
        if not path.is_file():
            if (self.folder / SINGLE_NAME).is_file():
                return None
            raise FileNotFoundError(
                f"{self.folder} has no weights: neither {INDEX_NAME} nor {SINGLE_NAME}."
            )
        try:
            return dict(json.loads(path.read_text())["weight_map"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not an index of weights: it needs a 'weight_map' ({error})."
            ) from error

    def _spec(self, key: str) -> TensorSpec:
        name = self.file_of[key]
        view = self.files[name].get_slice(key)
        if view.get_dtype() not in TORCH_DTYPES:
            raise NotImplementedError(
                f"{key} in {self.folder / name} has dtype {view.get_dtype()}; known: "
                f"{', '.join(TORCH_DTYPES)}."
            )
        return TensorSpec(view.get_dtype(), tuple(view.get_shape()))

    def _opened(self, name: str) -> Any:
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

"""Read the weights of a Hugging Face folder tensor by tensor; errors name the file or key."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

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


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Dtype (as safetensors spells it) and shape of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def torch_dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileSpec:
    """One safetensors file: its name, its tensors in storage order, its free-form metadata."""

    name: str
    tensors: dict[str, TensorSpec]
    metadata: dict[str, str] = field(default_factory=dict)


class SafetensorsFolder:
    """The weights of a Hugging Face folder: one ``model.safetensors``, or shards with an index.

    Opening reads headers only; `read` touches one tensor.

    Raises:
        FileNotFoundError: no weights, or a file of the index is missing.
        ValueError: a file is truncated or not safetensors, or index and files disagree.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._open: OrderedDict[str, Any] = OrderedDict()
        index = self._index()
        self.files = [self._file_spec(name) for name in self._file_names(index)]
        self.file_of = {key: file.name for file in self.files for key in file.tensors}
        self.specs = {key: spec for file in self.files for key, spec in file.tensors.items()}
        self._check_index(index)

    def __iter__(self) -> Iterator[str]:
        """Every key, in storage order."""
        return iter(self.specs)

    def __len__(self) -> int:
        return len(self.specs)

    def spec(self, key: str) -> TensorSpec:
        return self.specs[key]

    def read(self, key: str, expert: int | None = None) -> Tensor:
        """The tensor ``key``, or its slice ``[expert]`` without the rest."""
        handle = self._handle(self.file_of[key])
        return handle.get_tensor(key) if expert is None else handle.get_slice(key)[expert]

    def other_files(self) -> Iterator[Path]:
        """Everything in the folder that is not a weight file, relative to it."""
        weights = {file.name for file in self.files}
        for path in sorted(self.folder.rglob("*")):
            relative = path.relative_to(self.folder)
            hidden = any(part.startswith(".") for part in relative.parts)
            if path.is_file() and not hidden and str(relative) not in weights:
                yield relative

    def _index(self) -> dict[str, str] | None:
        path = self.folder / INDEX_NAME
        if not path.is_file():
            return None
        try:
            return dict(json.loads(path.read_text())["weight_map"])
        except (json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(
                f"{path} is not an index of weights: it needs a 'weight_map' ({error})."
            ) from error

    def _file_names(self, index: dict[str, str] | None) -> list[str]:
        if index is None and not (self.folder / SINGLE_NAME).is_file():
            raise FileNotFoundError(
                f"{self.folder} has no weights: neither {INDEX_NAME} nor {SINGLE_NAME}."
            )
        return [SINGLE_NAME] if index is None else sorted(set(index.values()))

    def _check_index(self, index: dict[str, str] | None) -> None:
        if index is None:
            return
        misplaced = sorted(k for k, name in index.items() if self.file_of.get(k) != name)
        unlisted = sorted(self.file_of.keys() - index.keys())
        if misplaced or unlisted:
            key = (misplaced or unlisted)[0]
            where = f"in {index[key]}" if misplaced else "nowhere"
            raise ValueError(
                f"{self.folder / INDEX_NAME} and the files disagree about "
                f"{len(misplaced) + len(unlisted)} tensors; the first is missing key {key!r}, "
                f"which the index puts {where}, and which is in {self.file_of.get(key, 'no file')}."
            )

    def _file_spec(self, name: str) -> FileSpec:
        handle = self._handle(name)
        specs = {}
        for key in handle.offset_keys():
            view = handle.get_slice(key)
            if view.get_dtype() not in TORCH_DTYPES:
                raise NotImplementedError(
                    f"{key} in {self.folder / name} has dtype {view.get_dtype()}; known: "
                    f"{', '.join(TORCH_DTYPES)}."
                )
            specs[key] = TensorSpec(view.get_dtype(), tuple(view.get_shape()))
        return FileSpec(name, specs, handle.metadata() or {})

    def _handle(self, name: str) -> Any:
        from safetensors import SafetensorError, safe_open

        if name in self._open:
            self._open.move_to_end(name)
            return self._open[name]
        path = self.folder / name
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing.")
        try:
            handle = safe_open(path, framework="pt")
        except SafetensorError as error:
            raise ValueError(
                f"{path} is truncated or not a safetensors file ({path.stat().st_size} bytes): "
                f"{error}. Download it again."
            ) from error
        self._open[name] = handle
        if len(self._open) > 8:  # Mapped files. Enough if a layer's tensors are in two.
            self._open.popitem(last=False)
        return handle

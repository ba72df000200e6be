"""Reads distributed checkpoints of unknown origin without running code from them.

The file ``.metadata`` of a checkpoint is a pickle. Objects that are not tensors are
pickles too, in ``common.pt`` or in the files of tensors. torch and Megatron unpickle any
class, and a class may run any code.
"""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

# Module -> the names from it that the ``.metadata`` of a checkpoint needs.
_LEGAL_NAMES = {
    "builtins": {"set", "frozenset", "bytearray"},
    "collections": {"OrderedDict"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},  # Python 3.13
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    # torch 2.15 stores the plan of a save
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    # torch before 2.3
    "torch.distributed._shard.sharded_tensor.metadata": {
        "MEM_FORMAT_ENCODING",
        "TensorProperties",
    },
}

# The fields that ``.metadata`` may have for a tensor, and their types. torch 2.15 adds
# strides, which nobody reads (`.checkpoints.leave_strides_out`).
_TENSOR_PROPERTIES = {
    "dtype": torch.dtype,
    "layout": torch.layout,
    "requires_grad": bool,
    "memory_format": torch.memory_format,
    "pin_memory": bool,
    "strides": object,
}

# torch reads these environment variables.
_FORCE_WEIGHTS_ONLY = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"
_FORCE_NO_WEIGHTS_ONLY = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"


class _MetadataUnpickler(pickle.Unpickler):
    """Unpickles the classes that a ``.metadata`` file needs, and no others."""

    def find_class(self, module_name: str, name: str, /) -> object:
        """The object ``name`` of the module if it is in _LEGAL_NAMES or is a dtype of
        torch; else raise an UnpicklingError.

        pickle calls this method for each global that the file names.
        """
        if name in _LEGAL_NAMES.get(module_name, ()):
            return super().find_class(module_name, name)
        if module_name == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype
        ):
            return getattr(torch, name)
        # This is the message of torch's weights_only=True; `why_refused` searches for
        # it.
        raise pickle.UnpicklingError(f"Unsupported global: GLOBAL {module_name}.{name}")


def why_refused(error: BaseException) -> str | None:
    """The reason, in one line, if ``error`` refuses a class in a pickle; else None."""
    if isinstance(error, CheckpointException):
        # failures: rank -> (its error, a traceback); one rank's error is enough
        error = next(failure for failure, _ in error.failures.values())
    found = re.search(r"GLOBAL ([\w.]+)", str(error))
    if found is None or not isinstance(error, pickle.UnpicklingError):
        return None
    return (
        f"its pickles load {found[1]}, which no checkpoint needs and which may run "
        "code of whoever wrote it"
    )


@contextmanager
def untrusted_checkpoint() -> Iterator[None]:
    """In this context torch and Megatron read checkpoints without running code from
    them.

    ``.metadata`` may have only the classes that a checkpoint needs, and may name only
    files in its own folder. Objects are loaded with torch's ``weights_only=True``, even
    if Megatron passes ``weights_only=False``. Classes given to
    ``torch.serialization.add_safe_globals`` are legal in objects.

    Raises:
        ValueError: a pickle has another class, or ``.metadata`` has another form.
    """
    reader_class: Any = filesystem.FileSystemReader
    torch_read_metadata = reader_class.read_metadata
    names = (_FORCE_WEIGHTS_ONLY, _FORCE_NO_WEIGHTS_ONLY)
    values_before = {name: os.environ.pop(name, None) for name in names}
    refusals: list[Exception] = []

    def read_metadata(
        reader: filesystem.FileSystemReader, *args: object, **kwargs: object
    ) -> Metadata:
        """Call `_read_metadata`; keep its error in ``refusals``, since torch hides the
        error from its callers."""
        try:
            return _read_metadata(reader, *args, **kwargs)
        except (pickle.UnpicklingError, ValueError) as error:
            refusals.append(error)
            raise

    os.environ[_FORCE_WEIGHTS_ONLY] = "1"
    reader_class.read_metadata = read_metadata
    try:
        yield
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        cause = refusals[0] if refusals else error
        if reason := why_refused(cause):
            raise ValueError(f"The checkpoint is refused: {reason}.") from error
        raise
    finally:
        reader_class.read_metadata = torch_read_metadata
        for name, value in values_before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _read_metadata(
    reader: filesystem.FileSystemReader, *args: Any, **kwargs: Any
) -> Metadata:
    """Replaces ``FileSystemReader.read_metadata``: unpickle by `_MetadataUnpickler`,
    then check the result."""
    path = Path(reader._get_metadata_path(kwargs.get("rank")))
    with path.open("rb") as file:
        try:
            metadata = _MetadataUnpickler(file).load()
        except (pickle.UnpicklingError, OSError):
            raise
        except Exception as error:  # wrong bytes can make unpickling raise any error
            raise ValueError(f"{path} is no pickle of a table: {error}") from error
    try:
        _check_metadata(metadata, path)
    except AttributeError as error:
        raise ValueError(
            f"{path} has an object without one of its fields: {error}"
        ) from error
    # as torch's own method does at its end
    if getattr(metadata, "storage_meta", None) is None:
        metadata.storage_meta = StorageMeta()
    cast(StorageMeta, metadata.storage_meta).load_id = reader.load_id
    return metadata


def _check_metadata(metadata: object, path: Path) -> None:
    """Raise a ValueError unless ``metadata``, the content of ``path``, has the fields
    that torch reads, with values of legal types.

    A pickle can make an object of a legal class with any content.
    """
    tensors = getattr(metadata, "state_dict_metadata", None)
    stored = getattr(metadata, "storage_data", None)
    is_metadata = isinstance(metadata, Metadata)
    if not is_metadata or not isinstance(tensors, dict) or not isinstance(stored, dict):
        raise ValueError(f"{path} is not a table of tensors and their files")
    for key, entry in tensors.items():
        is_object = isinstance(entry, BytesStorageMetadata)
        if not isinstance(key, str) or not (is_object or _describes_tensor(entry)):
            raise ValueError(
                f"{path} has an entry {key!r} that is neither a tensor nor an object"
            )
    for index, entry in stored.items():
        name = getattr(entry, "relative_path", None)
        if (
            not isinstance(name, str)
            or Path(name).name != name
            or name in ("", ".", "..")
        ):
            raise ValueError(
                f"{path} names the file {name!r}; legal are names inside the folder"
            )
        if not _describes_stored_chunk(index, entry):
            raise ValueError(f"{path} has an invalid place in {name}")


def _describes_tensor(entry: object) -> bool:
    """Whether ``entry`` describes a tensor: its size, properties and chunks."""
    if not isinstance(entry, TensorStorageMetadata) or not _is_legal_size(entry.size):
        return False
    properties = getattr(entry.properties, "__dict__", {})
    if "dtype" not in properties or not all(
        isinstance(value, _TENSOR_PROPERTIES.get(name, ()))
        for name, value in properties.items()
    ):
        return False
    if not isinstance(entry.chunks, list):
        return False
    return all(_describes_chunk(chunk, entry.size) for chunk in entry.chunks)


def _describes_chunk(chunk: object, size: torch.Size) -> bool:
    """Whether ``chunk`` describes a box of elements inside a tensor of ``size``."""
    if not isinstance(chunk, ChunkStorageMetadata):
        return False
    if not (_is_legal_size(chunk.offsets) and _is_legal_size(chunk.sizes)):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    ends = map(sum, zip(chunk.offsets, chunk.sizes, strict=True))
    return all(end <= whole for end, whole in zip(ends, size, strict=True))


def _describes_stored_chunk(index: object, entry: object) -> bool:
    """Whether ``index`` names a chunk of a tensor and ``entry`` its bytes in a
    file."""
    if not isinstance(index, MetadataIndex) or not isinstance(index.fqn, str):
        return False
    if not isinstance(entry, filesystem._StorageInfo):
        return False
    numbers = entry.offset, entry.length
    return all(isinstance(number, int) and number >= 0 for number in numbers)


def _is_legal_size(value: object) -> bool:
    return isinstance(value, torch.Size) and all(length >= 0 for length in value)

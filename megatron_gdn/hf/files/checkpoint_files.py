"""Megatron's distributed checkpoints, written and read a few tensors at a time by one process.

A checkpoint folder, as Megatron's ``--save`` writes it and ``--load`` reads it:

    latest_checkpointed_iteration.txt    "release", or the number of the newest iteration
    release/ or iter_0000160/
        metadata.json                    which format this is
        .metadata                        every key's shape, dtype and place
        __0_0.distcp, __1_0.distcp, ...  tensors, and the common state

The files are those of ``torch.distributed.checkpoint``. Its own `save` needs every tensor in memory
at once. Here the files are written one after the other, each as if by its own rank.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    create_default_global_save_plan,
)
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    ReadItem,
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from .checkpoint_keys import StoredPart

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_FORMAT = "metadata.json"
_COMMON = "common_state"


@dataclass(frozen=True, slots=True)
class TensorToWrite:
    """One box (part) of the tensor under one key; ``read`` computes it when it is written."""

    part: StoredPart
    dtype: torch.dtype
    read: Callable[[], Tensor]


class _SavePlanner(DefaultSavePlanner):
    """Computes each item's content when the writer requests it."""

    def __init__(self, contents: dict[MetadataIndex, Callable[[], Any]]) -> None:
        super().__init__()
        self._contents = contents

    def resolve_data(self, write_item: WriteItem) -> Any:
        return self._contents[write_item.index]()


def write_checkpoint(
    folder: Path,
    files: Sequence[Sequence[TensorToWrite]],
    objects: dict[str, Any],
    common: dict[str, Any],
    progress: Callable[[Sequence], Any] = iter,
) -> None:
    """Write one checkpoint into ``folder``.

    Args:
        folder: the folder of one iteration.
        files: the tensors of each file; those of one file are in memory together.
        objects: whole objects by their unique key (``.../shard_0_1``), for the first file.
        common: all that is not a tensor: arguments, iteration, metadata of the content.
        progress: wraps the sequence of files.
    """
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    common_key = ShardedObject(_COMMON, None, (1,), (0,)).unique_key
    contents: dict[MetadataIndex, Callable[[], Any]] = {}
    plans: list[list[WriteItem]] = []
    for tensors in files:
        plans.append([])
        for tensor in tensors:
            index = MetadataIndex(tensor.part.key, torch.Size(tensor.part.offsets))
            contents[index] = tensor.read
            plans[-1].append(_tensor_item(index, tensor))
    for key, value in {**objects, common_key: common}.items():
        index = MetadataIndex(key)
        # Megatron stores a list, one entry for each shard of the key that the rank holds.
        contents[index] = lambda value=value: _saved([value])
        plans[0].append(WriteItem(index, WriteItemType.BYTE_IO))

    planner = _SavePlanner(contents)
    writer = FileSystemWriter(folder, single_file_per_rank=True, thread_count=1)
    writer.set_up_storage_writer(is_coordinator=True)
    global_plans, metadata = create_default_global_save_plan([SavePlan(items) for items in plans])
    results = []
    for plan in progress(writer.prepare_global_plan(global_plans)):
        results.append(writer.write_data(plan, planner).wait())
    writer.finish(metadata, results)
    save_config(CheckpointingConfig("torch_dist", 1), str(folder))


def _tensor_item(index: MetadataIndex, tensor: TensorToWrite) -> WriteItem:
    part = tensor.part
    return WriteItem(
        index,
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(part.offsets), torch.Size(part.sizes)),
            properties=TensorProperties(dtype=tensor.dtype),
            size=torch.Size(part.shape),
        ),
    )


def _saved(value: Any) -> io.BytesIO:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer


class _LoadPlanner(DefaultLoadPlanner):
    """Writes what is read into ``box``."""

    def __init__(self, box: Tensor) -> None:
        super().__init__()
        self._box = box

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        view = self._box
        for dim, (start, size) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            view = view.narrow(dim, start, size)
        return view

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        pass


class CheckpointReader:
    """One distributed checkpoint, read box by box.

    Args:
        folder: a folder of checkpoints (its newest is read) or the folder of one iteration.

    Attributes:
        tensors: whole shape, dtype and parts of every tensor, by key.
        objects: the unique keys of everything else.

    Raises:
        FileNotFoundError, ValueError: no readable distributed checkpoint; the message has the path.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = find_checkpoint(folder)
        self._reader = FileSystemReader(self.folder)
        try:
            self._metadata = self._reader.read_metadata()
        except (EOFError, UnpicklingError) as error:
            raise ValueError(f"{self.folder / '.metadata'} is truncated: {error}.") from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        stored = self._metadata.state_dict_metadata.items()
        self.tensors = {k: v for k, v in stored if isinstance(v, TensorStorageMetadata)}
        self.objects = {key for key, _ in stored} - self.tensors.keys()

    def common_state(self) -> dict[str, Any]:
        """All that is not a tensor: arguments, iteration, metadata of the content."""
        from megatron.core.dist_checkpointing import load_common_state_dict

        with warnings.catch_warnings():
            # It warns that a single process reads.
            warnings.simplefilter("ignore", UserWarning)
            return load_common_state_dict(self.folder)

    def read(
        self, key: str, offsets: Sequence[int] | None = None, sizes: Sequence[int] | None = None
    ) -> Tensor:
        """The box of ``key`` at ``offsets``, or all of it, in the stored dtype.

        Raises:
            ValueError: no such key, or the files do not hold the whole box.
        """
        if key not in self.tensors:
            raise ValueError(f"{self.folder} has no tensor {key!r}.")
        stored = self.tensors[key]
        offsets = torch.Size(offsets or (0,) * len(stored.size))
        sizes = torch.Size(stored.size if sizes is None else sizes)
        items = create_read_items_for_chunk_list(
            key, stored, [ChunkStorageMetadata(offsets, sizes)]
        )
        if sum(item.lengths.numel() for item in items) != sizes.numel():
            raise ValueError(
                f"{self.folder} holds {key} as {tuple(stored.size)}, which lacks some of the box "
                f"{tuple(sizes)} at {tuple(offsets)}: it was made with other sizes."
            )
        box = torch.empty(sizes, dtype=stored.properties.dtype)
        try:
            self._reader.read_data(LoadPlan(items), _LoadPlanner(box)).wait()
        except (RuntimeError, EOFError, UnpicklingError) as error:
            places = (self._metadata.storage_data[item.storage_index] for item in items)
            names = sorted({place.relative_path for place in places})
            raise ValueError(
                f"{key} cannot be read from {', '.join(names)} in {self.folder}, which is "
                f"truncated or damaged: {error}."
            ) from error
        return box


def is_checkpoint(folder: str | Path) -> bool:
    """Whether ``folder`` has a tracker file or the ``metadata.json`` of one iteration."""
    folder = Path(folder)
    return (folder / TRACKER).is_file() or (folder / _FORMAT).is_file()


def find_checkpoint(folder: str | Path) -> Path:
    """The folder of one iteration: ``folder`` itself, or the one its tracker file names.

    Raises:
        FileNotFoundError: that folder has no ``metadata.json``.
        ValueError: the tracker file holds neither ``release`` nor a number.
    """
    folder = Path(folder)
    found = folder
    if (folder / TRACKER).is_file():
        name = (folder / TRACKER).read_text().strip()
        if name != RELEASE and not name.isdigit():
            raise ValueError(
                f"{folder / TRACKER} says {name!r}, neither {RELEASE!r} nor an iteration; name the "
                f"folder of one iteration instead."
            )
        found = folder / (name if name == RELEASE else f"iter_{int(name):07d}")
    if not (found / _FORMAT).is_file():
        raise FileNotFoundError(
            f"{found} is no distributed checkpoint: it has no {_FORMAT}. Give a folder that "
            f"Megatron's --save, or import, made (with {TRACKER} in it), or one of its iterations."
        )
    return found

"""Hugging Face folder to a folder of Megatron shards, and back to the same files.

An imported folder:

    manifest.json                     format, sizes, source files, dtype and shape of each tensor
    tp_rank_00_of_02/*.safetensors    Megatron parameters of one rank, a file for each layer
    hf_files/                         the source's other files (config.json, tokenizer, index)
    passthrough.safetensors           tensors no Megatron text model has (mtp.*, model.visual.*)
    originals.safetensors             norm gains that Megatron stores around another centre

Parameter names are those of a Transformer Engine model with global layer and expert numbers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor

from .legal_weights import check_dtypes, read_pieces
from .model_config import read_hf_config
from .model_map import Architecture
from .plan import check_aliases
from .progress import progress_bar
from .safetensors_reader import (
    DTYPE_NAMES,
    INDEX_NAME,
    FileSpec,
    SafetensorsFolder,
    TensorSpec,
)
from .safetensors_writer import StreamingWriter, new_folder
from .tensor_map import TensorMap
from .view import HFView, SourceRecord

FORMAT = "megatron_gdn.hf/1"
MANIFEST = "manifest.json"
_OTHER_FILES = "hf_files"
_PASSTHROUGH = "passthrough.safetensors"
_ORIGINALS = "originals.safetensors"


def import_folder(
    source: str | Path,
    target: str | Path,
    tp_size: int = 1,
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
    vocab_divisible_by: int = 1,
    progress: bool = False,
) -> None:
    """Convert a Hugging Face folder into Megatron shards; see the top of this file for the form.

    Args:
        source: a folder with ``config.json`` and safetensors weights.
        target: a new folder; it appears only when it is complete.
        tp_size: number of tensor-parallel ranks.
        model: "hybrid" or "gpt", for the layer numbers.
        zero_centered_gamma: the Megatron model's ``layernorm_zero_centered_gamma``.
        vocab_divisible_by: pad the vocabulary with zero rows to a multiple of this times
            ``tp_size`` (Megatron's ``make_vocab_size_divisible_by``).
        progress: show a bar.

    Raises:
        FileNotFoundError, FileExistsError, ValueError, NotImplementedError: said by name; nothing
        is left behind.
    """
    if tp_size < 1 or vocab_divisible_by < 1:
        raise ValueError(
            f"tp_size={tp_size} and vocab_divisible_by={vocab_divisible_by} must be at least 1."
        )
    config = read_hf_config(source)
    config.gdn.shard(tp_size)
    weights = SafetensorsFolder(source)
    record = SourceRecord(config, dict(weights.specs))
    plan = record.plan(model, zero_centered_gamma)
    check_aliases(weights, plan)
    check_dtypes(weights, plan)
    multiple = vocab_divisible_by * tp_size
    vocab_rows = -(-config.vocab_size // multiple) * multiple

    with new_folder(target) as folder:
        groups = _by_layer(plan.maps)
        for file_name, entries in progress_bar(groups.items(), "import", progress):
            _write_layer(folder, file_name, entries, weights, tp_size, vocab_rows)
        _copy_tensors(folder / _PASSTHROUGH, weights, plan.passthrough)
        shifted = [s.key for entry in plan.maps if entry.shift for s in entry.sources]
        _copy_tensors(folder / _ORIGINALS, weights, shifted)
        others = list(weights.other_files())
        for path in others:
            (folder / _OTHER_FILES / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(weights.folder / path, folder / _OTHER_FILES / path)
        manifest = {
            "format": FORMAT,
            "architecture": config.architecture,
            "hybrid_layer_pattern": config.hybrid_layer_pattern,
            "tp_size": tp_size,
            "model": model,
            "zero_centered_gamma": zero_centered_gamma,
            "vocab_rows": vocab_rows,
            "files": [asdict(file) for file in weights.files],
            "other_files": [str(path) for path in others],
            "passthrough": plan.passthrough,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def export_folder(
    source: str | Path, target: str | Path, fp32_gates: bool = False, progress: bool = False
) -> None:
    """Convert an imported folder back: same files, same keys in each, same dtypes.

    Args:
        source: a folder made by `import_folder`, its shards possibly trained since.
        target: a new folder; it appears only when it is complete.
        fp32_gates: write ``A_log`` and ``dt_bias`` as F32 even where the source had BF16. Without
            it they are rounded to what the source had, and a warning names those that lost bits.
        progress: show a bar.
    """
    imported = ImportedFolder(source, fp32_gates)
    with new_folder(target) as folder:
        for name in imported.manifest["other_files"]:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(imported.folder / _OTHER_FILES / name, folder / name)
        write_hf_files(folder, imported.files, imported.read, progress)
    imported.warn_of_rounded_gates()


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


class ImportedFolder:
    """An imported folder, read as the Hugging Face tensors it stands for.

    Raises:
        FileNotFoundError: no manifest, or a rank's folder is missing.
        ValueError: the manifest is of another format, or a shard file is truncated.
    """

    def __init__(self, folder: str | Path, fp32_gates: bool = False) -> None:
        self.folder = Path(folder)
        path = self.folder / MANIFEST
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist; {folder} is no imported folder.")
        self.manifest = json.loads(path.read_text())
        if self.manifest.get("format") != FORMAT:
            raise ValueError(
                f"{path} says format {self.manifest.get('format')!r}; this version reads {FORMAT}."
            )
        specs = {
            key: TensorSpec(spec["dtype"], tuple(spec["shape"]))
            for file in self.manifest["files"]
            for key, spec in file["tensors"].items()
        }
        self.record = SourceRecord(
            read_hf_config(self.folder / _OTHER_FILES), specs, fp32_gates=fp32_gates
        )
        originals = _OneFile(self.folder / _ORIGINALS)
        self.record.originals = {key: originals.read(key) for key in originals}
        self._passthrough = _OneFile(self.folder / _PASSTHROUGH)
        self._ranks = [
            _RankFolder(self.folder / rank_folder_name(rank, self.manifest["tp_size"]))
            for rank in range(self.manifest["tp_size"])
        ]
        plan = self.record.plan(self.manifest["model"], self.manifest["zero_centered_gamma"])
        self._view = HFView(plan, self.record, self._read_shards)

    @property
    def files(self) -> list[FileSpec]:
        """The files an export writes."""
        return [
            FileSpec(
                file["name"],
                {key: self.record.spec(key) for key in file["tensors"]},
                file["metadata"],
            )
            for file in self.manifest["files"]
        ]

    def __iter__(self) -> Iterator[str]:
        return iter(self.record.specs)

    def __len__(self) -> int:
        return len(self.record.specs)

    def spec(self, key: str) -> TensorSpec:
        return self.record.spec(key)

    def read(self, key: str) -> Tensor:
        return self._view.read(key) if key in self._view else self._passthrough.read(key)

    def warn_of_rounded_gates(self) -> None:
        """Say which decay parameters read so far the source's dtype does not hold."""
        self._view.warn_of_rounded_gates()

    def rank_state(self, rank: int) -> dict[str, Tensor]:
        """Every parameter of one rank."""
        state = self._ranks[rank]
        return {name: state.read(name) for name in state}

    def _read_shards(self, entry: TensorMap) -> list[Tensor]:
        return [rank.read(entry.name) for rank in self._ranks]


def rank_folder_name(rank: int, tp_size: int) -> str:
    return f"tp_rank_{rank:02d}_of_{tp_size:02d}"


def _by_layer(maps: Iterable[TensorMap]) -> dict[str, list[TensorMap]]:
    """Maps grouped by the file that holds them: one file for each Megatron layer."""
    groups: dict[str, list[TensorMap]] = {}
    for entry in maps:
        parts = entry.name.split(".")
        layer = f"layer_{int(parts[2]):04d}" if parts[1] == "layers" else parts[0]
        groups.setdefault(f"{layer}.safetensors", []).append(entry)
    return groups


def _write_layer(
    folder: Path,
    file_name: str,
    entries: Sequence[TensorMap],
    weights: SafetensorsFolder,
    tp_size: int,
    vocab_rows: int,
) -> None:
    def shards_of(entry: TensorMap, pieces: list[Tensor]) -> list[Tensor]:
        full = entry.to_megatron(pieces)
        return entry.shards(pad_rows(full, vocab_rows) if entry.pad_rows else full, tp_size)

    # Meta tensors give every shard's dtype and shape before any weight is read.
    specs: dict[str, TensorSpec] = {}
    for entry in entries:
        pieces = [
            torch.empty(s.piece_shape, dtype=weights.spec(s.key).torch_dtype, device="meta")
            for s in entry.sources
        ]
        shard = shards_of(entry, pieces)[0]
        specs[entry.name] = TensorSpec(DTYPE_NAMES[shard.dtype], tuple(shard.shape))
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                StreamingWriter(folder / rank_folder_name(r, tp_size), FileSpec(file_name, specs))
            )
            for r in range(tp_size)
        ]
        for entry in entries:
            pieces = read_pieces(weights, entry)
            for writer, piece in zip(writers, shards_of(entry, pieces), strict=True):
                writer.write(entry.name, piece)


def pad_rows(full: Tensor, rows: int) -> Tensor:
    """``full`` with zero rows added at its end."""
    return torch.cat([full, full.new_zeros(rows - full.shape[0], *full.shape[1:])])


def _copy_tensors(path: Path, weights: SafetensorsFolder, keys: Sequence[str]) -> None:
    spec = FileSpec(path.name, {key: weights.spec(key) for key in keys})
    with StreamingWriter(path.parent, spec) as writer:
        for key in keys:
            writer.write(key, weights.read(key))


class _OneFile(SafetensorsFolder):
    """A single safetensors file by its own name."""

    def __init__(self, path: Path) -> None:
        self._name = path.name
        super().__init__(path.parent)

    def _index(self) -> None:
        return None

    def _file_names(self, index: dict[str, str] | None) -> list[str]:
        return [self._name]


class _RankFolder(SafetensorsFolder):
    """All safetensors files of one rank's folder."""

    def _index(self) -> None:
        return None

    def _file_names(self, index: dict[str, str] | None) -> list[str]:
        if not self.folder.is_dir():
            raise FileNotFoundError(f"{self.folder} is missing.")
        return sorted(path.name for path in self.folder.glob("*.safetensors"))

"""Hugging Face folder to a Megatron distributed checkpoint, and a checkpoint back to such a folder.

The checkpoint is one that Megatron's ``--load`` takes at any tensor, pipeline, expert and data
parallel size: weights alone, as a *release* (training starts at iteration 0 with a new optimizer).
An export reads the Hugging Face folder again, for file names, dtypes and the tensors that no
Megatron text model has.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from .files.checkpoint_files import (
    RELEASE,
    TRACKER,
    CheckpointReader,
    TensorToWrite,
    write_checkpoint,
)
from .files.checkpoint_keys import StoredPart, extra_state_keys, joined, stored_parts
from .files.safetensors_reader import FileSpec, SafetensorsFolder, TensorSpec
from .files.safetensors_writer import new_folder, write_hf_files
from .legal_weights import check_dtypes, read_pieces
from .maps.model_map import Architecture
from .maps.tensor_map import TensorMap
from .megatron_arguments import megatron_arguments
from .model_config import read_hf_config
from .plan import check_aliases
from .progress import progress_bar
from .view import HFView, SourceRecord

# Megatron's own saves hold these: how a model of this version shards its state.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}


def import_folder(
    source: str | Path,
    target: str | Path,
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
    progress: bool = False,
) -> None:
    """Convert a Hugging Face folder into a Megatron checkpoint, one Megatron layer at a time.

    Args:
        source: a folder with ``config.json`` and safetensors weights.
        target: a new folder; it appears only when it is complete.
        model: "hybrid" or "gpt", for the layer numbers.
        zero_centered_gamma: the Megatron model's ``layernorm_zero_centered_gamma``.
        progress: show a bar.

    Raises:
        FileNotFoundError, FileExistsError, ValueError, NotImplementedError: the message names the
        cause; nothing is left behind.
    """
    config = read_hf_config(source)
    weights = SafetensorsFolder(source)
    plan = SourceRecord(config, dict(weights.specs)).plan(model, zero_centered_gamma)
    check_aliases(weights, plan)
    check_dtypes(weights, plan)
    common = {
        "args": megatron_arguments(config, model, zero_centered_gamma),
        "checkpoint_version": 3.0,
        "iteration": 0,
        "content_metadata": _CONTENT,
    }
    with new_folder(target) as folder:
        (folder / RELEASE).mkdir()
        write_checkpoint(
            folder / RELEASE,
            list(_by_layer(plan.maps, weights)),
            dict.fromkeys(extra_state_keys(plan.maps)),
            common,
            lambda files: progress_bar(files, "import", progress, len(files)),
        )
        (folder / TRACKER).write_text(RELEASE)


def _by_layer(
    maps: Sequence[TensorMap], weights: SafetensorsFolder
) -> Iterator[list[TensorToWrite]]:
    """What each file of the checkpoint holds: one Megatron layer."""
    groups: dict[str, list[TensorToWrite]] = {}
    for entry in maps:
        # Meta tensors give dtype and shape before any weight is read.
        pieces = [
            torch.empty(s.piece_shape, dtype=weights.spec(s.key).torch_dtype, device="meta")
            for s in entry.sources
        ]
        full = entry.to_megatron(pieces)
        parts = stored_parts(entry, full.shape)
        read = _ReadOnce(entry, weights)
        group = groups.setdefault(".".join(entry.name.split(".")[:3]), [])
        for part in parts:
            last = part is parts[-1]
            group.append(TensorToWrite(part, full.dtype, partial(read, part, last)))
    yield from groups.values()


class _ReadOnce:
    """The whole tensor of one map, read for its first part and dropped after its last."""

    def __init__(self, entry: TensorMap, weights: SafetensorsFolder) -> None:
        self._entry, self._weights = entry, weights
        self._full: Tensor | None = None

    def __call__(self, part: StoredPart, last: bool) -> Tensor:
        if self._full is None:
            self._full = self._entry.to_megatron(read_pieces(self._weights, self._entry))
        content = part.of(self._full).contiguous()
        if last:
            self._full = None
        return content


def export_folder(
    source: str | Path,
    target: str | Path,
    like: str | Path,
    fp32_gates: bool = False,
    zero_centered_gamma: bool | None = None,
    progress: bool = False,
) -> None:
    """Convert a checkpoint to the files of ``like``: the same keys in each, the same dtypes.

    Args:
        source: a folder of checkpoints (the newest is read), or the folder of one iteration:
            imported or trained since, saved at any parallel sizes.
        target: a new folder; it appears only when it is complete.
        like: the Hugging Face folder the weights were imported from. Files that are not weights and
            tensors that a Megatron text model does not have (``mtp.``, ``model.visual.``) are
            copied from it.
        fp32_gates: write ``A_log`` and ``dt_bias`` as F32 even where ``like`` has BF16. Without
            it they are rounded to what ``like`` has, and a warning names those that lost bits.
        zero_centered_gamma: the trained model's ``layernorm_zero_centered_gamma``. None: the
            value in the checkpoint's arguments, or True if it has none.
        progress: show a bar.

    Raises:
        FileNotFoundError, FileExistsError, ValueError: the message names the cause; nothing is
            left behind.
    """
    weights = CheckpointWeights(source, like, fp32_gates, zero_centered_gamma)
    with new_folder(target) as folder:
        for path in weights.like.other_files():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(weights.like.folder / path, folder / path)
        write_hf_files(folder, weights.files, weights.read, progress)
    weights.warn_of_rounded_gates()


class CheckpointWeights:
    """A Megatron checkpoint, read as Hugging Face tensors.

    Args: as for `export_folder`.
    """

    def __init__(
        self,
        source: str | Path,
        like: str | Path,
        fp32_gates: bool = False,
        zero_centered_gamma: bool | None = None,
    ) -> None:
        self._checkpoint = CheckpointReader(source)
        self.like = SafetensorsFolder(like)
        self.record = SourceRecord.from_folder(like, fp32_gates)
        plan = self.record.plan(
            _architecture(self._checkpoint), _zero_centered(self._checkpoint, zero_centered_gamma)
        )
        self._refuse_another_model(plan.maps)
        self._view = HFView(plan, self.record, self._read_whole)

    @property
    def files(self) -> list[FileSpec]:
        """The files an export writes."""
        return self.record.files(self.like.files)

    def __iter__(self) -> Iterator[str]:
        return iter(self.record.specs)

    def __len__(self) -> int:
        return len(self.record.specs)

    def spec(self, key: str) -> TensorSpec:
        return self.record.spec(key)

    def read(self, key: str) -> Tensor:
        return self._view.read(key) if key in self._view else self.like.read(key)

    def warn_of_rounded_gates(self) -> None:
        """Warn of the decay parameters read so far that the source's dtype rounded."""
        self._view.warn_of_rounded_gates()

    def _read_whole(self, entry: TensorMap) -> list[Tensor]:
        """The whole Megatron tensor, as if one rank held it."""
        parts = stored_parts(entry, _whole_shape(entry))
        for part in parts:
            stored = tuple(self._checkpoint.tensors[part.key].size)
            # Every run may pad the vocabulary differently; the file's rows come first.
            rows = stored[0] if entry.pad_rows else 0
            if stored != (max(rows, part.shape[0]), *part.shape[1:]):
                raise ValueError(
                    f"{part.key} has shape {stored} in {self._checkpoint.folder}, but config.json "
                    f"of {self.like.folder} asks for {part.shape}."
                )
        read = self._checkpoint.read
        return [joined(entry, [read(part.key, part.offsets, part.sizes) for part in parts])]

    def _refuse_another_model(self, maps: Sequence[TensorMap]) -> None:
        """Refuse a checkpoint with other keys than ``like``: an export would lose weights."""
        known = {part.key for entry in maps for part in stored_parts(entry, _whole_shape(entry))}
        mine = {key for key in self._checkpoint.tensors if key.startswith(_MODEL_PREFIXES)}
        for keys, what in (
            (known - mine, "the checkpoint has no"),
            (mine - known, "the Hugging Face model has no place for"),
        ):
            if keys:
                more = f" (and {len(keys) - 1} more)" if len(keys) > 1 else ""
                if any(".adapter." in key for key in keys):
                    raise ValueError(
                        f"{self._checkpoint.folder} has adapters, {min(keys)}{more}, and does not "
                        f"tell their scale. Load it into a model with these adapters and call "
                        f"megatron_gdn.hf.save_hf_weights, which merges them."
                    )
                raise ValueError(
                    f"{self._checkpoint.folder} and {self.like.folder} are not the same model: "
                    f"{what} {min(keys)}{more}."
                )


# A checkpoint's other tensors are optimizer states.
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")


def _whole_shape(entry: TensorMap) -> tuple[int, ...]:
    pieces = [torch.empty(source.piece_shape, device="meta") for source in entry.sources]
    return tuple(entry.to_megatron(pieces).shape)


def _architecture(checkpoint: CheckpointReader) -> Architecture:
    if "decoder.final_norm.weight" in checkpoint.tensors:
        return "hybrid"
    if "decoder.final_layernorm.weight" in checkpoint.tensors:
        return "gpt"
    raise ValueError(
        f"{checkpoint.folder} holds neither a HybridModel (decoder.final_norm.weight) nor a "
        f"GPTModel (decoder.final_layernorm.weight)."
    )


def _zero_centered(checkpoint: CheckpointReader, wanted: bool | None) -> bool:
    """``layernorm_zero_centered_gamma`` of the run that saved the checkpoint."""
    args = checkpoint.common_state().get("args")
    # Older versions of Megatron named the attribute after the flag.
    said = getattr(args, "layernorm_zero_centered_gamma", getattr(args, "apply_layernorm_1p", None))
    if said is None:
        return True if wanted is None else wanted
    if wanted is not None and wanted != said:
        advice = "leave out --plain-norms" if said else "export with --plain-norms"
        raise ValueError(
            f"{checkpoint.folder} was saved with layernorm_zero_centered_gamma={said}; {advice}."
        )
    return said

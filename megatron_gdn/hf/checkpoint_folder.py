"""Hugging Face folder to a Megatron distributed checkpoint, and a checkpoint back to such a folder.

Both build the model that a launch builds, of local modules on the CPU, and use what a launch uses:
`load_hf_weights` and `save_hf_weights`, and Megatron's ``dist_checkpointing``. So both hold the
whole model in memory, each tensor in the dtype that it has in the files, and Megatron's reader
and writer second copies of the fused ones.

The checkpoint is one that Megatron's ``--load`` takes at any tensor, pipeline, expert and data
parallel size: weights alone, as a *release* (training starts at iteration 0 with a new optimizer).
An export reads the Hugging Face folder again, for file names, dtypes and the tensors that no
Megatron text model has.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import PickleError
from typing import Any

import torch

from .build import build_model, megatron_arguments
from .checkpoint_files import RELEASE, TRACKER, find_checkpoint
from .megatron_model import load_hf_weights, model_view, save_hf_weights
from .model_config import HFModelConfig, read_hf_config
from .model_map import Architecture
from .plan import and_more
from .safetensors_files import SafetensorsFolder, new_folder, refuse_existing
from .view import HFView, SourceRecord

# Megatron's own saves hold these: how a model of this version shards its state.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
# A checkpoint's other tensors are optimizer states.
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")
# Modules of Transformer Engine that have an ``_extra_state``, where local ones have none.
_STATEFUL_IN_TE = (
    *("out_norm", "q_layernorm", "k_layernorm", "pre_mlp_layernorm"),
    *("final_norm", "final_layernorm", "core_attention"),
)


def import_folder(
    source: str | Path,
    target: str | Path,
    model: Architecture = "hybrid",
    zero_centered_gamma: bool = True,
    progress: bool = False,
) -> None:
    """Convert a Hugging Face folder into a Megatron checkpoint.

    In a script, call it under ``if __name__ == "__main__":``; Megatron's writer starts a process.

    Args:
        source: a folder with ``config.json`` and safetensors weights.
        target: a new folder; it appears only when it is complete.
        model: "hybrid" or "gpt", for the layer numbers.
        zero_centered_gamma: the Megatron model's ``layernorm_zero_centered_gamma``.
        progress: show a bar.

    Raises:
        FileNotFoundError, FileExistsError, ValueError, NotImplementedError: the message names the
        cause; nothing is left behind.
        RuntimeError: torch.distributed runs several processes.
    """
    from megatron.core import dist_checkpointing

    from ..compat.one_process import in_one_process

    config = read_hf_config(source)
    common = {
        "args": megatron_arguments(config, model, zero_centered_gamma),
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    with new_folder(target) as folder, in_one_process():
        built = _on_cpu(config, model, zero_centered_gamma)
        load_hf_weights(built, source, progress, keep_dtypes=True)
        (folder / RELEASE).mkdir()
        state = _with_states_of_te(built.sharded_state_dict()) | common
        dist_checkpointing.save(state, str(folder / RELEASE), content_metadata=_CONTENT)
        (folder / TRACKER).write_text(RELEASE)


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
        RuntimeError: torch.distributed runs several processes.
    """
    from ..compat.one_process import in_one_process

    refuse_existing(target)
    with in_one_process():
        model = _loaded(source, like, zero_centered_gamma)
        save_hf_weights(model, target, like, progress=progress, fp32_gates=fp32_gates)


def checkpoint_view(source: str | Path, like: str | Path) -> HFView:
    """A checkpoint as the tensors that `export_folder` writes."""
    from ..compat.one_process import in_one_process

    with in_one_process():
        model = _loaded(source, like)
        return model_view(model, SourceRecord.from_folder(like), SafetensorsFolder(like))


def _on_cpu(config: HFModelConfig, model: Architecture, zero_centered_gamma: bool) -> Any:
    """The model with parameters that nobody filled, which take no memory yet."""
    return build_model(
        config,
        model,
        modules="local",
        dtype=torch.bfloat16,
        vocab_divisible_by=1,
        use_cpu_initialization=True,
        perform_initialization=False,
        layernorm_zero_centered_gamma=zero_centered_gamma,
    )[0]


def _with_states_of_te(state: dict[str, Any]) -> dict[str, Any]:
    """And what a model of Transformer Engine's modules asks of a checkpoint besides."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    modules = [one.key.removesuffix(".weight") for one in state.values()]
    modules += [name.replace("linear_proj", "core_attention") for name in modules]
    found = {name for name in modules if name.endswith(_STATEFUL_IN_TE)} | {"output_layer"}
    keys = (f"{name}._extra_state" for name in found)
    return state | {key: ShardedObject(key, None, (1,), (0,)) for key in keys}


def _loaded(source: str | Path, like: str | Path, zero_centered_gamma: bool | None = None) -> Any:
    """The model of ``like`` with the weights of a checkpoint, in the checkpoint's dtypes."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.mapping import (
        ShardedObject,
        ShardedTensor,
        apply_factories,
    )

    folder = find_checkpoint(source)
    with _reading(folder):
        stored = _stored(folder)
        common = dist_checkpointing.load_common_state_dict(folder)
    kind, centred = (
        _architecture(stored, folder),
        _zero_centered(common, folder, zero_centered_gamma),
    )
    model = _on_cpu(read_hf_config(like), kind, centred)
    pairs = model.sharded_state_dict().items()
    state = {name: one for name, one in pairs if not isinstance(one, ShardedObject)}
    wanted = dict(state)
    apply_factories(wanted)
    _refuse_another_model(stored, _flat(wanted), folder, like)
    for one in state.values():
        # A fused projection is stored by its sections.
        of_it = stored.get(one.key) or next(v for k, v in stored.items() if k.startswith(one.key))
        one.data = torch.empty_like(one.data, dtype=of_it.properties.dtype)
        if isinstance(one, ShardedTensor):
            one.dtype = one.data.dtype
    with _reading(folder):
        loaded = dist_checkpointing.load(state, str(folder))
    model.load_state_dict(loaded, strict=False, assign=True)
    return model


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Say of an error that it is about ``folder``."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except (CheckpointException, RuntimeError, ValueError, OSError, EOFError, PickleError) as error:
        said = (str(error) or type(error).__name__).splitlines()[-1]
        raise ValueError(f"{folder} is truncated or damaged: {said}") from error


def _stored(folder: Path) -> dict[str, Any]:
    """Shape and dtype of every tensor, after a look at the length of every file."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    metadata = FileSystemReader(folder).read_metadata()
    for part in metadata.storage_data.values():
        path, end = folder / part.relative_path, part.offset + part.length
        if path.stat().st_size < end:
            raise ValueError(f"{path.name} has {path.stat().st_size} bytes of {end} or more.")
    tensors = metadata.state_dict_metadata.items()
    return {key: one for key, one in tensors if isinstance(one, TensorStorageMetadata)}


def _flat(state: dict[str, Any]) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.dict_utils import nested_values

    return {one.key: one for one in nested_values(state)}


def _refuse_another_model(
    stored: dict[str, Any], wanted: dict[str, Any], folder: Path, like: str | Path
) -> None:
    """Refuse a checkpoint with other keys or shapes: an export would lose weights."""
    held = {key for key in stored if key.startswith(_MODEL_PREFIXES)}
    for keys, what in (
        (wanted.keys() - held, "the checkpoint has no"),
        (held - wanted.keys(), "the Hugging Face model has no place for"),
    ):
        if not keys:
            continue
        first = f"{min(keys)}{and_more([*keys])}"
        if any(".adapter." in key for key in keys):
            raise ValueError(
                f"{folder} has adapters, {first}, and does not tell their scale. Load it into a "
                f"model with these adapters and call megatron_gdn.hf.save_hf_weights, which "
                f"merges them."
            )
        raise ValueError(f"{folder} and {like} are not the same model: {what} {first}.")
    for key, one in sorted(wanted.items()):
        shape, asked = tuple(stored[key].size), tuple(one.global_shape)
        # Every run may pad the vocabulary differently; the file's rows come first.
        rows = max(shape[0], asked[0]) if one.allow_shape_mismatch else asked[0]
        if shape != (rows, *asked[1:]):
            raise ValueError(
                f"{key} has shape {shape} in {folder}, but config.json of {like} asks for {asked}."
            )


def _architecture(stored: dict[str, Any], folder: Path) -> Architecture:
    if "decoder.final_norm.weight" in stored:
        return "hybrid"
    if "decoder.final_layernorm.weight" in stored:
        return "gpt"
    raise ValueError(
        f"{folder} holds neither a HybridModel (decoder.final_norm.weight) nor a GPTModel "
        f"(decoder.final_layernorm.weight)."
    )


def _zero_centered(common: dict[str, Any], folder: Path, wanted: bool | None) -> bool:
    """``layernorm_zero_centered_gamma`` of the run that saved the checkpoint."""
    args = common.get("args")
    # Older versions of Megatron named the attribute after the flag.
    said = getattr(args, "layernorm_zero_centered_gamma", getattr(args, "apply_layernorm_1p", None))
    if said is None:
        return True if wanted is None else wanted
    if wanted is not None and wanted != said:
        advice = "leave out --plain-norms" if said else "export with --plain-norms"
        raise ValueError(f"{folder} was saved with layernorm_zero_centered_gamma={said}; {advice}.")
    return said

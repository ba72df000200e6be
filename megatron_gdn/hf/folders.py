"""Whole folders: Hugging Face to a Megatron distributed checkpoint, back, and compared.

Each function builds the model that a launch builds, with local modules on the CPU, and holds the
whole model in memory in the dtypes of the file. An imported checkpoint has weights alone (a
*release*); Megatron's ``--load`` takes it at any parallel sizes.

    latest_checkpointed_iteration.txt    "release", or the number of the newest iteration
    release/ or iter_0000160/            metadata.json and torch.distributed.checkpoint's files
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import PickleError
from typing import Any, NamedTuple, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import dict_utils, mapping
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ..compat.one_process import in_one_process
from ..mixers.tensor_map import bits_of
from .build import build_model, megatron_arguments
from .megatron_model import load_hf_weights, model_view, save_hf_weights
from .model_config import HFModelConfig, read_hf_config
from .model_map import Architecture, HFView, SourceRecord, and_more
from .safetensors_files import SafetensorsFolder, new_folder, progress_bar, refuse_existing

_TRACKER, _RELEASE, _FORMAT = "latest_checkpointed_iteration.txt", "release", "metadata.json"
# How a model of this Megatron shards its state; Megatron's own saves write the same.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
_UNREADABLE = (RuntimeError, ValueError, OSError, EOFError, PickleError)
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
        zero_centered_gamma: the Megatron model's ``layernorm_zero_centered_gamma``.

    Raises:
        FileNotFoundError, FileExistsError, ValueError, NotImplementedError: the message names the
            cause; nothing is left behind.
        RuntimeError: torch.distributed runs several processes.
    """
    config = read_hf_config(source)
    common = {
        "args": megatron_arguments(config, model, zero_centered_gamma),
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    with new_folder(target) as folder, in_one_process():
        built = _on_cpu(config, model, zero_centered_gamma)
        load_hf_weights(built, source, progress, keep_dtypes=True)
        (folder / _RELEASE).mkdir()
        state = _with_states_of_te(built.sharded_state_dict()) | common
        dist_checkpointing.save(state, str(folder / _RELEASE), content_metadata=_CONTENT)
        (folder / _TRACKER).write_text(_RELEASE)


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
        target, like, fp32_gates: as for `save_hf_weights`.
        zero_centered_gamma: the trained model's ``layernorm_zero_centered_gamma``. None: the
            value in the checkpoint's arguments, or True if it has none.

    Raises:
        FileNotFoundError, FileExistsError, ValueError, RuntimeError: as `import_folder`.
    """
    refuse_existing(target)
    with in_one_process():
        model = _loaded(source, like, zero_centered_gamma)
        save_hf_weights(model, target, like, progress=progress, fp32_gates=fp32_gates)


class Difference(NamedTuple):
    """One tensor that is not equal in bits and dtype."""

    key: str
    what: str

    def __str__(self) -> str:
        return f"{self.key}: {self.what}"


def compare_folders(
    left: str | Path, right: str | Path, progress: bool = False
) -> Iterator[Difference]:
    """Differences in keys, dtypes, shapes and bits; one of the two may be a Megatron checkpoint."""
    one, other = open_weights(left, right), open_weights(right, left)
    missing = set(other)
    for key in progress_bar([*one], "compare", progress):
        if key not in missing:
            yield Difference(key, f"only in {left}")
            continue
        missing.discard(key)
        a, b = one.spec(key), other.spec(key)
        if a != b:
            yield Difference(key, f"{a.dtype} {list(a.shape)} against {b.dtype} {list(b.shape)}")
            continue
        mine, theirs = one.read(key), other.read(key)
        if count := int((bits_of(mine) != bits_of(theirs)).sum()):
            most = (mine.double() - theirs.double()).abs().max().item()
            what = f"{count} of {mine.numel()} differ, by at most {most:.3g}"
            yield Difference(key, what)
        del mine, theirs  # before the next two are read
    for key in sorted(missing):
        yield Difference(key, f"only in {right}")


def open_weights(folder: str | Path, like: str | Path | None = None) -> SafetensorsFolder | HFView:
    """A Hugging Face folder, or a Megatron checkpoint seen as the folder ``like``."""
    if not _is_checkpoint(folder):
        return SafetensorsFolder(folder)
    if like is None or _is_checkpoint(like):
        raise ValueError(
            f"{folder} is a Megatron checkpoint, which is compared with the Hugging Face folder "
            f"it came from. To compare two checkpoints, export both."
        )
    with in_one_process():
        model = _loaded(folder, like)
        return model_view(model, SourceRecord.from_folder(like), SafetensorsFolder(like))


def _is_checkpoint(folder: str | Path) -> bool:
    return any((Path(folder) / name).is_file() for name in (_TRACKER, _FORMAT))


def find_checkpoint(folder: str | Path) -> Path:
    """The folder of one iteration: ``folder`` itself, or the one its tracker file names."""
    folder = Path(folder)
    found = folder
    if (folder / _TRACKER).is_file():
        name = (folder / _TRACKER).read_text().strip()
        if name != _RELEASE and not name.isdigit():
            raise ValueError(
                f"{folder / _TRACKER} says {name!r}, neither {_RELEASE!r} nor an iteration; name "
                f"the folder of one iteration instead."
            )
        found = folder / (name if name == _RELEASE else f"iter_{int(name):07d}")
    if not (found / _FORMAT).is_file():
        raise FileNotFoundError(
            f"{found} is no distributed checkpoint: it has no {_FORMAT}. Give a folder that "
            f"Megatron's --save, or import, made (with {_TRACKER} in it), or one of its iterations."
        )
    return found


def _on_cpu(config: HFModelConfig, model: Architecture, zero_centered_gamma: bool) -> Any:
    """The model without values; its parameters take no memory yet."""
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
    """Add the ``_extra_state`` entries that a model of Transformer Engine's modules loads."""
    modules = [one.key.removesuffix(".weight") for one in state.values()]
    modules += [name.replace("linear_proj", "core_attention") for name in modules]
    found = {name for name in modules if name.endswith(_STATEFUL_IN_TE)} | {"output_layer"}
    keys = (f"{name}._extra_state" for name in found)
    return state | {key: mapping.ShardedObject(key, None, (1,), (0,)) for key in keys}


def _loaded(source: str | Path, like: str | Path, zero_centered_gamma: bool | None = None) -> Any:
    """The model of ``like`` with the weights of a checkpoint, in the checkpoint's dtypes."""
    folder = find_checkpoint(source)
    with _reading(folder):
        stored = dist_checkpointing.load_tensors_metadata(str(folder))
        common = dist_checkpointing.load_common_state_dict(folder)
    kind, centred = _architecture(stored, folder), _centred(common, folder, zero_centered_gamma)
    model = _on_cpu(read_hf_config(like), kind, centred)
    pairs = model.sharded_state_dict().items()
    state = {name: one for name, one in pairs if not isinstance(one, mapping.ShardedObject)}
    wanted = dict(state)
    mapping.apply_factories(wanted)
    by_key = {one.key: one for one in dict_utils.nested_values(wanted)}
    _refuse_another_model(stored, by_key, folder, like)
    for one in state.values():
        # A fused projection is stored by its sections.
        of_it = one.key if one.key in stored else next(k for k in stored if k.startswith(one.key))
        one.data = torch.empty_like(one.data, dtype=cast(Any, stored[of_it]).dtype)
        if isinstance(one, mapping.ShardedTensor):
            one.dtype = one.data.dtype
    with _reading(folder):
        loaded = dist_checkpointing.load(state, str(folder))
    model.load_state_dict(loaded, strict=False, assign=True)
    return model


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn an error of torch or Megatron into one that names the damaged file."""
    try:
        yield
    except (Exception, CheckpointException) as error:
        if damaged := _damaged(folder):
            raise ValueError(f"{damaged}. Copy it again, or take another iteration.") from error
        if not isinstance(error, (*_UNREADABLE, CheckpointException)):
            raise
        said = (str(error) or type(error).__name__).splitlines()[-1]
        raise ValueError(f"{folder} is truncated or damaged: {said}") from error


def _damaged(folder: Path) -> str | None:
    """The first file that is missing, cut or overwritten with zeros, and what is wrong with it."""
    path = folder / _FORMAT
    try:
        json.loads(path.read_bytes())
        path = folder / ".metadata"
        for place in FileSystemReader(folder).read_metadata().storage_data.values():
            path = folder / place.relative_path
            size, end = path.stat().st_size, place.offset + place.length
            if size < end:
                return f"{path} has {size} bytes of {end} or more"
            with path.open("rb") as file:  # of torch's zip archives
                file.seek(place.offset)
                first = file.read(4)
                file.seek(end - 22)
                last = file.read(22)
            if not any(first) or (first == b"PK\3\4" and not any(last)):
                return f"{path} has zeros in place of what was written"
    except FileNotFoundError:
        return f"{path} is missing"
    except Exception as error:
        return f"{path} is truncated or damaged ({error})"
    return None


def _refuse_another_model(
    stored: dict[str, Any], wanted: dict[str, Any], folder: Path, like: str | Path
) -> None:
    """Refuse a checkpoint with other keys or shapes; exporting it would lose weights."""
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
        shape, asked = tuple(stored[key].global_shape), tuple(one.global_shape)
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


def _centred(common: dict[str, Any], folder: Path, wanted: bool | None) -> bool:
    """``layernorm_zero_centered_gamma`` of the run that saved the checkpoint."""
    args = common.get("args")
    # Older versions of Megatron named the attribute after the flag.
    said = getattr(args, "layernorm_zero_centered_gamma", getattr(args, "apply_layernorm_1p", None))
    if said is None:
        return wanted is not False
    if wanted not in (None, said):
        advice = "leave out --plain-norms" if said else "export with --plain-norms"
        raise ValueError(f"{folder} was saved with layernorm_zero_centered_gamma={said}; {advice}.")
    return said

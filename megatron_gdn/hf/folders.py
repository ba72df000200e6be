"""Convert whole Hugging Face folders to Megatron distributed checkpoints, and back.

Each function builds Megatron's model on the CPU, with local (torch) modules, and holds
all weights in memory in the dtypes of the file. An imported checkpoint has weights
alone (Megatron calls it a *release*); Megatron's ``--load`` reads a release at any
parallel sizes. The folder has:

    latest_checkpointed_iteration.txt  "release", or the number of the newest iteration
    release/ or iter_0000160/          metadata.json and torch.distributed.checkpoint's
                                       files
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import dict_utils, mapping
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from ..compat.mixed_dtype_optimizers import repair_mixed_dtype_optimizers
from ..compat.one_process import in_one_process
from ..compat.untrusted_checkpoints import untrusted_checkpoint, why_refused
from .build import build_model, megatron_arguments
from .json_files import read_object, shown
from .megatron_model import load_hf_weights, save_hf_weights
from .model_map import Architecture, HFModelConfig, read_hf_config
from .new_folder import new_folder, refuse_existing
from .safetensors_files import SafetensorsFolder
from .tensor_plan import count_of_others, plan_of

if TYPE_CHECKING:
    from ..compat.state_dict import StateDict


# Errors of code, or of versions that do not fit together; no damaged file is their
# cause.
_FAULTS_OF_CODE = (
    TypeError,
    AttributeError,
    NameError,
    ImportError,
    NotImplementedError,
)
_TRACKER = "latest_checkpointed_iteration.txt"
_RELEASE = "release"
_FORMAT = "metadata.json"
# Arguments of `build_model` for a model on the CPU, whose weights have no values yet.
_ON_CPU: dict[str, Any] = {
    "modules": "local",
    "dtype": torch.bfloat16,
    "vocab_divisible_by": 1,
    "use_cpu_initialization": True,
    "perform_initialization": False,
}
# Megatron's own checkpoints have this metadata, which says how a model shards its
# state.
_CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
# Keys of a model's tensors start with one of these; all other keys are optimizer
# states.
_MODEL_PREFIXES = ("embedding.", "decoder.", "output_layer.")
# Modules that have an ``_extra_state`` in Transformer Engine; local modules have none.
_STATEFUL_IN_TE = (
    "out_norm",
    "q_layernorm",
    "k_layernorm",
    "kv_layernorm",
    "input_layernorm",
    "pre_mlp_layernorm",
    "final_norm",
    "final_layernorm",
    "core_attention",
)


def import_folder(
    source: str | Path, target: str | Path, model: Architecture = "hybrid"
) -> None:
    """Convert a Hugging Face folder into a Megatron checkpoint.

    A script must call this function under ``if __name__ == "__main__":``, because
    Megatron's writer starts a process.

    Args:
        source: a folder with ``config.json`` and safetensors weights.
        target: a new folder, which appears only when the import is complete.
        model: "hybrid" (Megatron's HybridModel) or "gpt" (GPTModel).

    Raises:
        FileNotFoundError, FileExistsError, ValueError, NotImplementedError: the message
            names the cause, and no folder is left behind.
        RuntimeError: torch.distributed runs several processes.
    """
    config = _compared_config(source, model)
    common = {
        "args": megatron_arguments(config, model),
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    with new_folder(target) as folder, in_one_process():
        built: Any = build_model(config, model, **_ON_CPU)[0]
        load_hf_weights(built, source, keep_dtypes=True)
        (folder / _RELEASE).mkdir()
        state = _with_extra_states_of_te(built.sharded_state_dict()) | common
        with _one_line_errors(lambda: f"{target} cannot be written"):
            dist_checkpointing.save(
                state, str(folder / _RELEASE), content_metadata=_CONTENT
            )
        (folder / _TRACKER).write_text(_RELEASE)


def export_folder(
    source: str | Path, target: str | Path, like: str | Path, fp32_gates: bool = False
) -> None:
    """Write a checkpoint as Hugging Face files with the names, keys and dtypes of
    ``like``.

    Args:
        source: a folder of checkpoints, of which the newest is read, or the folder of
            one iteration. The checkpoint may have been saved at any parallel sizes.
        target: a new folder. like: the Hugging Face folder that the model came from.
        fp32_gates: write ``A_log``, ``dt_bias`` and the experts' biases as F32 even
            where ``like`` has BF16.

    Raises:
        FileNotFoundError, FileExistsError, ValueError, RuntimeError: see
            `import_folder`.
    """
    refuse_existing(target)
    with in_one_process():
        save_hf_weights(
            _load_checkpoint(source, like), target, like, fp32_gates=fp32_gates
        )


def find_checkpoint(folder: str | Path) -> Path:
    """The folder of one iteration: ``folder``, or the subfolder that its tracker file
    names."""
    folder = Path(folder)
    iteration = folder
    if (folder / _TRACKER).is_file():
        iteration = folder / _name_of_iteration(folder / _TRACKER)
    if not (iteration / _FORMAT).is_file():
        raise FileNotFoundError(
            f"{iteration} is no distributed checkpoint: it has no {_FORMAT}. Give a "
            f"folder that Megatron's --save or the import wrote (it has {_TRACKER}), "
            "or one of its iterations."
        )
    return iteration


def _name_of_iteration(tracker: Path) -> str:
    """The name of the subfolder that the file ``tracker`` stands for."""
    content = tracker.read_bytes()[:100].decode(errors="replace").strip()
    if content == _RELEASE:
        return _RELEASE
    if re.fullmatch("[0-9]{1,18}", content):
        return f"iter_{int(content):07d}"
    raise ValueError(
        f"{tracker} holds {shown(content)}; legal are the number of an iteration, or "
        f"{_RELEASE!r}. Give the folder of one iteration."
    )


def _compared_config(folder: str | Path, model: Architecture) -> HFModelConfig:
    """The config of a Hugging Face folder, after a comparison with the shapes in its
    files."""
    config = read_hf_config(folder)
    specs = SafetensorsFolder(folder).specs
    plan_of(config, specs, model, config.stores_gains_minus_1)
    return config


def _with_extra_states_of_te(state: StateDict) -> StateDict:
    """Add the ``_extra_state`` entries that a model of Transformer Engine's modules
    looks for."""
    modules = [tensor.key.removesuffix(".weight") for tensor in state.values()]
    # An attention has no weight, so its name is taken from its projection's.
    modules += [name.replace("linear_proj", "core_attention") for name in modules]
    stateful = {name for name in modules if name.endswith(_STATEFUL_IN_TE)} | {
        "output_layer"
    }
    keys = (f"{name}._extra_state" for name in stateful)
    return state | {key: mapping.ShardedObject(key, None, (1,), (0,)) for key in keys}


def _load_checkpoint(source: str | Path, like: str | Path) -> Any:
    """Build the model of ``like`` with a checkpoint's weights, in the checkpoint's
    dtypes."""
    folder = find_checkpoint(source)
    # Megatron's reader refuses the metadata of torch 2.15
    repair_mixed_dtype_optimizers()
    with untrusted_checkpoint(), _one_line_errors(lambda: _describe_damage(folder)):
        _require_format(folder / _FORMAT)
        stored = dist_checkpointing.load_tensors_metadata(str(folder))
        common = _load_common(folder)
        table: StateDict = FileSystemReader(folder).read_metadata().state_dict_metadata
    # arguments of the run; if None, we assume the norms of a model of `build_model`
    args = common.get("args")
    kind: Architecture = "hybrid" if "decoder.final_norm.weight" in stored else "gpt"
    config = _compared_config(like, kind)
    # Older versions of Megatron name the setting apply_layernorm_1p.
    centred = getattr(args, "apply_layernorm_1p", config.stores_gains_minus_1)
    centred = getattr(args, "layernorm_zero_centered_gamma", centred)
    if not isinstance(centred, bool):
        raise ValueError(
            f"{folder} was saved with layernorm_zero_centered_gamma={shown(centred)}; "
            "legal are True and False."
        )
    built = build_model(config, kind, layernorm_zero_centered_gamma=centred, **_ON_CPU)
    model: Any = built[0]
    pairs = model.sharded_state_dict().items()
    state = {
        name: entry
        for name, entry in pairs
        if not isinstance(entry, mapping.ShardedObject)
    }
    expected = dict(state)
    mapping.apply_factories(expected)
    by_key = {entry.key: entry for entry in dict_utils.nested_values(expected)}
    _refuse_another_model(stored, by_key, folder, like)
    for key in by_key:
        _require_every_part(key, table[key], folder)
    for entry in state.values():
        key = entry.key
        # the checkpoint stores a fused projection by its sections
        if key not in stored:
            key = next(
                stored_key for stored_key in stored if stored_key.startswith(key)
            )
        entry.data = torch.empty_like(entry.data, dtype=cast(Any, stored[key]).dtype)
        if isinstance(entry, mapping.ShardedTensor):
            entry.dtype = entry.data.dtype
    with untrusted_checkpoint(), _one_line_errors(lambda: _describe_damage(folder)):
        loaded = dist_checkpointing.load(state, str(folder))
    model.load_state_dict(loaded, strict=False, assign=True)
    return model


@contextmanager
def _one_line_errors(describe: Callable[[], str]) -> Iterator[None]:
    """Turn an error of torch or Megatron into a ValueError of one line,
    ``describe(): cause``.

    A fault of the code, such as a TypeError, stays what it is.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(failure for failure, _ in error.failures.values())
        if isinstance(cause, _FAULTS_OF_CODE):
            raise cause from error
        line = (str(cause) or type(cause).__name__).splitlines()[0]
        line = why_refused(cause) or line
        raise ValueError(f"{describe()}: {line}") from error


def _require_format(file: Path) -> None:
    """Raise a ValueError unless ``file``, which names the checkpoint's format, names
    torch_dist."""
    backend = read_object(file).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(
            f"it has sharded_backend={shown(backend)}; only 'torch_dist' is read"
        )


def _load_common(folder: Path) -> StateDict:
    """What Megatron stored beside the tensors, such as the arguments of the run."""
    try:
        common = dist_checkpointing.load_common_state_dict(folder)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"the state beside its tensors has another form: {error}"
        ) from error
    if not isinstance(common, dict):
        raise ValueError(
            f"the state beside its tensors is {shown(common)}, but must be a dict"
        )
    return common


def _describe_damage(folder: Path) -> str:
    """Which file of a checkpoint that could not be read is damaged, and what to do
    about it.

    It reads the checkpoint: call it within `untrusted_checkpoint`.
    """
    advice = "copy the folder again, or take another iteration"
    try:
        _require_format(folder / _FORMAT)
    except ValueError:
        return f"{folder / _FORMAT} is damaged; {advice}"
    try:
        storage = FileSystemReader(folder).read_metadata().storage_data
    except Exception:  # unpickling raises what the bytes make it raise
        return f"{folder / '.metadata'} is missing or damaged; {advice}"
    for place in sorted(
        storage.values(), key=lambda place: (place.relative_path, place.offset)
    ):
        file = folder / place.relative_path
        if not file.is_file():
            return f"{file} is missing; {advice}"
        size = file.stat().st_size
        needed = place.offset + place.length
        if size < needed:
            return (
                f"{file} has {size} bytes, of {needed} or more that were written; "
                f"{advice}"
            )
        with file.open("rb") as content:
            content.seek(place.offset)
            is_whole = zipfile.is_zipfile(BytesIO(content.read(place.length)))
        if not is_whole:  # torch.save writes each tensor as a zip archive
            return f"{file} is damaged from byte {place.offset} on; {advice}"
    return (
        f"{folder} cannot be read, though its files have the sizes that were written; "
        f"{advice}"
    )


def _require_every_part(key: str, entry: Any, folder: Path) -> None:
    """Raise unless the parts of the tensor ``key`` in the table's ``entry`` add up to
    the tensor.

    torch reads the parts that are listed, and would leave the others as the memory was.
    """
    places = {tuple(chunk.offsets) for chunk in entry.chunks}
    listed = sum(prod(chunk.sizes) for chunk in entry.chunks)
    if listed != prod(entry.size) or len(places) != len(entry.chunks):
        raise ValueError(
            f"{folder} has {listed} of {prod(entry.size)} values of {key} in "
            f"{len(places)} parts; its table is damaged. Copy the folder again, or "
            "take another iteration."
        )


def _refuse_another_model(
    stored: StateDict, expected: StateDict, folder: Path, like: str | Path
) -> None:
    """Refuse a checkpoint whose tensors ``stored`` differ in key or shape from
    ``expected``."""
    stored_keys = {key for key in stored if key.startswith(_MODEL_PREFIXES)}
    missing = expected.keys() - stored_keys
    unknown = stored_keys - expected.keys()
    if adapters := sorted(key for key in unknown if ".adapter." in key):
        raise ValueError(
            f"{folder} has adapters, {adapters[0]}{count_of_others(adapters)}, but not "
            "their scale. Load the checkpoint into a model with these adapters and "
            "call megatron_gdn.hf.save_hf_weights, which merges them."
        )
    if keys := sorted(missing or unknown):
        if missing:
            lacks = "the checkpoint has no"
        else:
            lacks = "the Hugging Face model has no place for"
        first = f"{keys[0]}{count_of_others(keys)}"
        raise ValueError(
            f"{folder} and {like} are not the same model: {lacks} {first}."
        )
    for key, entry in sorted(expected.items()):
        if not stored[key].dtype.is_floating_point:
            raise ValueError(
                f"{key} has dtype {stored[key].dtype} in {folder}; weights are "
                "floating-point numbers."
            )
        shape = tuple(stored[key].global_shape)
        asked = tuple(entry.global_shape)
        # Runs may pad the vocabulary differently; rows of padding follow the
        # vocabulary's rows.
        if entry.allow_shape_mismatch and shape[:1] > asked[:1]:
            asked = shape[:1] + asked[1:]
        if shape != asked:
            raise ValueError(
                f"{key} has shape {shape} in {folder}, but config.json of {like} asks "
                f"for {asked}."
            )

"""Convert whole Hugging Face folders to Megatron distributed checkpoints, and back.

Import and export build Megatron's model on the CPU, with local (torch) modules. All
weights are in memory at the same time, in the dtypes of the files. An imported
checkpoint has only weights; Megatron calls it a *release*. Megatron's ``--load`` reads a
release at any parallel sizes. A checkpoint's folder has:

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
from .json_files import read_object, short_text
from .megatron_model import load_hf_weights, save_hf_weights
from .model_map import HFModelConfig, MegatronModelKind, read_hf_config
from .new_folder import new_folder, refuse_existing
from .safetensors_files import SafetensorsFolder
from .tensor_plan import and_others, plan_tensors

if TYPE_CHECKING:
    from ..compat.state_dict import StateDict


# Errors of code, or of versions that do not fit together. A damaged file causes none of
# them.
_CODE_ERRORS = (
    TypeError,
    AttributeError,
    NameError,
    ImportError,
    NotImplementedError,
)
_TRACKER_FILE = "latest_checkpointed_iteration.txt"
_RELEASE_NAME = "release"
_FORMAT_FILE = "metadata.json"
# Arguments of `build_model` for a model on the CPU whose weights are not initialised.
_CPU_BUILD_OPTIONS: dict[str, Any] = {
    "modules": "local",
    "dtype": torch.bfloat16,
    "vocab_divisible_by": 1,
    "use_cpu_initialization": True,
    "perform_initialization": False,
}
# The settings with which a model shards its state. Megatron also writes them to its own
# checkpoints.
_CONTENT_METADATA = {
    "singleton_local_shards": False,
    "chained_optim_avoid_prefix": True,
}
# The keys of a model's tensors start with one of these; keys of optimizer states do not.
_MODEL_KEY_PREFIXES = ("embedding.", "decoder.", "output_layer.")
# Modules that have an ``_extra_state`` in Transformer Engine; local modules have none.
_TE_MODULES_WITH_EXTRA_STATE = (
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
    source: str | Path, target: str | Path, model: MegatronModelKind = "hybrid"
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
    config = _read_checked_config(source, model)
    common_state = {
        "args": megatron_arguments(config, model),
        # Megatron's load does not reorder the rows of attention in files of version 3.0
        "checkpoint_version": 3.0,
        "iteration": 0,
    }
    # in_one_process: Megatron's parallel state of one rank, also without torchrun
    with new_folder(target) as folder, in_one_process():
        built: Any = build_model(config, model, **_CPU_BUILD_OPTIONS)[0]
        load_hf_weights(built, source, keep_dtypes=True)
        (folder / _RELEASE_NAME).mkdir()
        state = _add_extra_states_of_te(built.sharded_state_dict()) | common_state
        with _one_line_errors(lambda: f"{target} cannot be written"):
            dist_checkpointing.save(
                state, str(folder / _RELEASE_NAME), content_metadata=_CONTENT_METADATA
            )
        (folder / _TRACKER_FILE).write_text(_RELEASE_NAME)


def export_folder(
    source: str | Path, target: str | Path, like: str | Path, fp32_gates: bool = False
) -> None:
    """Write a checkpoint as Hugging Face files with the names, keys and dtypes of
    ``like``.

    Args:
        source: a folder of checkpoints, of which the newest is read, or the folder of
            one iteration. The checkpoint may have been saved at any parallel sizes.
        target: a new folder, which appears only when the export is complete.
        like: the Hugging Face folder that the model came from.
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
    """The folder of one iteration: ``folder`` itself, or its subfolder that the tracker
    file names.

    Raises a FileNotFoundError if the folder of the iteration is no distributed
    checkpoint.
    """
    folder = Path(folder)
    iteration_folder = folder
    if (folder / _TRACKER_FILE).is_file():
        iteration_folder = folder / _iteration_folder_name(folder / _TRACKER_FILE)
    if not (iteration_folder / _FORMAT_FILE).is_file():
        raise FileNotFoundError(
            f"{iteration_folder} is no distributed checkpoint: it has no "
            f"{_FORMAT_FILE}. Give a "
            f"folder that Megatron's --save or the import wrote (it has {_TRACKER_FILE}), "
            "or one of its iterations."
        )
    return iteration_folder


def _iteration_folder_name(tracker: Path) -> str:
    """The name of the subfolder that the tracker file ``tracker`` names, such as
    "iter_0000160"."""
    content = tracker.read_bytes()[:100].decode(errors="replace").strip()
    if content == _RELEASE_NAME:
        return _RELEASE_NAME
    if re.fullmatch("[0-9]{1,18}", content):
        return f"iter_{int(content):07d}"
    raise ValueError(
        f"{tracker} holds {short_text(content)}; legal are the number of an iteration, "
        f"or {_RELEASE_NAME!r}. Give the folder of one iteration."
    )


def _read_checked_config(folder: str | Path, model: MegatronModelKind) -> HFModelConfig:
    """Read the config of a Hugging Face folder; raise as `plan_tensors` if the folder's
    files have other tensors or shapes."""
    config = read_hf_config(folder)
    specs = SafetensorsFolder(folder).specs
    plan_tensors(config, specs, model, config.stores_gains_minus_1)
    return config


def _add_extra_states_of_te(state: StateDict) -> StateDict:
    """A copy of ``state`` with added empty ``_extra_state`` entries.

    ``state``: name -> ShardedTensor, from a model of local modules. If a model of
    Transformer Engine's modules loads the checkpoint, it expects these entries.
    """
    names = [tensor.key.removesuffix(".weight") for tensor in state.values()]
    # core_attention has no weight, so its name is made from that of linear_proj.
    names += [name.replace("linear_proj", "core_attention") for name in names]
    names_with_extra_state = {"output_layer"}
    for name in names:
        if name.endswith(_TE_MODULES_WITH_EXTRA_STATE):
            names_with_extra_state.add(name)
    extra_states = {}
    for name in names_with_extra_state:
        key = f"{name}._extra_state"
        # None, as one object that is not divided: part 0 of 1
        extra_states[key] = mapping.ShardedObject(key, None, (1,), (0,))
    return state | extra_states


def _load_checkpoint(source: str | Path, like: str | Path) -> Any:
    """Build the model of the Hugging Face folder ``like`` on the CPU; fill it from the
    newest checkpoint in ``source``. Parameters get the checkpoint's dtypes.

    The checkpoint may come from anyone: within `untrusted_checkpoint`, torch runs no
    code from its pickles.
    """
    folder = find_checkpoint(source)
    # Without these repairs Megatron's reader refuses the metadata of torch 2.15.
    repair_mixed_dtype_optimizers()
    with untrusted_checkpoint(), _one_line_errors(lambda: _describe_damage(folder)):
        _require_format(folder / _FORMAT_FILE)
        stored = dist_checkpointing.load_tensors_metadata(str(folder))
        common_state = _load_common_state(folder)
        metadata = FileSystemReader(folder).read_metadata()
        storage_metadata: StateDict = metadata.state_dict_metadata
    kind: MegatronModelKind = "gpt"
    if "decoder.final_norm.weight" in stored:
        kind = "hybrid"
    config = _read_checked_config(like, kind)
    zero_centred = _stores_zero_centred_gains(common_state, config, folder)
    built = build_model(
        config, kind, layernorm_zero_centered_gamma=zero_centred, **_CPU_BUILD_OPTIONS
    )
    model: Any = built[0]
    state = {
        name: entry
        for name, entry in model.sharded_state_dict().items()
        if not isinstance(entry, mapping.ShardedObject)
    }
    # An entry of a fused projection is a factory, which makes an entry for each of the
    # sections that a checkpoint stores.
    split_state = dict(state)
    mapping.apply_factories(split_state)
    expected = {entry.key: entry for entry in dict_utils.nested_values(split_state)}
    _refuse_another_model(stored, expected, folder, like)
    for key in expected:
        _require_complete_tensor(key, storage_metadata[key], folder)
    for entry in state.values():
        key = entry.key
        # A fused projection gets the dtype of the first section that is stored.
        if key not in stored:
            key = next(
                stored_key for stored_key in stored if stored_key.startswith(key)
            )
        entry.data = torch.empty_like(entry.data, dtype=cast(Any, stored[key]).dtype)
    with untrusted_checkpoint(), _one_line_errors(lambda: _describe_damage(folder)):
        loaded = dist_checkpointing.load(state, str(folder))
    # strict=False: ``loaded`` lacks the _extra_state keys. assign=True: the parameters
    # get the dtypes of ``loaded``.
    model.load_state_dict(loaded, strict=False, assign=True)
    return model


def _stores_zero_centred_gains(
    common_state: StateDict, config: HFModelConfig, folder: Path
) -> bool:
    """Whether the checkpoint in ``folder`` stores the gains of norms minus 1.

    The arguments of the run that saved it say so. Without arguments, the answer is
    ``config.stores_gains_minus_1``, with which `build_model` builds the model.
    """
    args = common_state.get("args")
    # Older versions of Megatron name the setting apply_layernorm_1p.
    stored = getattr(args, "apply_layernorm_1p", config.stores_gains_minus_1)
    stored = getattr(args, "layernorm_zero_centered_gamma", stored)
    if not isinstance(stored, bool):
        raise ValueError(
            f"{folder} was saved with "
            f"layernorm_zero_centered_gamma={short_text(stored)}; legal are True and "
            "False."
        )
    return stored


@contextmanager
def _one_line_errors(describe: Callable[[], str]) -> Iterator[None]:
    """Turn an error of torch or Megatron inside the context into a ValueError of one
    line, "``describe()``: cause".

    Errors of the code (`_CODE_ERRORS`) are raised as they are. ``describe`` is called
    after an error only, since it may read files. torch's CheckpointException holds the
    errors of the ranks; it is a BaseException, not an Exception.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        cause: BaseException = error
        if isinstance(error, CheckpointException):
            cause = next(failure for failure, _ in error.failures.values())
        if isinstance(cause, _CODE_ERRORS):
            raise cause from error
        line = (str(cause) or type(cause).__name__).splitlines()[0]
        line = why_refused(cause) or line
        raise ValueError(f"{describe()}: {line}") from error


def _require_format(file: Path) -> None:
    """Raise a ValueError if the checkpoint's format in ``file`` is not torch_dist.
    `_one_line_errors` adds the file's name to the error."""
    backend = read_object(file).get("sharded_backend")
    if backend != "torch_dist":
        raise ValueError(
            f"it has sharded_backend={short_text(backend)}; only 'torch_dist' is read"
        )


def _load_common_state(folder: Path) -> StateDict:
    """The dict that Megatron stored in ``folder`` beside the tensors, with the arguments
    of the run as "args".

    Raises a ValueError, which blames the folder, if the stored state has another form.
    Megatron itself would raise errors of the types `_CODE_ERRORS`, which are passed on
    as faults of code, not of the folder.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(folder)
    except (TypeError, AttributeError, LookupError) as error:
        raise ValueError(
            f"the state beside its tensors has another form: {error}"
        ) from error
    if not isinstance(common, dict):
        raise ValueError(
            f"the state beside its tensors is {short_text(common)}, but must be a dict"
        )
    return common


def _describe_damage(folder: Path) -> str:
    """The text of an error: which file of the checkpoint in ``folder`` is damaged, and
    what to do.

    The search reads the checkpoint, so call this function within
    `untrusted_checkpoint`.
    """
    advice = "copy the folder again, or take another iteration"
    try:
        _require_format(folder / _FORMAT_FILE)
    except ValueError:
        return f"{folder / _FORMAT_FILE} is damaged; {advice}"
    try:
        storage = FileSystemReader(folder).read_metadata().storage_data
    except Exception:  # wrong bytes can make unpickling raise any error
        return f"{folder / '.metadata'} is missing or damaged; {advice}"
    by_file_and_offset = sorted(
        storage.values(), key=lambda part: (part.relative_path, part.offset)
    )
    for part in by_file_and_offset:
        file = folder / part.relative_path
        if not file.is_file():
            return f"{file} is missing; {advice}"
        size = file.stat().st_size
        needed = part.offset + part.length
        if size < needed:
            return (
                f"{file} has {size} bytes, of {needed} or more that were written; "
                f"{advice}"
            )
        with file.open("rb") as content:
            content.seek(part.offset)
            part_bytes = content.read(part.length)
        # torch.save writes each part of a tensor as a zip archive
        if not zipfile.is_zipfile(BytesIO(part_bytes)):
            return f"{file} is damaged from byte {part.offset} on; {advice}"
    return (
        f"{folder} cannot be read, though its files have the sizes that were written; "
        f"{advice}"
    )


def _require_complete_tensor(key: str, metadata: Any, folder: Path) -> None:
    """Raise unless the stored parts of the tensor ``key`` add up to the whole tensor.

    torch reads the listed parts into new memory and would leave the rest of this memory
    uninitialised. ``metadata``: torch's ``TensorStorageMetadata``, which lists the parts.
    """
    offsets = {tuple(part.offsets) for part in metadata.chunks}
    listed = sum(prod(part.sizes) for part in metadata.chunks)
    if listed != prod(metadata.size) or len(offsets) != len(metadata.chunks):
        raise ValueError(
            f"{folder} has {listed} of {prod(metadata.size)} values of {key} in "
            f"{len(offsets)} parts; its table is damaged. Copy the folder again, or "
            "take another iteration."
        )


def _refuse_another_model(
    stored: StateDict, expected: StateDict, folder: Path, like: str | Path
) -> None:
    """Raise if the checkpoint in ``folder`` is not of the model of ``like``.

    ``stored`` has the sharded tensors of the checkpoint by key, ``expected`` has those
    of the model. Their keys and shapes must be equal.
    """
    stored_keys = {key for key in stored if key.startswith(_MODEL_KEY_PREFIXES)}
    missing = expected.keys() - stored_keys
    unknown = stored_keys - expected.keys()
    if adapters := sorted(key for key in unknown if ".adapter." in key):
        raise ValueError(
            f"{folder} has adapters, {adapters[0]}{and_others(adapters)}, but not "
            "their scale. Load the checkpoint into a model with these adapters and "
            "call megatron_gdn.hf.save_hf_weights, which merges them."
        )
    if keys := sorted(missing or unknown):
        if missing:
            lacks = "the checkpoint has no"
        else:
            lacks = "the Hugging Face model has no place for"
        first = f"{keys[0]}{and_others(keys)}"
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
        expected_shape = tuple(entry.global_shape)
        # The vocabulary may have more rows in the checkpoint: rows of padding, which
        # come after the rows of tokens.
        if entry.allow_shape_mismatch and shape[:1] > expected_shape[:1]:
            expected_shape = shape[:1] + expected_shape[1:]
        if shape != expected_shape:
            raise ValueError(
                f"{key} has shape {shape} in {folder}, but config.json of {like} asks "
                f"for {expected_shape}."
            )

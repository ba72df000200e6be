"""Repairs Megatron 0.19's writing and reading of checkpoints.

The first part of this file wraps methods of optimizers; `.mixed_dtype_optimizers`
installs the wrappers. The second part reads the bias and the adapters of ``in_proj``
from files of Megatron's own layer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

from .observe import log_once

if TYPE_CHECKING:
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBuffer
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

    from .state_dict import StateDict


def log_repair(message: str) -> None:
    """Log ``message``, which names a repair of megatron-core, once on rank 0."""
    from megatron.core import __version__

    log_once(f"megatron-core {__version__}: {message}")


def store_empty_shares(
    original: Callable,
    optimizer: DistributedOptimizer,
    /,
    *args: object,
    **kwargs: object,
) -> StateDict:
    """Let ``sharded_param_state_dp_reshardable`` (``original``) store shares without
    parameters.

    The fp32 bucket is small, so a rank's share of it may hold no parameter. Megatron
    refuses to save such a share ("empty bucket encountered"; NVIDIA/Megatron-LM pull
    request 6191 covers shares of padding). This wrapper adds an entry marked as
    padding, which a load skips.
    """
    try:
        return original(optimizer, *args, **kwargs)
    except (AssertionError, IndexError):  # IndexError if python -O skips the assertion
        of_buffers = (
            buckets for ranges in optimizer.gbuf_ranges for buckets in ranges.values()
        )
        if all(bucket["param_map"] for bucket in chain.from_iterable(of_buffers)):
            raise
    get_state = optimizer.get_parameter_state_dp_reshardable
    optimizer.get_parameter_state_dp_reshardable = lambda: _with_padding(
        optimizer, get_state()
    )
    try:
        state = original(optimizer, *args, **kwargs)
    finally:
        del optimizer.get_parameter_state_dp_reshardable
    log_repair(
        "a share of the optimizer's state that holds no parameter was added to the "
        "dp_reshardable checkpoint."
    )
    return state


def _with_padding(optimizer: DistributedOptimizer, state: dict) -> dict:
    """Return ``state`` with an added entry for each bucket in which this rank has no
    parameter."""
    group = optimizer.data_parallel_group
    for index, buffer in enumerate(optimizer.buffers):
        for entries_of_buckets in state[index].values():
            example = next(chain.from_iterable(entries_of_buckets), {})
            for bucket, entries in zip(buffer.buckets, entries_of_buckets, strict=True):
                if not entries:
                    share = bucket.grad_data.numel() // group.size()
                    covered = bucket.numel_unpadded - group.rank() * share
                    size = max(0, min(share, covered))
                    device = bucket.grad_data.device
                    entries.append(_padding_entry(optimizer, example, size, device))
    return state


def _padding_entry(
    optimizer: DistributedOptimizer,
    example: StateDict,
    size: int,
    device: torch.device,
) -> StateDict:
    """An entry with zeros ``[size]`` in the dtypes of ``example``, in fp32 if that is
    empty."""
    dtypes = {
        key: value.dtype
        for key, value in example.items()
        if isinstance(value, Tensor) and key != "step"  # "step" is one number
    }
    if not dtypes:
        names = ["param"] + list(optimizer.optimizer_state_keys)
        dtypes = dict.fromkeys(names, torch.float32)
    zeros = {
        key: torch.zeros(size, dtype=dtype, device=device)
        for key, dtype in dtypes.items()
    }
    # A file cannot hold an empty tensor, so an entry of size 0 has no tensors.
    place = {"gbuf_local_start": 0, "gbuf_local_end": size, "padding": True}
    if size:
        return zeros | place
    return place


def cut_without_padding(
    shard_state: Callable,
    optimizer: Any,
    /,
    *args: object,
    **kwargs: object,
) -> StateDict:
    """Call ``sharded_param_state_fully_reshardable`` (``shard_state``) with corrected
    offsets.

    With several buckets (``overlap_grad_reduce``, a shared embedding) Megatron gathers
    every state without the padding between buckets and then cuts the state at offsets
    that count the padding. Parameters after the first padding get values of other
    parameters, without an error (repaired on Megatron's main). This wrapper gives
    Megatron buffers without padding, so the offsets fit.
    """
    gather = optimizer.get_parameter_state_dp_zero
    buffers = optimizer.buffers
    if not any(
        b.grad_data.numel() != b.numel_unpadded for x in buffers for b in x.buckets[:-1]
    ):
        return shard_state(optimizer, *args, **kwargs)

    def gather_then_leave_padding_out(*args: object, **kwargs: object) -> object:
        """Return the gathered states; replace ``optimizer.buffers`` by copies without
        padding."""
        gathered = gather(*args, **kwargs)
        optimizer.buffers = [_without_padding(buffer) for buffer in buffers]
        return gathered

    log_repair(
        "the places of the optimizer's states in a buffer of several buckets were "
        "corrected for the fully_reshardable checkpoint."
    )
    optimizer.get_parameter_state_dp_zero = gather_then_leave_padding_out
    try:
        return shard_state(optimizer, *args, **kwargs)
    finally:
        del optimizer.get_parameter_state_dp_zero
        optimizer.buffers = buffers


def _without_padding(buffer: _ParamAndGradBuffer) -> SimpleNamespace:
    """Sizes and parameter offsets of a gradient ``buffer``, as if its buckets had no
    padding."""
    buckets = []
    start = 0
    moves = []
    for bucket in buffer.buckets:
        size = bucket.numel_unpadded
        buckets.append(
            SimpleNamespace(grad_data=bucket.grad_data[:size], numel_unpadded=size)
        )
        moves.append(start - bucket.offset)
        start += size
    places = {
        parameter: (first + moves[bucket], end + moves[bucket], bucket)
        for parameter, (first, end, bucket) in buffer.param_index_map.items()
    }
    return SimpleNamespace(
        buckets=buckets, numel_unpadded=buffer.numel_unpadded, param_index_map=places
    )


def make_states_to_load(
    state_dict: Callable, chained: Any, is_loading: bool = False
) -> object:
    """Let ``ChainedOptimizer.state_dict`` (``state_dict``) make states before a load.

    Megatron's method ignores ``is_loading``, which a load of the format torch_dcp sets.
    If it is set, this wrapper first makes states in each optimizer of ``chained``, for
    the load to fill.
    """
    if is_loading:
        for member in chained.chained_optimizers:
            if not member.is_stub_optimizer:
                member.init_state_fn(member.optimizer, member.config)
                # Only torch's Adam has a step per parameter; others have a step per
                # group.
                if isinstance(member.optimizer, torch.optim.Adam):
                    for state in member.optimizer.state.values():
                        state.setdefault("step", torch.zeros((), dtype=torch.float32))
    return state_dict(chained)


def leave_strides_out(
    read: Callable,
    strategy: object,
    checkpoint_dir: str | Path,
    metadata: Metadata | None = None,
) -> StateDict:
    """Wrap ``TorchDistLoadShardedStrategy.load_tensors_metadata`` for files of torch
    2.15.

    ``read`` (``strategy``'s method) passes a tensor's stored properties to
    ``torch.empty``, which refuses the strides that torch 2.15 stores; so the strides
    are removed from ``metadata`` first. If ``metadata`` is None, it is read from the
    files in ``checkpoint_dir``.
    """
    from megatron.core.dist_checkpointing.strategies import torch as torch_files

    if metadata is None:
        metadata = torch_files._get_filesystem_reader(checkpoint_dir).read_metadata()
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, torch_files.TensorStorageMetadata):
            vars(stored.properties).pop("strides", None)
    return read(strategy, checkpoint_dir, metadata)


# ``dp_reshardable`` (Megatron's default) and the separate file of
# ``--ckpt-format torch`` store the optimizer's state as gradient buffers, without names
# of parameters. With fp32 ``A_log`` and ``dt_bias`` the buffers have other sizes than
# with bf16. Megatron's error names only the sizes, so we add a note.
_BUCKET_SIZE_ERROR = re.compile(
    r"Global shape mismatch.*bucket_idx|bucket_idx\S* from model not in state dict"
)
_BUCKET_SIZE_NOTE = (
    "The checkpoint's optimizer state has the format dp_reshardable, which holds "
    "gradient buffers, and the buffers of this model have other sizes. It was written "
    "by a layer with 16-bit A_log and dt_bias, such as Megatron's own, or in another "
    "parallel layout. Load the checkpoint with that layer or layout and save it again "
    "with --dist-ckpt-optim-fully-reshardable (in Python "
    "metadata={'distrib_optim_sharding_type': 'fully_reshardable'}); the new file "
    "loads here. --no-load-optim loads the parameters alone."
)

_FILE_SIZE_ERROR = re.compile(r"Number of unpadded elements")
_FILE_SIZE_NOTE = (
    "The file of the optimizer's state (--ckpt-format torch) holds gradient buffers, "
    "and the buffers of this model have other sizes. It was written by a layer with "
    "16-bit A_log and dt_bias, such as Megatron's own. Load the checkpoint with that "
    "layer and save it again with --ckpt-format torch_dist --auto-detect-ckpt-format "
    "--dist-ckpt-optim-fully-reshardable; the new file loads here. --no-load-optim "
    "loads the parameters alone."
)

_RESHARDABLE_FLAG = "--dist-ckpt-optim-fully-reshardable"


def warn_on_dp_reshardable(
    original: Callable,
    optimizer: object,
    model_sharded_state_dict: object,
    is_loading: bool = False,
    metadata: object = None,
) -> StateDict:
    """In a save, warn of fp32 parameters; then call ``original``, Megatron's own
    method."""
    if not is_loading:
        _warn_of_fp32_parameters(optimizer, "dp_reshardable", _RESHARDABLE_FLAG)
    return original(optimizer, model_sharded_state_dict, is_loading, metadata)


def warn_on_torch_file(save: Callable, optimizer: object, filename: str) -> None:
    """Warn of fp32 parameters, then ``save`` (Megatron's) to ``filename`` in the format
    torch."""
    flags = f"--ckpt-format torch_dist --auto-detect-ckpt-format {_RESHARDABLE_FLAG}"
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        _warn_of_fp32_parameters(member, "--ckpt-format torch", flags)
    save(optimizer, filename)


def _warn_of_fp32_parameters(optimizer: object, file_format: str, flags: str) -> None:
    """If ``optimizer`` has fp32 parameters, warn of ``file_format`` and advise to use
    ``flags``."""
    if any(
        buffer.param_dtype == torch.float32
        for buffer in getattr(optimizer, "buffers", ())
    ):
        log_once(
            "Megatron's own layer does not load this checkpoint's optimizer state "
            f"({file_format}, with fp32 parameters). To go on with Megatron's layer, "
            f"load the checkpoint with this layer and save it again with {flags}.",
            logging.WARNING,
        )


def _add_note(
    pattern: re.Pattern, note: str, load: Callable, /, *args: object, **kwargs: object
) -> object:
    """Call ``load``; add ``note`` to an error whose message matches ``pattern``."""
    try:
        return load(*args, **kwargs)
    except BaseException as error:  # CheckpointException of torch is a BaseException
        if pattern.search(str(error)) and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


# Wrap DistributedOptimizer.load_parameter_state_from_dp_zero and
# TorchDistLoadShardedStrategy.load.
explain_file_sizes = partial(_add_note, _FILE_SIZE_ERROR, _FILE_SIZE_NOTE)
explain_bucket_sizes = partial(_add_note, _BUCKET_SIZE_ERROR, _BUCKET_SIZE_NOTE)

# megatron-core 0.19 stores ``in_proj.bias`` as one tensor, the shards of the
# tensor-parallel ranks one after another. A load at another tensor-parallel size puts
# the rows in a wrong order. Megatron-Bridge stores a LoRA adapter the same way
# (``in_proj.adapter.linear_out.weight``). This package stores bias and adapter section
# by section. The functions below also load sections from Megatron's tensor; the sizes
# of its stored shards tell the order of its rows.

# Section's key -> (whole tensor's key and number of rows, section's first row and
# number of rows).
_place_of: dict[str, tuple[str, int, int, int]] = {}


def register_sections_of_upstream(build: Callable) -> Callable:
    """Wrap ``build``, which cuts a tensor into sections; the wrapper notes which rows
    each has."""

    def build_sections(key: str, *args: object) -> list[ShardedTensor]:
        """Call ``build`` for ``key``; store each section's first row and size in
        ``_place_of``."""
        sections = build(key, *args)
        sizes = [section.global_shape[section.prepend_axis_num] for section in sections]
        start = 0
        for section, size in zip(sections, sizes, strict=True):
            _place_of[section.key] = key, sum(sizes), start, size
            start += size
        return sections

    return build_sections


def load_sections_from_whole_tensor(
    load: Callable,
    strategy: object,
    sharded_state_dict: StateDict,
    checkpoint_dir: str | Path,
    *args: object,
    **kwargs: object,
) -> StateDict:
    """Call Megatron's ``load``; sections absent in the file are cut from its whole
    tensor."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import (
        dict_list_map_inplace,
        extract_matching_values,
        merge,
        nested_values,
    )

    def is_section(value: object) -> bool:
        return isinstance(value, ShardedTensor) and value.key in _place_of

    if not any(map(is_section, nested_values(sharded_state_dict))):
        return load(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    stored: StateDict = (
        FileSystemReader(checkpoint_dir).read_metadata().state_dict_metadata
    )
    upstream, others = extract_matching_values(
        sharded_state_dict,
        lambda v: (
            is_section(v) and v.key not in stored and _place_of[v.key][0] in stored
        ),
    )

    @cache
    def whole_tensor(key: str) -> Tensor:
        metadata = stored[key]
        state = {key: torch.empty(metadata.size, dtype=metadata.properties.dtype)}
        load_tensors(
            state, storage_reader=FileSystemReader(checkpoint_dir), no_dist=True
        )
        return state[key]

    def read(section: ShardedTensor) -> Tensor:
        key = _place_of[section.key][0]
        return _rows_of(section, whole_tensor(key), stored[key])

    dict_list_map_inplace(read, upstream)
    loaded = load(strategy, others, checkpoint_dir, *args, **kwargs)
    merge(loaded, upstream)
    return loaded


def _rows_of(
    section: ShardedTensor, whole_tensor: Tensor, stored: TensorStorageMetadata
) -> Tensor:
    """The rows of ``section`` in ``whole_tensor``, whose metadata ``stored`` has
    shards' sizes."""
    whole_key, width, start, size = _place_of[section.key]
    axis = section.prepend_axis_num
    shards = {chunk.sizes[axis] for chunk in stored.chunks}
    shard = min(shards)
    if (
        whole_tensor.shape[axis] != width
        or len(shards) > 1
        or width % shard
        or size % (width // shard)
    ):
        raise ValueError(
            f"{whole_key} has {whole_tensor.shape[axis]} rows in the checkpoint, in "
            f"shards of {sorted(shards)}; the layer has {width} and reads "
            "shards of equal size. Build the layer with the checkpoint's sizes."
        )
    ranks = width // shard
    layer = whole_tensor[tuple(section.global_offset[:axis])].unflatten(
        0, (ranks, shard)
    )
    rows = layer[:, start // ranks : (start + size) // ranks].flatten(0, 1)
    first = section.global_offset[axis]
    rows = rows[first : first + section.local_shape[0]]
    return rows.to(section.dtype).to(
        section.data.device if section.data is not None else "cpu"
    )

"""Repairs Megatron 0.19's writing and reading of checkpoints.

The first part of this file has wrappers of optimizers' methods, called as
``wrapper(method, optimizer, *the method's arguments)``; `.mixed_dtype_optimizers`
installs them. The second part reads the bias and the adapters of ``in_proj`` from
checkpoints of Megatron's own layer.

A gradient buffer has the parameters of one dtype and is divided into *buckets*. Each
data-parallel rank holds a *share* of a bucket. Names and formats are those of
Megatron's DistributedOptimizer.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

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

    The fp32 bucket is small, so a rank's share of it may have no parameter. Megatron
    refuses to save such a share ("empty bucket encountered"; NVIDIA/Megatron-LM pull
    request 6191 repairs this for shares that have padding only). This wrapper adds an
    entry that is marked as padding, which a load skips.
    """
    try:
        return original(optimizer, *args, **kwargs)
    except (AssertionError, IndexError):  # IndexError if python -O skips the assertion
        buckets_of_buffers = (
            buckets for ranges in optimizer.gbuf_ranges for buckets in ranges.values()
        )
        buckets = chain.from_iterable(buckets_of_buffers)
        if all(bucket["param_map"] for bucket in buckets):
            raise  # every share has parameters, so this is another error
    get_state = optimizer.get_parameter_state_dp_reshardable
    optimizer.get_parameter_state_dp_reshardable = lambda: _with_padding_entries(
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


def _with_padding_entries(optimizer: DistributedOptimizer, state: dict) -> dict:
    """Add an entry to ``state`` for each bucket in which this rank has no parameter;
    return ``state``.

    ``state[buffer's index][dtype]`` has one list per bucket. The list has a dictionary
    of states for each parameter in this rank's share.
    """
    group = optimizer.data_parallel_group
    for index, buffer in enumerate(optimizer.buffers):
        for entries_of_buckets in state[index].values():
            example = next(chain.from_iterable(entries_of_buckets), {})
            for bucket, entries in zip(buffer.buckets, entries_of_buckets, strict=True):
                if not entries:
                    share = bucket.grad_data.numel() // group.size()
                    # elements from this share's start to the bucket's end, no padding
                    remaining = bucket.numel_unpadded - group.rank() * share
                    size = max(0, min(share, remaining))
                    device = bucket.grad_data.device
                    entries.append(_padding_entry(optimizer, example, size, device))
    return state


def _padding_entry(
    optimizer: DistributedOptimizer,
    example: StateDict,
    size: int,
    device: torch.device,
) -> StateDict:
    """A padding entry with zeros ``[size]`` for each state of ``example``, in the same
    dtypes.

    ``example`` is an entry of another bucket. If it is empty, zeros are fp32.
    """
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


def slice_without_padding(
    shard_state: Callable,
    optimizer: Any,
    /,
    *args: object,
    **kwargs: object,
) -> StateDict:
    """Call ``sharded_param_state_fully_reshardable`` (``shard_state``) with corrected
    offsets.

    A buffer has several buckets with ``overlap_grad_reduce`` or a shared embedding. Then
    Megatron gathers every state without the padding between buckets, and slices it at
    offsets that count the padding. So parameters after the first padding get values of
    other parameters, without an error (repaired on Megatron's main). This wrapper gives
    Megatron copies of the buffers without padding, whose offsets fit the states.
    """
    gather = optimizer.get_parameter_state_dp_zero
    buffers = optimizer.buffers
    has_padding = any(
        bucket.grad_data.numel() != bucket.numel_unpadded
        for buffer in buffers
        for bucket in buffer.buckets[:-1]
    )
    if not has_padding:
        return shard_state(optimizer, *args, **kwargs)

    def gather_then_leave_padding_out(*args: object, **kwargs: object) -> object:
        """Return the gathered states; replace ``optimizer.buffers`` by copies without
        padding."""
        gathered = gather(*args, **kwargs)
        optimizer.buffers = [_buffer_without_padding(buffer) for buffer in buffers]
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


def _buffer_without_padding(buffer: _ParamAndGradBuffer) -> SimpleNamespace:
    """A copy of the gradient ``buffer`` without padding, with only the attributes that
    Megatron reads to slice states.

    Its ``param_index_map``: parameter -> its first element in the buffer, the end of its
    elements, the index of its bucket.
    """
    buckets = []
    start = 0
    moves = []  # for each bucket: the change of its parameters' offsets
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

    A load of the format torch_dcp fills states that exist already, but makes none. It
    passes ``is_loading``, an argument that Megatron 0.19's method does not take. If
    ``is_loading``, this wrapper first makes the states of each optimizer in ``chained``.
    """
    if is_loading:
        for member in chained.chained_optimizers:
            if not member.is_stub_optimizer:
                member.init_state_fn(member.optimizer, member.config)
                # Only torch's Adam has a step per parameter; others have a step per
                # group.
                if isinstance(member.optimizer, torch.optim.Adam):
                    for state in member.optimizer.state.values():
                        step = torch.zeros((), dtype=torch.float32, device="cpu")
                        state.setdefault("step", step)
    return state_dict(chained)


def leave_strides_out(
    read: Callable,
    strategy: object,
    checkpoint_dir: str | Path,
    metadata: Metadata | None = None,
) -> StateDict:
    """Wrap ``TorchDistLoadShardedStrategy.load_tensors_metadata`` for files of torch
    2.15.

    ``read``, the strategy's method, passes the stored properties of a tensor to
    ``torch.empty``. ``torch.empty`` refuses the strides that torch 2.15 stores. So this
    wrapper removes the strides from ``metadata`` first. If ``metadata`` is None, it is
    read from the files in ``checkpoint_dir``.
    """
    from megatron.core.dist_checkpointing.strategies import torch as torch_files

    if metadata is None:
        metadata = torch_files._get_filesystem_reader(checkpoint_dir).read_metadata()
    for stored in metadata.state_dict_metadata.values():
        if isinstance(stored, torch_files.TensorStorageMetadata):
            vars(stored.properties).pop("strides", None)
    return read(strategy, checkpoint_dir, metadata)


# Two formats store states as gradient buffers, without names of parameters:
# ``dp_reshardable`` (Megatron's default) and the optimizer's file of ``--ckpt-format
# torch``.
# With fp32 ``A_log`` and ``dt_bias`` the buffers have other sizes than with bf16 ones.
# Megatron's error names only the sizes, so this file adds a note to the error.
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
    """Call ``original``, Megatron's own method; in a save, first warn of fp32
    parameters."""
    if not is_loading:
        _warn_of_fp32_parameters(optimizer, "dp_reshardable", _RESHARDABLE_FLAG)
    return original(optimizer, model_sharded_state_dict, is_loading, metadata)


def warn_on_torch_file(save: Callable, optimizer: object, filename: str) -> None:
    """Warn of fp32 parameters, then call ``save``, Megatron's method, which writes
    ``filename``. ``optimizer`` may be a ChainedOptimizer, which has several."""
    flags = f"--ckpt-format torch_dist --auto-detect-ckpt-format {_RESHARDABLE_FLAG}"
    for member in getattr(optimizer, "chained_optimizers", [optimizer]):
        _warn_of_fp32_parameters(member, "--ckpt-format torch", flags)
    save(optimizer, filename)


def _warn_of_fp32_parameters(optimizer: object, file_format: str, flags: str) -> None:
    """If ``optimizer`` has fp32 parameters, warn that Megatron's own layer does not
    load ``file_format``, and advise to save with ``flags``.

    Only a DistributedOptimizer has gradient buffers; other optimizers give no warning.
    """
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
    """Call ``load``, a method of Megatron, with its arguments; add ``note`` to an error
    whose message matches ``pattern``."""
    try:
        return load(*args, **kwargs)
    except BaseException as error:  # CheckpointException of torch is a BaseException
        if pattern.search(str(error)):
            error.add_note(note)
        raise


# Wrap DistributedOptimizer.load_parameter_state_from_dp_zero and
# TorchDistLoadShardedStrategy.load.
explain_file_size_error = partial(_add_note, _FILE_SIZE_ERROR, _FILE_SIZE_NOTE)
explain_bucket_size_error = partial(_add_note, _BUCKET_SIZE_ERROR, _BUCKET_SIZE_NOTE)

# megatron-core 0.19 stores ``in_proj.bias`` as one tensor: the shards of the
# tensor-parallel ranks, one after another. A load at another tensor-parallel size puts
# the rows in a wrong order. Megatron-Bridge stores a LoRA adapter the same way
# (``in_proj.adapter.linear_out.weight``). This package stores each section of bias and
# adapter as a tensor of its own. The functions below load sections from Megatron's
# tensor too. They compute the order of its rows from the sizes of its stored shards.


class _SectionRows(NamedTuple):
    """The rows of a section in the tensor that Megatron stores."""

    whole_key: str  # the key of Megatron's tensor
    whole_row_count: int  # the number of rows of that tensor
    first_row: int  # the section's first row
    row_count: int  # the section's number of rows


_section_rows: dict[str, _SectionRows] = {}  # by the section's key


def register_sections_of_upstream(build: Callable) -> Callable:
    """Wrap ``build(key, ...)`` so that it also stores each section's rows in
    _section_rows.

    ``build`` divides the tensor of ``key`` into a ShardedTensor per section.
    :func:`load_sections_from_whole_tensor` reads the rows.
    """

    def build_sections(key: str, *args: object) -> list[ShardedTensor]:
        """Call ``build`` for ``key``, and store the rows of each section."""
        sections = build(key, *args)
        sizes = [section.global_shape[section.prepend_axis_num] for section in sections]
        first = 0
        for section, size in zip(sections, sizes, strict=True):
            _section_rows[section.key] = _SectionRows(key, sum(sizes), first, size)
            first += size
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
    """Call Megatron's ``load``; a section that the checkpoint lacks is read from the
    whole tensor that Megatron stores.

    ``load`` is ``TorchDistLoadShardedStrategy.load``; the other arguments are its own.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import (
        dict_list_map_inplace,
        extract_matching_values,
        merge,
        nested_values,
    )

    def is_section(value: object) -> bool:
        """Whether ``value`` is a section whose rows are in _section_rows."""
        return isinstance(value, ShardedTensor) and value.key in _section_rows

    if not any(map(is_section, nested_values(sharded_state_dict))):
        return load(strategy, sharded_state_dict, checkpoint_dir, *args, **kwargs)
    stored: StateDict = (
        FileSystemReader(checkpoint_dir).read_metadata().state_dict_metadata
    )

    def is_stored_whole(value: Any) -> bool:
        """Whether the checkpoint lacks the section ``value`` and has the whole
        tensor."""
        if not is_section(value) or value.key in stored:
            return False
        return _section_rows[value.key].whole_key in stored

    upstream, others = extract_matching_values(sharded_state_dict, is_stored_whole)

    @cache
    def whole_tensor(key: str) -> Tensor:
        """The tensor ``key`` of the checkpoint, on the CPU. Each rank reads the whole
        tensor once, for all its sections."""
        metadata = stored[key]
        dtype = metadata.properties.dtype
        state = {key: torch.empty(metadata.size, dtype=dtype, device="cpu")}
        load_tensors(
            state, storage_reader=FileSystemReader(checkpoint_dir), no_dist=True
        )
        return state[key]

    def read_section(section: ShardedTensor) -> Tensor:
        """The rows of ``section`` on this rank."""
        key = _section_rows[section.key].whole_key
        return _rows_of_section(section, whole_tensor(key), stored[key])

    dict_list_map_inplace(read_section, upstream)
    loaded = load(strategy, others, checkpoint_dir, *args, **kwargs)
    merge(loaded, upstream)
    return loaded


def _rows_of_section(
    section: ShardedTensor, whole_tensor: Tensor, stored: TensorStorageMetadata
) -> Tensor:
    """The rows of ``section`` on this rank, out of ``whole_tensor``.

    Megatron's tensor has one shard for each tensor-parallel rank that stored it, one
    after another. A shard has its rank's part of every section. ``stored``, the tensor's
    metadata, has the sizes of the shards.
    """
    place = _section_rows[section.key]
    whole_rows = place.whole_row_count
    axis = section.prepend_axis_num
    shard_sizes = {chunk.sizes[axis] for chunk in stored.chunks}
    shard_rows = min(shard_sizes)
    if (
        whole_tensor.shape[axis] != whole_rows
        or len(shard_sizes) > 1
        or whole_rows % shard_rows
        or place.row_count % (whole_rows // shard_rows)
    ):
        raise ValueError(
            f"{place.whole_key} has {whole_tensor.shape[axis]} rows in the checkpoint, "
            f"in shards of {sorted(shard_sizes)}; the layer has {whole_rows} and reads "
            "shards of equal size. Build the layer with the checkpoint's sizes."
        )
    ranks = whole_rows // shard_rows
    # the axes before ``axis``, if there are any, number the layers
    of_layer = whole_tensor[tuple(section.global_offset[:axis])]
    by_rank = of_layer.unflatten(0, (ranks, shard_rows))
    first = place.first_row // ranks
    end = (place.first_row + place.row_count) // ranks
    section_rows = by_rank[:, first:end].flatten(0, 1)
    local_first = section.global_offset[axis]
    rows = section_rows[local_first : local_first + section.local_shape[0]]
    device = torch.device("cpu")
    if section.data is not None:
        device = section.data.device
    return rows.to(section.dtype).to(device)

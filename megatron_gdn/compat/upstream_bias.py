"""Loads the projection's bias, and adapters of it, from checkpoints of Megatron's own layer.

megatron-core 0.19 stores ``in_proj.bias`` as one tensor, the shards of the tensor-parallel ranks
end to end: at any other size it loads scrambled, without an error. So does Megatron-Bridge's tensor
of a LoRA adapter that has the projection's rows (``in_proj.adapter.linear_out.weight``). Here both
are stored section by section, like the weight. If a file has the one tensor and not the sections,
the wrapper below reads it; the shards in the file give the order of its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
    merge,
    nested_values,
)
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors

# Key of a section -> whole tensor's key and number of rows; section's first row and its rows.
_section_of: dict[str, tuple[str, int, int, int]] = {}


def read_upstream_bias(whole_key: str, sections: Sequence[ShardedTensor]) -> None:
    """Let ``sections``, the rows of the tensor ``whole_key``, be loaded from upstream's files."""
    sizes = [section.global_shape[section.prepend_axis_num] for section in sections]
    start = 0
    for section, size in zip(sections, sizes, strict=True):
        _section_of[section.key] = whole_key, sum(sizes), start, size
        start += size
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy

    load = TorchDistLoadShardedStrategy.load
    if not hasattr(load, "_reads_upstream_bias"):
        TorchDistLoadShardedStrategy.load = _with_upstream_bias(load)
        TorchDistLoadShardedStrategy.load._reads_upstream_bias = True


def _with_upstream_bias(load: Callable) -> Callable:
    @wraps(load)
    def load_also_upstream_bias(
        self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path, *args, **kwargs
    ) -> dict[str, Any]:
        def is_section(value: Any) -> bool:
            return isinstance(value, ShardedTensor) and value.key in _section_of

        if not any(map(is_section, nested_values(sharded_state_dict))):
            return load(self, sharded_state_dict, checkpoint_dir, *args, **kwargs)
        saved: dict[str, Any] = FileSystemReader(checkpoint_dir).read_metadata().state_dict_metadata
        foreign, others = extract_matching_values(
            sharded_state_dict,
            lambda v: is_section(v) and v.key not in saved and _section_of[v.key][0] in saved,
        )

        @cache
        def whole(key: str) -> Tensor:
            """Read by this rank alone."""
            about: Any = saved[key]
            state = {key: torch.empty(about.size, dtype=about.properties.dtype)}
            load_tensors(state, storage_reader=FileSystemReader(checkpoint_dir), no_dist=True)
            return state[key]

        def read(section: ShardedTensor) -> Tensor:
            key = _section_of[section.key][0]
            return _rows_of(section, whole(key), saved[key])

        dict_list_map_inplace(read, foreign)
        loaded = load(self, others, checkpoint_dir, *args, **kwargs)
        merge(loaded, foreign)
        return loaded

    return load_also_upstream_bias


def _rows_of(section: ShardedTensor, whole: Tensor, saved: Any) -> Tensor:
    """The rows of ``section`` in upstream's tensor ``[..., rows]`` or ``[..., rows, columns]``."""
    whole_key, width, start, size = _section_of[section.key]
    axis = section.prepend_axis_num
    shards = {chunk.sizes[axis] for chunk in saved.chunks}
    shard = shards.pop()
    if whole.shape[axis] != width or shards or width % shard or size % (width // shard):
        raise ValueError(
            f"{whole_key} has {whole.shape[axis]} rows in the checkpoint, in shards of "
            f"{sorted([shard, *shards])}; the layer has {width} and reads shards of equal size. "
            f"Build the layer with the checkpoint's sizes."
        )
    ranks = width // shard
    layer = whole[tuple(section.global_offset[:axis])].unflatten(0, (ranks, shard))
    rows = layer[:, start // ranks : (start + size) // ranks].flatten(0, 1)
    first = section.global_offset[axis]
    rows = rows[first : first + section.local_shape[0]]
    return rows.to(section.dtype).to(section.data.device if section.data is not None else "cpu")

"""The keys of a `TensorMap`'s tensors in Megatron's distributed checkpoints.

A checkpoint holds whole tensors for any number of ranks: each rank of a later run reads its part.
Three kinds of keys are not the model's. Each section of the fused projection and of the
convolution has its own key. All experts of a layer are one tensor, with the expert as its first
dimension. Most modules have an ``_extra_state`` beside their weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from ..maps.tensor_map import TensorMap

_EXPERT = re.compile(r"\.experts\.(linear_fc[12])\.weight\d+$")
# Modules with an ``_extra_state``: Megatron's linears, or Transformer Engine's linears, norms and
# attention. A model without such a module does not read its key.
_STATEFUL = frozenset(
    (
        *("in_proj", "out_norm", "out_proj"),
        *("linear_qkv", "q_layernorm", "k_layernorm", "linear_proj"),
        *("pre_mlp_layernorm", "linear_fc1", "linear_fc2"),
        *("final_norm", "final_layernorm"),
    )
)


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A box of a stored tensor, and the rows of the Megatron tensor that it holds.

    Attributes:
        key: the checkpoint's key.
        shape: of the whole stored tensor.
        offsets, sizes: of the box.
        rows: first row of the Megatron tensor and the row after the last.
    """

    key: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rows: tuple[int, int]

    def of(self, full: Tensor) -> Tensor:
        """The box's content, from the whole Megatron tensor."""
        return full[slice(*self.rows)].reshape(self.sizes)


def stored_parts(entry: TensorMap, shape: Sequence[int]) -> list[StoredPart]:
    """How a checkpoint stores the Megatron tensor of ``entry``, whose whole shape is ``shape``."""
    shape = tuple(shape)
    zeros = (0,) * len(shape)
    if entry.expert is not None:
        key = _EXPERT.sub(r".experts.experts.\1.weight", entry.name)
        stacked, box = (entry.num_experts, *shape), (1, *shape)
        return [StoredPart(key, stacked, (entry.expert, *zeros), box, (0, shape[0]))]
    if not entry.section_names:
        return [StoredPart(entry.name, shape, zeros, shape, (0, shape[0]))]
    ends = pairwise(accumulate(entry.sections, initial=0))
    return [
        StoredPart(f"{entry.name}.{name}", part, zeros, part, rows)
        for name, rows in zip(entry.section_names, ends, strict=True)
        for part in [(rows[1] - rows[0], *shape[1:])]
    ]


def joined(entry: TensorMap, parts: Sequence[Tensor]) -> Tensor:
    """The Megatron tensor of ``entry`` from the contents of its `stored_parts`."""
    return parts[0][0] if entry.is_expert else torch.cat(list(parts))


def extra_state_keys(maps: Iterable[TensorMap]) -> Iterator[str]:
    """The keys of every ``_extra_state`` that a model with the tensors of ``maps`` may ask for."""
    from megatron.core.dist_checkpointing.mapping import ShardedObject

    def key(module: str, index: int = 0, count: int = 1) -> str:
        return ShardedObject(f"{module}._extra_state", None, (count,), (index,)).unique_key

    for entry in maps:
        module = entry.name.rpartition(".")[0]
        if entry.expert is not None:
            (part,) = stored_parts(entry, entry.sources[0].piece_shape)
            yield key(part.key.removesuffix(".weight"), entry.expert, entry.num_experts)
        elif module.rpartition(".")[2] in _STATEFUL and entry.name.endswith(".weight"):
            yield key(module)
            if module.endswith(".linear_proj"):
                yield key(module.replace(".linear_proj", ".core_attention"))
    # A tied model's output layer has no weight, but an extra state.
    yield key("output_layer")

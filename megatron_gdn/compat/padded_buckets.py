"""Lets DistributedOptimizer save the right states where its gradient buffer has several buckets.

A buffer is laid out as ``[bucket | padding | bucket | padding | ...]``; each bucket ends at a
multiple of 128 and of the number of data-parallel ranks. To save ``fully_reshardable``,
megatron-core 0.19 gathers every state of the optimizer without the padding, and then cuts the
parameters out of it at their places in the buffer with the padding. All parameters behind the
first padding get values of their neighbours, masters included, without an error. A buffer has
several buckets with ``overlap_grad_reduce``, and where an embedding is shared between pipeline
stages. Repaired on NVIDIA/Megatron-LM's main branch. Loading is correct.

Here each gathered state gets its padding again before Megatron cuts it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from .observe import log_once


def with_padded_buckets(sharded: Callable) -> Callable:
    """Wrap ``DistributedOptimizer.sharded_param_state_fully_reshardable``.

    A Megatron that is repaired, and buffers without padding between buckets, are left as they are.
    """

    def sharded_param_state_fully_reshardable(self, *args: Any, **kwargs: Any) -> Any:
        if not any(map(_padded_between_buckets, self.buffers)) or not _cuts_at_padded(sharded):
            return sharded(self, *args, **kwargs)
        from megatron.core import __version__

        log_once(
            f"megatron-core {__version__}: the places of the optimizer's states in a buffer of "
            f"several buckets were corrected for the fully_reshardable checkpoint."
        )
        gather = self.get_parameter_state_dp_zero
        self.get_parameter_state_dp_zero = lambda *a, **k: _padded(self.buffers, gather(*a, **k))
        try:
            return sharded(self, *args, **kwargs)
        finally:
            del self.get_parameter_state_dp_zero

    return sharded_param_state_fully_reshardable


def _padded_between_buckets(buffer: Any) -> bool:
    return any(b.grad_data.numel() != b.numel_unpadded for b in buffer.buckets[:-1])


def _padded(buffers: list[Any], state: dict[Any, Any] | None) -> dict[Any, Any] | None:
    """Put each bucket of the gathered states ``[numel_unpadded]`` at its offset in the buffer.

    Args:
        state: buffer number -> dtypes -> name -> tensor; None on ranks that gather nothing.
    """
    if state is None:
        return None
    for index, buffer in enumerate(buffers):
        sizes = [bucket.numel_unpadded for bucket in buffer.buckets]
        for tensors in state[index].values():
            for name, tensor in tensors.items():
                if isinstance(tensor, Tensor):
                    whole = tensor.new_zeros(buffer.numel)
                    for bucket, part in zip(buffer.buckets, tensor.split(sizes), strict=True):
                        whole[bucket.offset : bucket.offset + len(part)] = part
                    tensors[name] = whole
    return state


@cache
def _cuts_at_padded(sharded: Callable) -> bool:
    """Whether Megatron's function cuts parameters at offsets that count the padding.

    Tried on a buffer of two buckets: one element and one of padding, then two elements. Its state
    is 0, 1, 2, ..., so the values cut for the second parameter show the offset that was used.
    """
    from megatron.core.dist_checkpointing import ShardedTensor

    first, second = (torch.nn.Parameter(torch.zeros(size)) for size in (1, 2))
    buckets = [
        SimpleNamespace(grad_data=torch.zeros(2), numel_unpadded=size, offset=offset)
        for size, offset in ((1, 0), (2, 2))
    ]
    buffer = SimpleNamespace(
        buckets=buckets,
        numel=4,
        numel_unpadded=3,
        param_index_map={first: (0, 1, 0), second: (2, 4, 1)},
    )
    kind = (torch.float32, torch.float32)
    probe = SimpleNamespace(
        buffers=[buffer],
        gbuf_ranges=[{kind: [{"param_map": {}}, {"param_map": {}}]}],
        # Longer than the buffer: Megatron warns of parameters that end behind it.
        get_parameter_state_dp_zero=lambda **_: {0: {kind: {"param": torch.arange(8.0)}}},
    )
    model = {
        name: ShardedTensor.from_rank_offsets(name, parameter)
        for name, parameter in (("first", first), ("second", second))
    }
    state = sharded(probe, model, metadata={})
    return state[1]["param"].data.tolist() != [1.0, 2.0]

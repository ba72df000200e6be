"""One decode step of sequences whose slots are chosen on the device.

Legend: N sequences, M slots, P projection width, C conv channels, W taps, H heads, K, V of a state.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..parts import Parts
from .carry import Carry
from .step import decode


@torch.no_grad()
def decode_slots(proj: Tensor, parts: Parts, memory: Carry, slots: Tensor) -> Tensor:
    """Mix one token of N sequences and write what they carry back into their slots.

    On a GPU it is two launches of this package's kernels and one of its norm. The host does not
    wait for them, and a CUDA graph can capture them. Elsewhere it is :func:`.step.decode` between
    a gather and a scatter.

    Args:
        proj: ``[1, N, P]``.
        memory: of all slots: ``[M, C, W - 1]`` and ``[M, H, K, V]``, contiguous; written.
        slots: int64 ``[N]`` on the device, all different. The host does not read them.

    Returns:
        ``[1, N, H * V]``.

    Raises:
        ValueError: more than one token, an aligned mixer, sizes that do not fit.
    """
    if proj.shape[0] != 1 or slots.shape != proj.shape[1:2] or parts.aligned:
        raise ValueError(
            f"a step in slots takes one token each of N sequences, projection rows [1, N, P] and "
            f"slots [N], of a mixer that is not aligned; got {tuple(proj.shape)} and "
            f"{tuple(slots.shape)}{' of an aligned one' if parts.aligned else ''}."
        )
    parts.shape.check(memory, memory.state.shape[0], proj.dtype)
    if parts.steps.triton:
        return parts.read_out(parts.steps.in_slots(proj[0], parts.of_front, memory, slots), proj)
    carry = Carry(*(tensor.index_select(0, slots) for tensor in memory))
    mixed, (after,) = decode(proj, parts, carry)
    for kept, fresh in zip(memory, after, strict=True):
        kept.index_copy_(0, slots, fresh)
    return mixed

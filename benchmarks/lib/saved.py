"""What a layer keeps between forward and backward, counted on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch


def saved_mib(forward: Callable[[], torch.Tensor]) -> dict[str, float]:
    """What autograd saves in a forward, each storage once. Nothing is dropped under
    these hooks."""
    kept = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        held = forward()
    del held
    return {"saved": sum(kept.values()) / 2**20}

"""What a layer keeps between forward and backward: by arithmetic, and on a CPU by
counting."""

from __future__ import annotations

from collections.abc import Callable

import torch

from megatron_gdn.ops.delta_rule.base import HeadSizes

CHUNK = 64


def mixer_bytes_per_token(
    sizes: HeadSizes,
    recompute: str,
    *,
    operand: int = 2,
    gate: int = 4,
    kernels: bool = True,
) -> int:
    """Bytes that the mixer itself keeps of one token, its projection row included.

    Args:
        recompute: ``"none"``, ``"light"`` or ``"full"``.
        operand, gate: bytes of an element of the rows, and of the gates.
        kernels: a GPU rule, which keeps the sums of the log-decay and the inverses of
            chunks; the plain rule keeps the log-decay.
    """
    G, H, K, V = sizes
    kept = sizes.layout.width * operand
    if recompute == "full":
        return kept
    kept += H * V * operand + 2 * H * gate  # o; beta, and the log-decay or its sums
    if kernels:
        kept += H * CHUNK * operand
    if recompute == "none":
        kept += (G * K + H * V) * operand  # k, v; q is computed again in each
    return kept


def layer_bytes_per_token(sizes: HeadSizes, hidden: int, recompute: str) -> int:
    """The same of a layer in bf16 on a GPU, with out_proj's input and the layer's
    output."""
    normed = sizes.value_heads * sizes.value_dim * 2 if recompute == "none" else 0
    return mixer_bytes_per_token(sizes, recompute) + normed + hidden * 2


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

"""The choice between a readout's kernels and their plain twin."""

from __future__ import annotations

from functools import lru_cache

from .plain import Grouped, PerHead


@lru_cache(maxsize=64)
def per_head(
    gate: slice, eps: float, zero_centered: bool, triton: bool, activation: str = "silu"
) -> PerHead:
    """The readout per head, in Triton or in plain torch."""
    if not triton:
        return PerHead(gate, activation, eps, zero_centered)
    from .per_head_triton import TritonPerHead

    return TritonPerHead(gate, activation, eps, zero_centered)


def grouped(gate: slice, groups: int, eps: float, triton: bool) -> Grouped:
    """The readout per group, in Triton or in plain torch."""
    if not triton:
        return Grouped(gate, groups=groups, eps=eps)
    from .grouped_triton import TritonGrouped

    return TritonGrouped(gate, groups=groups, eps=eps)

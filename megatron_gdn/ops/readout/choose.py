"""The choice between the readout's kernels and their plain twin."""

from __future__ import annotations

from functools import lru_cache

from .plain import PlainReadout


@lru_cache(maxsize=64)
def norm_and_gate(
    gate: slice,
    eps: float,
    zero_centered: bool = False,
    activation: str = "silu",
    groups: int | None = None,
    triton: bool = False,
) -> PlainReadout:
    """The readout in Triton or in plain torch; arguments as of :class:`PlainReadout`."""
    kind = PlainReadout
    if triton:
        from .kernels import TritonReadout as kind
    return kind(gate, activation, eps, zero_centered, groups)

"""The heads of one rank: what kernels are compiled for."""

from __future__ import annotations

from typing import NamedTuple

from ..mixers.gdn.sizes import GDNDims

MODES = ("auto", "headwise", "chunkwise")


class Share(NamedTuple):
    """Heads that one rank runs.

    Attributes:
        key_heads, value_heads: their numbers.
        states: the rule also takes and returns states, as context parallelism by state passing
            asks.
    """

    key_heads: int
    value_heads: int
    states: bool

    def __str__(self) -> str:
        return f"{self.key_heads}:{self.value_heads}"


def shares_of(dims: GDNDims, tp: int = 1, cp: int = 1, mode: str = "auto") -> list[Share]:
    """What a rank of a run with these parallel sizes may have to run.

    Args:
        dims: of the whole layer.
        tp, cp: tensor and context parallel ranks.
        mode: ``linear_cp_mode``; "auto" picks per micro-batch, so both ways are listed.

    Raises:
        ValueError: the heads do not divide; the message lists the sizes that fit.
    """
    if mode not in MODES:
        raise ValueError(f"linear_cp_mode={mode!r} is unknown; use one of {', '.join(MODES)}.")
    if cp < 1:
        raise ValueError(f"context_parallel_size={cp} is not a size; it must be at least 1.")
    local, found = dims.shard(tp), []
    if cp == 1:
        return [Share(local.num_key_heads, local.num_value_heads, False)]
    if mode != "chunkwise":
        try:
            part = local.share_heads(cp)
            found.append(Share(part.num_key_heads, part.num_value_heads, False))
        except ValueError:  # "auto" then passes states
            if mode == "headwise":
                raise
    if mode != "headwise":
        found.append(Share(local.num_key_heads, local.num_value_heads, True))
    return found

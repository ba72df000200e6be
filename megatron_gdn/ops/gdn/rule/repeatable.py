"""Which kernels deterministic mode may use: those that were seen to repeat, and nothing else.

A kernel's source shows whether it has atomics or timed choices, but not whether it has a race. So
every entry below was tested with ``benchmarks/bench_determinism.py`` on that GPU: hundreds of
forward and backward passes in two processes, over poisoned memory and beside a competing stream,
with every bit of the output and of every gradient equal.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...rules.obstacles import installed_version
from ..sizes import HeadSizes


class Repeatable(NamedTuple):
    """One combination that repeats bit for bit."""

    backend: str
    capability: tuple[int, int]
    versions: dict[str, str]  # of the packages that hold and compile the kernels
    dtypes: tuple[torch.dtype, ...]
    value_heads_per_key_head: tuple[int, ...]
    evidence: str  # said in the log


REPEATABLE: tuple[Repeatable, ...] = (
    Repeatable(
        "flash_qla", (9, 0), {"flash-qla": "0.1.3", "tilelang": "0.1.15"}, (torch.bfloat16,),
        (1, 2, 4),
        "2 x 200 repeats of 8192 tokens were equal on an H200",
    ),
)  # fmt: skip


def why_not_repeatable(
    backend: str, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
) -> str | None:
    """Why deterministic mode does not take ``backend`` here; None when it was seen to repeat."""
    known = find_repeatable(backend, device, dtype, sizes)
    if known is not None:
        return None
    return (
        f"{backend} was not tested for repeatability with {dtype}, {sizes.key_heads} key and "
        f"{sizes.value_heads} value heads on this GPU with the installed versions"
    )


def find_repeatable(
    backend: str, device: torch.device, dtype: torch.dtype, sizes: HeadSizes
) -> Repeatable | None:
    """The entry of ``REPEATABLE`` that covers this combination; None if there is none."""
    if device.type != "cuda":
        return None
    capability = torch.cuda.get_device_capability(device)
    ratio = sizes.value_heads // sizes.key_heads
    for known in REPEATABLE:
        if (
            (known.backend, known.capability) == (backend, capability)
            and all(installed_version(name) == v for name, v in known.versions.items())
            and dtype in known.dtypes
            and ratio in known.value_heads_per_key_head
        ):
            return known
    return None

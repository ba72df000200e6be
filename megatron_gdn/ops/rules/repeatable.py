"""Where a rule's bits were seen to repeat."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..obstacles import installed_version


class Repeatable(NamedTuple):
    """A GPU, versions, dtypes and sizes for which a rule repeats bit for bit.

    A hundred forward and backward passes or more ran on this GPU, in memory that was
    filled with NaN and other garbage, while another CUDA stream was busy; and two
    processes gave the same bits.
    """

    capability: tuple[int, int]
    versions: dict[str, str]  # versions of packages that contain or compile the kernels
    dtypes: tuple[torch.dtype, ...]
    sizes: tuple[object, ...]  # of heads, as the rule counts them
    evidence: str  # what the log says about the test

    def covers(self, device: torch.device, dtype: torch.dtype, size: object) -> bool:
        return (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) == self.capability
            and all(installed_version(n) == v for n, v in self.versions.items())
            and dtype in self.dtypes
            and size in self.sizes
        )

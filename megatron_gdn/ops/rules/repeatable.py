"""The GPUs, versions, dtypes and sizes for which a test found that a rule gives the
same bits again."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..obstacles import installed_version


class RepeatableSetup(NamedTuple):
    """A GPU, versions, dtypes and sizes for which a rule gave the same bits in every
    run.

    At least a hundred forward and backward passes ran on this GPU. Free memory was
    filled with NaN and other garbage, and another CUDA stream was busy. Two processes
    also gave the same bits.
    """

    capability: tuple[int, int]
    versions: dict[str, str]  # versions of packages that contain or compile the kernels
    dtypes: tuple[torch.dtype, ...]
    # the tested sizes of heads, in the form in which a rule passes them to
    # :meth:`covers`
    sizes: tuple[object, ...]
    evidence: str  # a description of the test, for the log

    def covers(self, device: torch.device, dtype: torch.dtype, size: object) -> bool:
        """Whether the rule was tested on such a device with the installed versions,
        this ``dtype`` and this ``size`` of heads."""
        return (
            device.type == "cuda"
            and torch.cuda.get_device_capability(device) == self.capability
            and all(
                installed_version(package) == tested
                for package, tested in self.versions.items()
            )
            and dtype in self.dtypes
            and size in self.sizes
        )

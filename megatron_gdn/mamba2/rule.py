"""The rules of a Mamba2 mixer, and the choice among them."""

from __future__ import annotations

import torch

from ..ops.rules.base import Bits
from ..ops.rules.choice import Choice, choose
from ..ops.rules.fla import kernels_of_fla
from ..ops.state_maps.state_map import StateShape
from .fla import FlaSSD
from .plain import PlainSSD


def choose_ssd(
    backend: str,
    state: StateShape,
    device: torch.device,
    dtype: torch.dtype,
    bits: Bits = Bits.FREE,
) -> Choice:
    """The rule of a Mamba2 mixer, from dtype, device and installed packages alone.

    ``backend``: ``"fla"`` (its ``simple_gla`` kernels), ``"reference"`` or ``"auto"``, fla where it
    runs; see :func:`..ops.rules.choice.choose`, which has the errors too.
    """
    return choose(
        backend, "Mamba2", {"fla": kernels_of_fla(FlaSSD, device, dtype, state)}, PlainSSD,
        device=device, bits=bits,
    )  # fmt: skip

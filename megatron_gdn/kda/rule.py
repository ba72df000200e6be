"""The rules of Kimi Delta Attention: the gated delta rule with a decay per channel."""

from __future__ import annotations

import torch

from ..ops.delta_rule.plain import PlainRule
from ..ops.rules.base import Bits
from ..ops.rules.choice import Choice, Kernels, choose
from ..ops.rules.fla import kernels_of_fla
from ..ops.state_maps.state_map import StateShape
from .cudnn import CudnnKDA, why_not_cudnn
from .fla import FlaKDA


def choose_kda(
    backend: str,
    state: StateShape,
    lower_bound: float | None,
    device: torch.device,
    dtype: torch.dtype,
    bits: Bits = Bits.FREE,
) -> Choice:
    """The rule of a Kimi Delta Attention, from dtype, device and installed packages alone.

    Args:
        backend: ``"fla"``, ``"cudnn"`` (cudnn-frontend's kernels for Hopper, by this name alone),
            ``"reference"`` (plain torch) or ``"auto"``, fla where it runs.
        lower_bound: of the log-decay. From -5 on fla takes faster kernels; cuDNN takes no other.
        bits: see :func:`..ops.rules.choice.choose`, which has the errors too.
    """
    K, V = state.rows, state.columns
    kernels = {
        "fla": kernels_of_fla(FlaKDA, device, dtype, state, lambda: FlaKDA(lower_bound)),
        "cudnn": Kernels(
            lambda: why_not_cudnn(device, dtype, K, V, lower_bound), CudnnKDA,
            unsteady="cuDNN cuts a sequence into pieces by the number of all sequences",
            by_name=True,
        ),
    }  # fmt: skip
    return choose(
        backend, "Kimi Delta Attention", kernels, PlainRule,
        device=device, bits=bits,
    )  # fmt: skip

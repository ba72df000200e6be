"""Implementations of the KDA recurrence for the mixer, and the choice among them."""

from __future__ import annotations

import torch

from ...rules.base import Rule
from ...rules.choice import Choice, Kernels, kernels_or_plain
from ...rules.obstacles import FLA_IS_TIMED, Obstacle, why_not_fla
from ...state_maps.state_map import StateShape
from .cudnn import CudnnKDA, why_not_cudnn
from .plain import PlainKDA

_CUT_BY_ALL = "cuDNN cuts a sequence into pieces by the number of all sequences"


def _why_not_fla(device: torch.device, dtype: torch.dtype, key_dim: int) -> Obstacle | None:
    obstacle = why_not_fla(device, dtype, key_dim)
    if obstacle is not None:
        return obstacle
    from .fla import why_not_callable

    why = why_not_callable()
    return None if why is None else Obstacle(f"flash-linear-attention: {why}", ImportError)


def resolve_kda(
    backend: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    key_dim: int,
    value_dim: int | None = None,
    lower_bound: float | None = None,
    deterministic: bool = False,
    aligned: bool = False,
) -> Choice:
    """Choose the rule of a Kimi Delta Attention, from dtype, device and installed packages alone.

    Args:
        backend: ``"fla"`` (its ``kda`` kernels), ``"cudnn"`` (cudnn-frontend's for Hopper),
            ``"reference"`` (plain torch) or ``"auto"``, fla where it runs.
        key_dim, value_dim: rows and columns of a state.
        lower_bound: of the log-decay. With one of -5 or more fla takes faster kernels; cuDNN takes
            no other.
        deterministic, aligned: see :func:`megatron_gdn.ops.rules.choice.kernels_or_plain`, which
            has the errors too.
    """
    device = torch.device(device)

    def fla() -> Rule:
        from .fla import FlaKDA

        return FlaKDA(lower_bound)

    kernels = {
        "fla": Kernels(lambda: _why_not_fla(device, dtype, key_dim), fla, FLA_IS_TIMED),
        "cudnn": Kernels(
            lambda: why_not_cudnn(device, dtype, key_dim, value_dim, lower_bound),
            CudnnKDA, _CUT_BY_ALL,
        ),
    }  # fmt: skip
    return kernels_or_plain(
        backend, "Kimi Delta Attention", PlainKDA, kernels,
        device=device, deterministic=deterministic, aligned=aligned,
    )  # fmt: skip


def choose_kda(
    backend: str,
    state: StateShape,
    lower_bound: float | None,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    *,
    aligned: bool = False,
) -> Choice:
    """:func:`resolve_kda` for a mixer, which learns device and dtype last."""
    return resolve_kda(
        backend, device=device, dtype=dtype, key_dim=state.rows, value_dim=state.columns,
        lower_bound=lower_bound, deterministic=deterministic, aligned=aligned,
    )  # fmt: skip

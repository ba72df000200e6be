"""Implementations of the SSD recurrence for the mixer, and the choice among them."""

from __future__ import annotations

import torch

from ...rules.base import Rule
from ...rules.choice import Choice, Kernels, kernels_or_plain
from ...rules.obstacles import FLA_IS_TIMED, Obstacle, why_not_fla
from ...state_maps.state_map import StateShape
from .plain import PlainSSD


def _why_not_fla(
    device: torch.device, dtype: torch.dtype, state_dim: int, head_dim: int | None
) -> Obstacle | None:
    obstacle = why_not_fla(device, dtype)
    if obstacle is not None:
        return obstacle
    if state_dim > 256:
        return Obstacle(f"fla takes a state dim up to 256, not {state_dim}")
    for name, size in (("state", state_dim), ("head", head_dim)):
        if size is not None and size % 2:
            return Obstacle(f"fla's backward takes an even {name} dim, not {size}")
    from .fla import why_not_callable

    why = why_not_callable()
    return None if why is None else Obstacle(f"flash-linear-attention: {why}", ImportError)


def resolve_ssd(
    backend: str = "auto",
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    state_dim: int,
    head_dim: int | None = None,
    deterministic: bool = False,
    aligned: bool = False,
) -> Choice:
    """Choose the rule of a Mamba2 mixer, from dtype, device and installed packages alone.

    Args:
        backend: ``"fla"`` (its ``simple_gla`` kernels), ``"reference"`` (plain torch) or
            ``"auto"``, fla where it runs.
        state_dim, head_dim: rows and columns of a state.
        deterministic, aligned: see :func:`megatron_gdn.ops.rules.choice.kernels_or_plain`, which
            has the errors too.
    """
    device = torch.device(device)

    def fla() -> Rule:
        from .fla import FlaSSD

        return FlaSSD()

    def why_not() -> Obstacle | None:
        return _why_not_fla(device, dtype, state_dim, head_dim)

    return kernels_or_plain(
        backend, "Mamba2", PlainSSD, {"fla": Kernels(why_not, fla, FLA_IS_TIMED)},
        device=device, deterministic=deterministic, aligned=aligned,
    )  # fmt: skip


def choose_ssd(
    backend: str,
    state: StateShape,
    device: torch.device,
    dtype: torch.dtype,
    deterministic: bool,
    *,
    aligned: bool = False,
) -> Choice:
    """:func:`resolve_ssd` for a mixer, which learns device and dtype last."""
    return resolve_ssd(
        backend, device=device, dtype=dtype, state_dim=state.rows, head_dim=state.columns,
        deterministic=deterministic, aligned=aligned,
    )  # fmt: skip

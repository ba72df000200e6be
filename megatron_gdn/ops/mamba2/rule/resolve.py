"""Implementations of the SSD recurrence for the mixer, and the choice among them."""

from __future__ import annotations

import torch

from ...once import say_once
from ...rules.choice import ON_GRID, Choice, why_not_aligned
from ...rules.obstacles import FLA_IS_TIMED, Obstacle, why_not_fla
from ...state_maps.state_map import StateShape
from .plain import PlainSSD

RULES = ("fla", "reference")


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
            ``"auto"``, the first of these that fits. A name is never replaced by another.
        state_dim, head_dim: rows and columns of a state.
        deterministic: results repeat bit for bit and a sequence's do not depend on the others of
            its batch: the reference. fla is refused, since it picks its kernels by timing.
        aligned: training and generation give a token the same bits, see :mod:`..aligned`: the
            reference on a grid.

    Raises:
        ValueError: an unknown name, or one that the dtype, the device, ``deterministic`` or
            ``aligned`` rule out.
        ImportError: fla is missing, too old, or known to compute wrong results here.
    """
    if backend not in ("auto", *RULES):
        legal = ", ".join(repr(name) for name in RULES)
        raise ValueError(f"unknown backend {backend!r} of Mamba2; use 'auto' or one of {legal}.")
    if aligned:
        why = why_not_aligned(backend)
        if why is not None:
            raise ValueError(why)
        return Choice(PlainSSD(aligned=True), ON_GRID)
    if backend == "reference":
        return Choice(PlainSSD(), "requested")
    if deterministic:
        if backend == "fla":
            raise ValueError(
                f"backend='fla': {FLA_IS_TIMED}; in deterministic mode use 'auto' or 'reference'."
            )
        return Choice(PlainSSD(), "deterministic mode")
    device = torch.device(device)
    obstacle = _why_not_fla(device, dtype, state_dim, head_dim)
    if obstacle is None:
        from .fla import FlaSSD

        return Choice(FlaSSD(), "requested" if backend == "fla" else f"{dtype} on this GPU")
    if backend == "fla":
        raise obstacle.error(f"backend='fla': {obstacle.why}.")
    if device.type == "cuda":
        say_once(f"Mamba2 takes the plain-torch rule ({obstacle.why}).", device.type)
    return Choice(PlainSSD(), f"not fla: {obstacle.why}")


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

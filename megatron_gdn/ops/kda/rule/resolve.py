"""Implementations of the KDA recurrence for the mixer, and the choice among them."""

from __future__ import annotations

import torch

from ...once import say_once
from ...rules.choice import ON_GRID, Choice, why_not_aligned
from ...rules.obstacles import FLA_IS_TIMED, Obstacle, why_not_fla
from ...state_maps.state_map import StateShape
from .cudnn import CudnnKDA, why_not_cudnn
from .plain import PlainKDA

RULES = ("fla", "cudnn", "reference")
_UNTRIED = "the laws of fla's kernels ran in Triton's interpreter alone; backend='fla' takes them"
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
    lower_bound: float | None = None,
    deterministic: bool = False,
    aligned: bool = False,
) -> Choice:
    """Choose the rule of a Kimi Delta Attention, from dtype, device and installed packages alone.

    Args:
        backend: ``"fla"`` (its ``kda`` kernels), ``"cudnn"`` (cudnn-frontend's for Hopper),
            ``"reference"`` (plain torch) or ``"auto"``, the reference until the laws of fla's
            kernels have run on a GPU. A name is never replaced by another.
        lower_bound: of the log-decay. With one of -5 or more fla takes faster kernels.
        deterministic: results repeat bit for bit and a sequence's do not depend on the others of
            its batch: the reference. fla is refused, since it picks its kernels by timing, and
            cuDNN, since it cuts a sequence by the number of all.
        aligned: training and generation give a token the same bits, see :mod:`...aligned`: the
            reference, on its grid.

    Raises:
        ValueError: an unknown name, or one that the dtype, the device, ``deterministic`` or
            ``aligned`` rule out.
        ImportError: fla or cudnn-frontend is missing, too old, or known to compute wrong results
            here.
    """
    if backend not in ("auto", *RULES):
        legal = ", ".join(repr(name) for name in RULES)
        raise ValueError(f"unknown backend {backend!r} of KDA; use 'auto' or one of {legal}.")
    if aligned:
        why = why_not_aligned(backend)
        if why is not None:
            raise ValueError(why)
        return Choice(PlainKDA(aligned=True), ON_GRID)
    if backend == "reference":
        return Choice(PlainKDA(), "requested")
    if deterministic:
        if backend != "auto":
            why = FLA_IS_TIMED if backend == "fla" else _CUT_BY_ALL
            raise ValueError(
                f"backend={backend!r}: {why}; in deterministic mode use 'auto' or 'reference'."
            )
        return Choice(PlainKDA(), "deterministic mode")
    device = torch.device(device)
    why_not = why_not_cudnn if backend == "cudnn" else _why_not_fla
    obstacle = why_not(device, dtype, key_dim)
    if backend != "auto":
        if obstacle is not None:
            raise obstacle.error(f"backend={backend!r}: {obstacle.why}.")
        from .fla import FlaKDA

        rule = CudnnKDA() if backend == "cudnn" else FlaKDA(lower_bound)
        return Choice(rule, "requested")
    why = _UNTRIED if obstacle is None else obstacle.why
    if device.type == "cuda":
        say_once(f"Kimi Delta Attention takes the plain-torch rule ({why}).", device.type)
    return Choice(PlainKDA(), f"not fla: {why}")


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
        backend, device=device, dtype=dtype, key_dim=state.rows, lower_bound=lower_bound,
        deterministic=deterministic, aligned=aligned,
    )  # fmt: skip

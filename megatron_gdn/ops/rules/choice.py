"""A chosen rule, and the choice of a mixer whose kernels are fla's or another package's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

import torch

from ..obstacles import Obstacle, say_once, told_of_plain
from .base import Rule

ON_GRID = "batch_invariant_mode; in chunks of 64 tokens from a sequence's start"


class Choice(NamedTuple):
    rule: Rule
    reason: str


class Kernels(NamedTuple):
    """A backend that computes the rule in a package's kernels.

    Attributes:
        why_not: why it cannot run here.
        rule: builds the rule.
        unsteady: why a result may have other bits in another run or beside other sequences.
    """

    why_not: Callable[[], Obstacle | None]
    rule: Callable[[], Rule]
    unsteady: str


class Plain(Protocol):
    def __call__(self, *, aligned: bool = False) -> Rule: ...


def kernels_or_plain(
    backend: str,
    mixer: str,
    plain: Plain,
    kernels: Mapping[str, Kernels],
    *,
    device: torch.device | str,
    deterministic: bool,
    aligned: bool,
) -> Choice:
    """The rule of a mixer that runs on fla's kernels or in plain torch.

    Args:
        backend: a name of ``kernels``, ``"reference"`` (plain torch), or ``"auto"``, fla where it
            runs, else the reference. A name is never replaced by another.
        mixer: its name in messages.
        plain: builds the reference.
        deterministic: results repeat bit for bit and a sequence's do not depend on the others of
            its batch: the reference.
        aligned: training and generation give a token the same bits, see
            :mod:`megatron_gdn.ops.aligned`: the reference on its grid.

    Raises:
        ValueError: an unknown name, or one that ``deterministic``, ``aligned`` or the kernels' own
            limits rule out.
        ImportError: its package is missing, too old, or known to compute wrong results here.
    """
    if backend not in ("auto", "reference", *kernels):
        legal = ", ".join(repr(name) for name in (*kernels, "reference"))
        raise ValueError(f"unknown backend {backend!r} of {mixer}; use 'auto' or one of {legal}.")
    if aligned:
        why = why_not_aligned(backend)
        if why is not None:
            raise ValueError(why)
        return Choice(plain(aligned=True), ON_GRID)
    if backend == "reference":
        return Choice(plain(), "requested")
    if deterministic:
        if backend != "auto":
            raise ValueError(
                f"backend={backend!r}: {kernels[backend].unsteady}; in deterministic mode use "
                f"'auto' or 'reference'."
            )
        return Choice(plain(), "deterministic mode")
    taken = kernels["fla" if backend == "auto" else backend]
    obstacle = taken.why_not()
    if obstacle is None:
        return Choice(taken.rule(), "fla runs here" if backend == "auto" else "requested")
    if backend != "auto":
        raise obstacle.error(f"backend={backend!r}: {obstacle.why}.")
    kind = torch.device(device).type
    if kind == "cuda":
        say_once(f"{mixer} takes the plain-torch rule ({obstacle.why}).", kind)
    return Choice(plain(), f"not fla: {obstacle.why}{told_of_plain(kind, obstacle)}")


def why_not_aligned(backend: str) -> str | None:
    """Why with this backend the tokens of one call change each other's bits; None if not."""
    if backend in ("auto", "reference"):
        return None
    return (
        f"backend={backend!r} and config.batch_invariant_mode: the mode takes kernels whose bits "
        f"were tested. Use 'auto' or 'reference' (plain torch, slower), or leave the mode off."
    )

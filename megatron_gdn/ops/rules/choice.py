"""The choice of a mixer's rule: :func:`choose` takes one from the mixer's table of kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..obstacles import Obstacle, advice_about_plain_rule, log_obstacle_once
from .base import Bits, Rule

_MODES = {
    Bits.FREE: (),
    Bits.DETERMINISTIC: ("deterministic mode",),
    Bits.ON_GRID: ("batch_invariant_mode; in chunks of 64 tokens from a sequence's start",),
}


class Choice(NamedTuple):
    """The chosen rule, and the reason for the choice, in words for the log."""

    rule: Rule
    reason: str


class RepeatabilityTest(NamedTuple):
    """Whether kernels gave the same bits again in a test, and words about the test for the log."""

    repeats: bool
    words: str


class Kernels(NamedTuple):
    """A backend that computes the rule in a package's kernels."""

    why_not: Callable[[], Obstacle | None]  # why the kernels cannot run here, or None
    rule: Callable[..., Rule]  # builds the rule; its argument is :class:`Bits` if ``tested`` is set
    fits: str = ""  # the log's reason if "auto" takes these kernels and skipped none
    unsteady: str | None = None  # why bits may depend on the run or on other sequences
    tested: Callable[[], RepeatabilityTest] | None = None  # tests repeatability; None: no test
    by_name: bool = False  # whether only their name selects these kernels, and never "auto"


def choose(
    backend: str,
    mixer: str,
    kernels: Mapping[str, Kernels],
    plain: Callable[..., Rule],
    *,
    device: torch.device,
    bits: Bits,
) -> Choice:
    """Choose the rule of a mixer: kernels in order of preference, or else plain torch.

    Args:
        backend: a name of ``kernels``, ``"reference"``, or ``"auto"``, which takes the first of
            ``kernels`` that runs here, or else the reference. The log says once why "auto" skipped
            kernels. A backend that is asked for by name is never replaced by another backend.
        plain: builds the reference, a rule in plain torch, for the argument ``bits``.
        bits: what the rule must promise. For more than ``FREE``, ``"auto"`` takes kernels whose
            repeatability was tested, or the reference. A name may select other kernels for
            ``DETERMINISTIC``; the log then says that they are untested.

    Raises:
        ValueError: an unknown name, or a backend that cannot run here or keep the promise.
        ImportError: the backend's package is missing, too old, or computes wrong results here.
    """
    if backend not in ("auto", "reference", *kernels):
        legal = ", ".join(repr(name) for name in (*kernels, "reference"))
        raise ValueError(f"unknown backend {backend!r} of {mixer}; use 'auto' or one of {legal}.")
    if backend == "reference":
        return Choice(plain(bits), "requested")
    if backend != "auto":
        return _choose_by_name(backend, mixer, kernels[backend], device, bits)
    passed: dict[str, Obstacle] = {}
    taken, words = "reference", []
    for name, each in kernels.items():
        if each.by_name or (bits and each.tested is None):
            continue
        tested = each.tested() if bits and each.tested else RepeatabilityTest(True, each.fits)
        obstacle = each.why_not() or (None if tested.repeats else Obstacle(tested.words))
        if obstacle is None:
            taken, words = name, [tested.words]
            break
        passed[name] = obstacle
    whys = [f"not {name}: {obstacle.why}" for name, obstacle in passed.items()]
    if whys:
        named = f"Deterministic {mixer}" if bits else mixer
        log_obstacle_once(
            f"{named} takes a slower rule, {taken!r} ({'; '.join(whys)}).", device.type
        )
    reason = "; ".join([*_MODES[bits], *(whys or words)])
    if taken == "reference":
        return Choice(plain(bits), reason + advice_about_plain_rule(device, *passed.values()))
    return Choice(_build_rule(kernels[taken], bits), reason)


def _choose_by_name(
    backend: str, mixer: str, asked: Kernels, device: torch.device, bits: Bits
) -> Choice:
    """The rule of the kernels that the caller asked for by name; an error if they cannot run."""
    if bits is Bits.ON_GRID:
        raise ValueError(
            f"backend={backend!r} and config.batch_invariant_mode: the mode takes kernels whose "
            f"bits were tested. Use 'auto' or 'reference' (plain torch, slower), or leave the mode "
            f"off."
        )
    if bits and asked.tested is None:
        raise ValueError(
            f"backend={backend!r}: {asked.unsteady}; in deterministic mode use 'auto' or "
            f"'reference'."
        )
    obstacle = asked.why_not()
    if obstacle is not None:
        raise obstacle.error(f"backend={backend!r}: {obstacle.why}.")
    reason = "requested"
    if bits and asked.tested is not None:
        repeats, words = asked.tested()
        if not repeats:
            reason = f"requested; {words}"
            log_obstacle_once(f"Deterministic {mixer}: {words}.", device.type)
    return Choice(_build_rule(asked, bits), reason)


def _build_rule(kernels: Kernels, bits: Bits) -> Rule:
    """The rule of ``kernels``; only kernels with a repeatability test take ``bits``."""
    return kernels.rule(bits) if kernels.tested else kernels.rule()

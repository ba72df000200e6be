"""The choice of a mixer's rule: a table for each mixer, one function for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from ..obstacles import Obstacle, say_once, words_about_plain_rule
from .base import Bits, Rule

_MODES = {
    Bits.FREE: (),
    Bits.DETERMINISTIC: ("deterministic mode",),
    Bits.ON_GRID: ("batch_invariant_mode; in chunks of 64 tokens from a sequence's start",),
}


class Choice(NamedTuple):
    rule: Rule
    reason: str


class Tested(NamedTuple):
    """Whether kernels were seen to repeat bit for bit on such inputs, and the words for the log."""

    repeats: bool
    words: str


class Kernels(NamedTuple):
    """A backend that computes the rule in a package's kernels."""

    why_not: Callable[[], Obstacle | None]  # why the kernels cannot run here
    rule: Callable[..., Rule]  # takes :class:`Bits` if it has ``tested``
    fits: str = ""  # the reason if "auto" takes the first of a table
    # Why a result may have other bits in another run or beside other sequences, or where not.
    unsteady: str | None = None
    tested: Callable[[], Tested] | None = None
    by_name: bool = False  # "auto" does not take these kernels


def choose(
    backend: str,
    mixer: str,
    kernels: Mapping[str, Kernels],
    plain: Callable[..., Rule],
    *,
    device: torch.device,
    bits: Bits,
) -> Choice:
    """The rule of a mixer: kernels in order of preference, or else plain torch.

    Args:
        backend: a name of ``kernels``, ``"reference"``, or ``"auto"``: the first that runs here; if
            that is not the first one, the log says why, once. A name is never replaced.
        plain: builds the reference for any ``bits``.
        bits: the promise. Above ``FREE`` kernels that were tested for it, or the reference.
            For ``DETERMINISTIC`` kernels may be asked for by name where they were not tested; the
            log then says so.

    Raises:
        ValueError: an unknown name, or one that ``bits`` or the kernels' own limits rule out.
        ImportError: its package is missing, too old, or known to compute wrong results here.
    """
    if backend not in ("auto", "reference", *kernels):
        legal = ", ".join(repr(name) for name in (*kernels, "reference"))
        raise ValueError(f"unknown backend {backend!r} of {mixer}; use 'auto' or one of {legal}.")
    if backend == "reference":
        return Choice(plain(bits), "requested")
    if backend != "auto":
        return _by_name(backend, mixer, kernels, device, bits)
    passed: dict[str, Obstacle] = {}
    said = list(_MODES[bits])
    for name, each in kernels.items():
        if each.by_name or (bits and each.tested is None):
            continue
        tested = each.tested() if bits and each.tested else Tested(True, each.fits)
        obstacle = each.why_not() or (None if tested.repeats else Obstacle(tested.words))
        if obstacle is None:
            said += _say_passed(mixer, name, passed, device, bits) or [tested.words]
            return Choice(_made(each, bits), "; ".join(said))
        passed[name] = obstacle
    said += _say_passed(mixer, "reference", passed, device, bits)
    return Choice(plain(bits), "; ".join(said) + words_about_plain_rule(device, *passed.values()))


def _say_passed(
    mixer: str, taken: str, passed: dict[str, Obstacle], device: torch.device, bits: Bits
) -> list[str]:
    """Why kernels before the taken ones do not run; also logged."""
    whys = [f"not {name}: {obstacle.why}" for name, obstacle in passed.items()]
    if whys:
        mixer = f"Deterministic {mixer}" if bits else mixer
        say_once(f"{mixer} takes a slower rule, {taken!r} ({'; '.join(whys)}).", device.type)
    return whys


def _by_name(
    backend: str,
    mixer: str,
    kernels: Mapping[str, Kernels],
    device: torch.device,
    bits: Bits,
) -> Choice:
    if bits is Bits.ON_GRID:
        raise ValueError(
            f"backend={backend!r} and config.batch_invariant_mode: the mode takes kernels whose "
            f"bits were tested. Use 'auto' or 'reference' (plain torch, slower), or leave the mode "
            f"off."
        )
    asked = kernels[backend]
    if bits and asked.tested is None:
        *others, last = "auto", *(name for name in kernels if kernels[name].tested), "reference"
        legal = f"{', '.join(map(repr, others))} or {last!r}"
        raise ValueError(
            f"backend={backend!r}: {asked.unsteady}; in deterministic mode use {legal}."
        )
    obstacle = asked.why_not()
    if obstacle is not None:
        raise obstacle.error(f"backend={backend!r}: {obstacle.why}.")
    reason = "requested"
    if bits and asked.tested is not None:
        repeats, words = asked.tested()
        if not repeats:
            reason = f"requested; {words}"
            say_once(f"Deterministic {mixer}: {words}.", device.type)
    return Choice(_made(asked, bits), reason)


def _made(kernels: Kernels, bits: Bits) -> Rule:
    return kernels.rule(bits) if kernels.tested else kernels.rule()

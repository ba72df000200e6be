"""The choice of a mixer's rule: :func:`choose` takes one from the mixer's list of rule
classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..obstacles import Obstacle, advice_about_plain_rule, log_obstacle_once
from .base import Bits, Rule

# text for the log: the mode in which a rule must keep this promise
_MODE_TEXTS = {
    Bits.FREE: (),
    Bits.DETERMINISTIC: ("deterministic mode",),
    Bits.ON_GRID: (
        "batch_invariant_mode; in chunks of 64 tokens from a sequence's start",
    ),
}


class Choice(NamedTuple):
    """The chosen rule, and the reason for the choice as a text for the log."""

    rule: Rule
    reason: str


def choose(
    backend: str,
    mixer: str,
    rules: Sequence[type[Rule]],
    *,
    device: torch.device,
    dtype: torch.dtype,
    sizes: object,
    bits: Bits,
) -> Choice:
    """Choose the rule of a mixer.

    Args:
        backend: the name of one of ``rules``, or ``"auto"``, which takes the first of
            ``rules`` that runs here. The log says once why "auto" skipped rules. A rule
            that is asked for by name is never replaced by another rule.
        mixer: the mixer's name in the log and in errors.
        rules: classes in the order of preference. The last is plain torch,
            ``"reference"``, which runs everywhere and keeps every promise.
        sizes: the mixer's sizes, for :meth:`.base.Rule.why_not` and
            :meth:`.base.Rule.of`.
        bits: what the rule must promise. ``DETERMINISTIC``: a sequence's bits depend
            neither on the run nor on other sequences. ``ON_GRID``: a token's bits
            depend only on its sequence's tokens. For both, ``"auto"`` takes the first
            rule whose bits repeated in a test; if there is none, it takes the last
            rule. For ``DETERMINISTIC`` a name may also select an untested rule; the log
            then says so. For ``ON_GRID`` only the name "reference" is accepted.

    Raises:
        ValueError: an unknown name, or a rule that cannot run here, or cannot promise
            ``bits``.
        ImportError: the rule's package is missing, too old, or computes wrong results
            here.
    """
    require_known(backend, mixer, rules)
    if backend != "auto":
        named = next(rule for rule in rules if rule.name == backend)
        reason = _require_named_rule(named, mixer, device, dtype, sizes, bits)
        return Choice(named.of(sizes, bits), reason)
    taken = rules[-1]
    skipped = {}  # the obstacle of each skipped rule, by the rule's name
    words = ""
    for rule in rules:
        if rule.only_by_name or bits > rule.strongest_promise:
            continue
        words = rule.why_chosen
        obstacle = rule.why_not(device, dtype, sizes)
        if bits and obstacle is None:  # ``bits`` is true unless it is FREE
            repeats, words = rule.repeats(device, dtype, sizes)
            if repeats:
                obstacle = None
            else:
                obstacle = Obstacle(words)
        if obstacle is None:
            taken = rule
            break
        skipped[rule.name] = obstacle
    if skipped:
        words = "; ".join(
            f"not {name}: {obstacle.why}" for name, obstacle in skipped.items()
        )
        if bits:
            subject = f"Deterministic {mixer}"
        else:
            subject = mixer
        log_obstacle_once(
            f"{subject} takes a slower rule, {taken.name!r} ({words}).", device.type
        )
    reasons = list(_MODE_TEXTS[bits])
    if words:
        reasons.append(words)
    reason = "; ".join(reasons)
    if taken is rules[-1]:
        reason += advice_about_plain_rule(device, *skipped.values())
    return Choice(taken.of(sizes, bits), reason)


def require_known(backend: str, mixer: str, rules: Sequence[type[Rule]]) -> None:
    """Raise a ValueError unless ``backend`` is "auto" or the name of one of
    ``rules``."""
    names = [rule.name for rule in rules]
    if backend != "auto" and backend not in names:
        legal = ", ".join(map(repr, names))
        raise ValueError(
            f"unknown backend {backend!r} of {mixer}; use 'auto' or one of {legal}."
        )


def _require_named_rule(
    rule: type[Rule],
    mixer: str,
    device: torch.device,
    dtype: torch.dtype,
    sizes: object,
    bits: Bits,
) -> str:
    """Check a ``rule`` that the user asked for by name; return the reason for the log.
    The other arguments are those of :func:`choose`.

    Raises:
        ValueError: the rule cannot run here, or cannot promise ``bits``.
        ImportError: the rule's package is missing, too old, or computes wrong results.
    """
    if rule.name == "reference":  # it runs everywhere and keeps every promise
        return "requested"
    asked = f"backend={rule.name!r}"
    if bits is Bits.ON_GRID:
        raise ValueError(
            f"{asked} and config.batch_invariant_mode: the mode takes kernels whose "
            "bits were tested. Use 'auto' or 'reference' (plain torch, slower), or "
            "leave the mode off."
        )
    if bits > rule.strongest_promise:
        raise ValueError(
            f"{asked}: {rule.why_bits_vary}; in deterministic mode use 'auto' or "
            "'reference'."
        )
    obstacle = rule.why_not(device, dtype, sizes)
    if obstacle is not None:
        raise obstacle.error(f"{asked}: {obstacle.why}.")
    if not bits:
        return "requested"
    repeats, words = rule.repeats(device, dtype, sizes)
    if repeats:
        return "requested"
    log_obstacle_once(f"Deterministic {mixer}: {words}.", device.type)
    return f"requested; {words}"

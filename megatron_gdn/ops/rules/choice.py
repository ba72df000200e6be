"""A chosen rule, and what ``config.batch_invariant_mode`` leaves to choose from."""

from __future__ import annotations

from typing import NamedTuple

from .base import Rule

IN_STEPS = "batch_invariant_mode; in steps of 64 tokens, slower"


class Choice(NamedTuple):
    rule: Rule
    reason: str


def why_not_aligned(backend: str) -> str | None:
    """Why with this backend the tokens of one call change each other's bits; None if not."""
    if backend in ("auto", "reference"):
        return None
    return (
        f"backend={backend!r} and config.batch_invariant_mode: which tokens come in one "
        f"call changes the bits of its kernels. Use 'auto' or 'reference' (plain torch in "
        f"steps of 64 tokens, slower), or leave the mode off."
    )

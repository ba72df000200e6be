"""A chosen rule, and what ``config.batch_invariant_mode`` leaves to choose from."""

from __future__ import annotations

from typing import NamedTuple

from .base import Rule

ON_GRID = "batch_invariant_mode; in chunks of 64 tokens from a sequence's start"


class Choice(NamedTuple):
    rule: Rule
    reason: str


def why_not_aligned(backend: str) -> str | None:
    """Why with this backend the tokens of one call change each other's bits; None if not."""
    if backend in ("auto", "reference"):
        return None
    return (
        f"backend={backend!r} and config.batch_invariant_mode: the mode chooses kernels by itself, "
        f"FlashQLA where its bits were tested. Use 'auto' or 'reference' (plain torch, slower), or "
        f"leave the mode off."
    )

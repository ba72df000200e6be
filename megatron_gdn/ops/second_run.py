"""The front and the rule of one forward, run again in its backward.

Nothing of the rule is then kept between the two but the projection rows, which the backward reads
anyway. The second run starts when the mixer's output is filled again (:mod:`.recompute`), or else
with the mixer's backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from .front.base import Front
from .neighbours import Neighbours
from .rules.again import run_again
from .rules.base import Rule, Saved


class Again(NamedTuple):
    """What the second run made."""

    inputs: Any  # of the rule
    o: Tensor
    saved: Saved


class SecondRun:
    """One object per forward."""

    def __init__(self, front: Front, rule: Rule, neighbours: Neighbours) -> None:
        self._front, self._rule, self._neighbours = front, rule, neighbours
        self._made: Again | None = None

    def made(
        self,
        rows: Tensor,
        of_front: Sequence[Tensor | None],
        linked: tuple[Tensor, ...],
        kept: Saved,
    ) -> Again:
        """The first call computes; :meth:`take` finds the same.

        Args:
            rows, of_front: of the first run.
            linked: what the state link kept.
            kept: from :func:`.rules.again.kept_to_run_again`.
        """
        if self._made is None:
            near = self._neighbours
            inputs = self._front.forward(rows, of_front, near.documents)
            initial = None if near.states is None else near.states.entered(linked)
            o, _, saved = run_again(self._rule, inputs, kept, near.of_rule, initial)
            self._made = Again(inputs, o, saved)
        return self._made

    def take(
        self,
        rows: Tensor,
        of_front: Sequence[Tensor | None],
        linked: tuple[Tensor, ...],
        kept: Saved,
    ) -> Again:
        """:meth:`made`, forgotten here; without the inputs that the backward does not read."""
        inputs, o, saved = self.made(rows, of_front, linked, kept)
        self._made = None
        wanted = self._rule.reads_again
        named = zip(self._front.names, inputs, strict=True)
        return Again(type(inputs)(*(x if n in wanted else None for n, x in named)), o, saved)

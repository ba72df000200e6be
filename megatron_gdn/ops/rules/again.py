"""A rule's forward, run a second time in the backward in place of what the first one kept.

A rule whose backward needs less than a whole forward for that says so by :class:`RunsAgain`. Any
other rule begins again from its inputs.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from ..documents import Documents
from .base import Rule, RuleOutput, Saved


@runtime_checkable
class RunsAgain(Protocol):
    """A rule that keeps something small for a second run, or whose backward takes its products."""

    def kept_to_run_again(self, saved: Saved) -> Saved:
        """What of a forward's ``saved`` the second run reads: little per token."""
        ...

    def run_again(
        self, inputs: Any, kept: Saved, documents: Documents | None, initial: Tensor | None
    ) -> RuleOutput:
        """``o``, and ``saved`` for ``begin_backward``; arguments as of :func:`run_again`."""
        ...


def kept_to_run_again(rule: Rule, saved: Saved) -> Saved:
    """What a forward keeps if it is run again; empty for a rule that begins again."""
    return rule.kept_to_run_again(saved) if isinstance(rule, RunsAgain) else Saved()


def run_again(
    rule: Rule, inputs: Any, kept: Saved, documents: Documents | None, initial: Tensor | None
) -> RuleOutput:
    """``o`` of a forward whose output was dropped, and what its backward needs.

    Args:
        inputs: all of them, with the bits of the first run.
        kept: from :func:`kept_to_run_again`.
        initial: the states that entered the sequences, as in the first run.
    """
    if isinstance(rule, RunsAgain):
        return rule.run_again(inputs, kept, documents, initial)
    return rule.begin(inputs, documents).run(initial)

"""Calls of a rule as the mixer makes them."""

from __future__ import annotations

from typing import Any

import torch


def begin_backward(
    rule: Any, inputs: Any, d_o: torch.Tensor, saved: Any, documents: Any
) -> Any:
    """The rule's backward, given only those inputs that it reads again."""
    kept = (
        x if n in rule.backward_reads else None for n, x in inputs._asdict().items()
    )
    return rule.begin_backward(d_o, type(inputs)(*kept), saved, documents)

"""Calls of a delta rule as the mixer makes them."""

from __future__ import annotations

import torch

from megatron_gdn.gdn.rule import RuleInputs


def begin_backward(rule, inputs: RuleInputs, d_o: torch.Tensor, saved, documents):
    """The rule's backward, given only those inputs that it reads again."""
    kept = (
        x if n in rule.backward_reads else None for n, x in inputs._asdict().items()
    )
    return rule.begin_backward(d_o, RuleInputs(*kept), saved, documents)

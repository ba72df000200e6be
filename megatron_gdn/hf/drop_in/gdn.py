"""Gated DeltaNet in a drop-in: its sizes, its rule and its parts, from transformers' module."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ...gdn.front import gdn_parts
from ...gdn.rule import choose_rule
from ...gdn.sizes import GDNDims
from ...mixers.micro_batch import ChooseRule, MicroBatch
from ...ops.delta_rule.base import HeadSizes
from ...ops.parts import GatedNorm, Parts
from ...ops.readout.base import Apart

NAMES: dict[str, str] = {}  # of mixer and recurrence in messages: those of MicroBatches


def dims_of(config: Any) -> GDNDims:
    return GDNDims.from_config(config)


def rule_of(module: Any, dims: GDNDims, options: Any) -> ChooseRule:
    return partial(
        choose_rule, options.backend, dims.heads, operands=options.rule_operands, normalise_qk=True
    )


def parts_of(
    module: Any,
    rows: Tensor,
    parameters: tuple[Any, ...],
    batch: MicroBatch,
    norm: GatedNorm | Apart,
    options: Any,
) -> Parts:
    """The parts for opened rows; ``parameters``: conv weight and bias, A_log, dt_bias."""
    return gdn_parts(
        rows,
        *parameters,
        sizes=HeadSizes.of(batch.scheme.layout),
        rule=batch.rule,
        norm=norm,
        allow_neg_eigval=getattr(module, "allow_neg_eigval", False),
        recompute_qkv=options.recompute_qkv,
    )

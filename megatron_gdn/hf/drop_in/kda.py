"""Kimi Delta Attention in a drop-in: its sizes, its rule and its parts, from transformers' module.

Legend: H heads.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from ...kda.front import kda_parts
from ...kda.rule import choose_kda
from ...kda.sizes import KDADims
from ...mixers.micro_batch import ChooseRule, MicroBatch
from ...ops.parts import GatedNorm, Parts
from ...ops.readout.base import Apart

NAMES = {"mixer": "KimiDeltaAttention", "recurrence": "KDA"}


def dims_of(config: Any) -> KDADims:
    """Of rows with both gates in full width, as the module's projections give them."""
    return KDADims(
        hidden_size=config.hidden_size,
        num_key_heads=config.linear_num_heads,
        num_heads=config.linear_num_heads,
        key_head_dim=config.linear_head_dim,
        value_head_dim=config.linear_head_dim,
        conv_kernel_dim=config.linear_conv_kernel_dim,
        forget_rank=0,
        output_rank=0,
    )


def rule_of(module: Any, dims: KDADims, options: Any) -> ChooseRule:
    if options.rule_operands != "fp16" or options.recompute_qkv:
        raise ValueError(
            f"rule_operands={options.rule_operands!r}, recompute_qkv={options.recompute_qkv}: "
            f"Kimi Delta Attention has neither option. Leave both out."
        )
    return partial(choose_kda, options.backend, dims.state, lower_bound_of(module))


def lower_bound_of(module: Any) -> float | None:
    """The bound of the module's log-decay; None: unbounded."""
    gate = module.forget_gate
    if getattr(gate, "safe_gate", False):  # Bailing Hybrid
        return gate.lower_bound
    return getattr(gate, "safe_gate_lower_bound", None)  # GLM 5 next; Kimi Linear has none


def parts_of(
    module: Any,
    rows: Tensor,
    parameters: tuple[Any, ...],
    batch: MicroBatch,
    norm: GatedNorm | Apart,
    options: Any,
) -> Parts:
    """The parts for opened rows; ``parameters``: conv weight and bias, A_log, dt_bias."""
    return kda_parts(
        rows,
        *parameters,
        layout=batch.scheme.layout,
        rule=batch.rule,
        norm=norm,
        lower_bound=lower_bound_of(module),
    )

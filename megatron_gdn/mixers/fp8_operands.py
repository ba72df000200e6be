"""What a mixer's kernels write in FP8 for its linears, see :mod:`megatron_gdn.ops.fp8_rows`.

Only delayed scaling knows a scale before the numbers. Transformer Engine (2.20) takes its own
tensor class in place of rows in another dtype, and rounds these no more.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from megatron.core.tensor_parallel.random import is_checkpointing
from torch import Tensor

from ..ops.fp8_rows import Fp8Operands, Fp8Rows, Scaling
from .fp8 import runs_in_fp8

# By the names that Transformer Engine gives its own numbers for them.
_FP8_DTYPES = {"kFloat8E4M3": torch.float8_e4m3fn, "kFloat8E5M2": torch.float8_e5m2}


def operands_in_fp8(mixer: Any, dtype: torch.dtype, *, apart: bool, refilled: bool) -> Fp8Operands:
    """For the linears named in ``mixer.fp8_operands``; to be asked after in_proj's forward.

    Args:
        mixer: a :class:`.base.RecurrentMixer`.
        dtype: of the rows, which the linears are told.
        apart: whether the rows came without gates, which are never rounded.
        refilled: whether the backward writes the rows for out_proj once more.

    Returns:
        None for what a linear must round by itself.
    """
    gradient = mixed = None
    # The gradient of a bias is a sum of unrounded rows.
    biased = mixer.in_proj._parameters.get("bias") is not None
    if "in_proj" in mixer.fp8_operands and apart and not biased:
        gradient = _rows_of(mixer.in_proj, "scaling_bwd", dtype)
    if "out_proj" in mixer.fp8_operands and not refilled and _knows_its_scale(mixer):
        mixed = _rows_of(mixer.out_proj, "scaling_fwd", dtype)
    return Fp8Operands(gradient, mixed)


def _knows_its_scale(mixer: Any) -> bool:
    """Whether out_proj will round its input by the scale that it has now."""
    linear = mixer.out_proj
    if mixer.config.fp8_recipe != "delayed" or not runs_in_fp8(linear):
        return False
    # A recipe for this linear alone is put in force inside of its forward. There Transformer Engine
    # also brings back the first forward's scale in a checkpoint's second one.
    return getattr(linear, "te_quant_params", None) is None and not _in_checkpoint()


def _in_checkpoint() -> bool:
    """Megatron's, or Transformer Engine's, which Megatron takes under FP8; in both forwards."""
    engine: Any = sys.modules.get("transformer_engine.pytorch.distributed")
    within = getattr(engine, "is_fp8_activation_recompute_enabled", bool)
    return is_checkpointing() or within()


def _rows_of(linear: Any, state: str, dtype: torch.dtype) -> Fp8Rows | None:
    """How ``linear`` rounds its input (``"scaling_fwd"``) or its output's gradient (``_bwd``)."""
    quantizers = getattr(linear, "quantizers", {}).get(state)
    quantizer: Any = quantizers[0] if quantizers else None
    if type(quantizer).__name__ != "Float8Quantizer":
        return None

    def scaling() -> Scaling:
        return Scaling(quantizer.scale, quantizer.amax)

    def wrapped(rows: Tensor) -> Tensor:
        return quantizer.create_tensor_from_data(rows.view(torch.uint8), fake_dtype=dtype)

    return Fp8Rows(_FP8_DTYPES[quantizer.dtype.name], scaling, wrapped)

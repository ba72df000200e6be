"""The product that gives the rule's gates where FP8 computes the rest of in_proj.

Legend: S tokens of the sequence, s this rank's share of them, B batch, D hidden size, n ranks of
the tensor-parallel group, p this rank's gate columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.first_derivative import first_derivative_only


class GateProduct(torch.autograd.Function):
    """``x @ weight^T`` in the weight's dtype, tensor-parallel by columns.

    Only gates and their weights travel, never rows of ``x``: 64 columns against 2048. The weight's
    gradient is summed in fp32, and added to ``weight.main_grad`` if the weight has one.

    Args:
        x: ``[S, B, D]``, the same on every rank; ``[s, B, D]``, this rank's tokens, with
            ``sequence_parallel``.
        weight: ``[p, D]``, this rank's rows.
        group: the tensor-parallel group.

    Returns:
        ``[S, B, p]``.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, group: Any, sequence_parallel: bool) -> Tensor:
        whole = _gathered(weight, group)
        ctx.save_for_backward(x, whole)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.main_grad = getattr(weight, "main_grad", None)
        if not sequence_parallel:
            return x @ weight.t()
        return _to_columns(x @ whole.t(), group)

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_gates: Tensor) -> tuple[Tensor | None, ...]:
        x, whole = ctx.saved_tensors
        group, split = ctx.group, ctx.sequence_parallel
        d_whole = _to_tokens(d_gates, group) if split else _gathered_columns(d_gates, group)
        d_x = d_weight = None
        if ctx.needs_input_grad[0]:
            d_x = d_whole @ whole
        if ctx.needs_input_grad[1]:
            d_weight = _product_fp32((d_whole if split else d_gates).flatten(0, 1), x.flatten(0, 1))
            d_weight = _summed_rows(d_weight, group) if split else d_weight
            if ctx.main_grad is None:
                d_weight = d_weight.to(whole.dtype)
            else:
                ctx.main_grad.add_(d_weight)
                d_weight = None
        return d_x, d_weight, None, None


def _product_fp32(d_rows: Tensor, x: Tensor) -> Tensor:
    """``d_rows^T @ x``, not rounded to 16 bits."""
    if d_rows.is_cuda and d_rows.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(d_rows.t(), x, out_dtype=torch.float32)
    wide = torch.promote_types(x.dtype, torch.float32)
    return d_rows.to(wide).t() @ x.to(wide)


def _gathered(rows: Tensor, group: Any) -> Tensor:
    """All ranks' rows ``[n p, D]``."""
    n = group.size()
    if n == 1:
        return rows
    out = rows.new_empty(n * rows.shape[0], *rows.shape[1:])
    dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


def _summed_rows(rows: Tensor, group: Any) -> Tensor:
    """``[n p, D]`` summed over the ranks; this rank's ``[p, D]`` of it."""
    n = group.size()
    if n == 1:
        return rows
    out = rows.new_empty(rows.shape[0] // n, *rows.shape[1:])
    dist.reduce_scatter_tensor(out, rows, group=group)
    return out


def _gathered_columns(columns: Tensor, group: Any) -> Tensor:
    """``[S, B, p]`` to ``[S, B, n p]``."""
    n = group.size()
    if n == 1:
        return columns
    return _gathered(columns[None], group).movedim(0, 2).flatten(2)


def _to_columns(whole: Tensor, group: Any) -> Tensor:
    """``[s, B, n p]``, all columns of this rank's tokens, to ``[S, B, p]``."""
    n = group.size()
    if n == 1:
        return whole
    sent = whole.unflatten(2, (n, -1)).movedim(2, 0).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.flatten(0, 1)


def _to_tokens(columns: Tensor, group: Any) -> Tensor:
    """``[S, B, p]`` to ``[s, B, n p]``."""
    n = group.size()
    if n == 1:
        return columns
    sent = columns.unflatten(0, (n, -1)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received.movedim(0, 2).flatten(2)

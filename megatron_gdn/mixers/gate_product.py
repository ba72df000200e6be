"""The product that gives the rule's gates where FP8 computes the rest of in_proj.

Legend: S tokens of the sequence, s this rank's share of them, B batch, T tokens of both, D hidden
size, n ranks of the tensor-parallel group, p this rank's gate columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops import gate_product
from ..ops.first_derivative import first_derivative_only
from ..ops.kernels.obstacles import why_not_triton


class GateProduct(torch.autograd.Function):
    """``RMSNorm(x) @ weight^T`` in the weight's dtype, tensor-parallel by columns.

        r = 1 / sqrt(mean(x^2) + eps)
        y = r (x @ (gamma weight)^T)

    The norm is a factor of each token, so normed rows are neither written nor kept. Only gates and
    their weights travel, never rows of ``x``: 64 columns against 2048. The weight's gradient is
    summed in fp32, and added to ``weight.main_grad`` if the weight has one.

    Args:
        x: ``[S, B, D]``, the same on every rank; ``[s, B, D]``, this rank's tokens, with
            ``sequence_parallel``.
        weight: ``[p, D]``, this rank's rows.
        gamma: ``[D]``; None leaves the norm out.
        eps: of the norm.
        group: the tensor-parallel group.

    Returns:
        ``[S, B, p]``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma: Tensor | None, eps: float, group: Any,
        sequence_parallel: bool,
    ) -> Tensor:  # fmt: skip
        whole = _gathered(weight, group)
        factor = whole if gamma is None else (whole * gamma).to(whole.dtype)
        x_TD = x.flatten(0, 1).contiguous()
        y, r_T = _kernels(x).forward(x_TD, factor, eps, gamma is not None)
        ctx.save_for_backward(x, whole, factor, gamma, r_T, y)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.main_grad = getattr(weight, "main_grad", None)
        y = y.unflatten(0, x.shape[:2])
        if sequence_parallel:
            return _to_columns(y, group)
        return y.chunk(group.size(), -1)[group.rank()].contiguous()

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_gates: Tensor) -> tuple[Tensor | None, ...]:
        x, whole, factor, gamma, r_T, y = ctx.saved_tensors
        group, split = ctx.group, ctx.sequence_parallel
        d_y = _to_tokens(d_gates, group) if split else _gathered_columns(d_gates, group)
        x_TD, d_y = x.flatten(0, 1).contiguous(), d_y.flatten(0, 1).contiguous()
        d_x, outer = _kernels(x).backward(x_TD, factor, d_y, y, r_T)
        d_weight = d_gamma = None
        if ctx.needs_input_grad[2]:
            d_gamma = (whole * outer).sum(0).to(gamma.dtype)
        if ctx.needs_input_grad[1]:
            d_weight = outer if gamma is None else outer * gamma
            if split:
                d_weight = _summed_rows(d_weight, group)
            else:
                d_weight = d_weight.chunk(group.size())[group.rank()]
            if ctx.main_grad is None:
                d_weight = d_weight.to(whole.dtype)
            else:
                ctx.main_grad.add_(d_weight)
                d_weight = None
        return d_x.view(x.shape), d_weight, d_gamma, None, None, None


def _kernels(x: Tensor) -> Any:
    """Triton's on a GPU, in 16 bits; else their twin in plain torch."""
    if not x.is_cuda or x.dtype not in (torch.bfloat16, torch.float16):
        return gate_product
    if why_not_triton("cuda", x.dtype, 4) is not None:
        return gate_product
    from ..ops import gate_product_triton

    return gate_product_triton


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

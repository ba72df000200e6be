"""The product that gives the rule's gates where FP8 computes the rest of in_proj.

Legend: S tokens of the sequence, s this rank's share of them, B batch, T tokens of both, D hidden
size, n ranks of the tensor-parallel group, p this rank's gate columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.autograd import first_derivative_only


class GateProduct(torch.autograd.Function):
    """``RMSNorm(x) @ weight^T`` in the weight's dtype, tensor-parallel by columns.

        r = 1 / sqrt(mean(x^2) + eps)
        y = r (x @ (gamma weight)^T)

    Normed rows are neither written nor kept. Only gates and their weights travel, never rows of
    ``x``: 64 columns against 2048. The weight's gradient is summed in fp32, and added to
    ``weight.main_grad`` if the weight has one.

    ``x`` is handed through to the linear that computes the other columns. So the linear's gradient
    of it arrives here, and the gates' share is added to it in place:

        d_x += (r d_y) @ (gamma weight) - r^2 / D (y . d_y) x

    ``x`` is ``[S, B, D]``, with ``sequence_parallel`` ``[s, B, D]``; ``weight`` ``[p, D]`` are this
    rank's rows, ``gamma`` ``[D]`` is None without a norm, ``group`` is the tensor-parallel group.
    The result is ``[S, B, p]``, and ``x`` for the linear alone: its gradient is overwritten.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, gamma: Tensor | None, eps: float, group: Any,
        sequence_parallel: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        whole = _gathered(weight, group)
        x_TD, factor = x.flatten(0, 1), whole
        r_T1 = None
        if gamma is not None:
            factor = (whole * gamma).to(whole.dtype)
            squares = torch.linalg.vector_norm(x_TD, dim=-1, keepdim=True, dtype=_wide(x)).square()
            r_T1 = (squares / x.shape[-1] + eps).rsqrt()
        y = _wide_product(x_TD, factor.t())
        y = (y if r_T1 is None else y * r_T1).to(weight.dtype).unflatten(0, x.shape[:2])
        ctx.save_for_backward(x, whole, factor, gamma, r_T1, y)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        ctx.main_grad = getattr(weight, "main_grad", None)
        handed = x.view_as(x)
        if not x.requires_grad:
            ctx.mark_non_differentiable(handed)
        if sequence_parallel:
            return _to_columns(y, group), handed
        return y.chunk(group.size(), -1)[group.rank()].contiguous(), handed

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_gates: Tensor | None, d_x: Tensor | None) -> tuple[Tensor | None, ...]:
        if d_gates is None:
            return d_x, None, None, None, None, None
        x, whole, factor, gamma, r_T1, y = ctx.saved_tensors
        group, split = ctx.group, ctx.sequence_parallel
        d_y = _to_tokens(d_gates, group) if split else _gathered_columns(d_gates, group)
        x_TD, d_y = x.flatten(0, 1), d_y.flatten(0, 1)
        d_scaled = d_y if r_T1 is None else (d_y * r_T1).to(d_y.dtype)
        d_weight = d_gamma = None
        if ctx.needs_input_grad[0]:
            if d_x is None:
                d_TD = d_scaled @ factor
            else:
                d_TD = d_x.flatten(0, 1).contiguous()
                d_TD.addmm_(d_scaled.to(d_TD.dtype), factor.to(d_TD.dtype))
            if r_T1 is not None:  # of r
                dot = (y.flatten(0, 1).to(r_T1.dtype) * d_y).sum(-1, keepdim=True)
                along = (dot * r_T1.square() / x.shape[-1]).to(x.dtype)
                d_TD.addcmul_(along, x_TD, value=-1)
            d_x = d_TD.view(x.shape)
        if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
            outer = _wide_product(d_scaled.t(), x_TD)
            if ctx.needs_input_grad[2]:
                d_gamma = (whole * outer).sum(0).to(gamma.dtype)
            if ctx.needs_input_grad[1]:
                d_own = outer if gamma is None else outer * gamma
                if split and group.size() > 1:
                    every, d_own = d_own, d_own.new_empty(len(d_own) // group.size(), x.shape[-1])
                    dist.reduce_scatter_tensor(d_own, every, group=group)
                else:
                    d_own = d_own.chunk(group.size())[group.rank()]
                if ctx.main_grad is None:
                    d_weight = d_own.to(whole.dtype)
                else:
                    ctx.main_grad.add_(d_own)
        return d_x, d_weight, d_gamma, None, None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b``, not rounded to 16 bits."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(_wide(a)) @ b.to(_wide(b))


def _gathered(rows: Tensor, group: Any) -> Tensor:
    """All ranks' rows ``[n p, D]``."""
    if group.size() == 1:
        return rows
    out = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
    dist.all_gather_into_tensor(out, rows.contiguous(), group=group)
    return out


def _gathered_columns(columns: Tensor, group: Any) -> Tensor:
    """``[S, B, p]`` to ``[S, B, n p]``."""
    if group.size() == 1:
        return columns
    return _gathered(columns[None], group).movedim(0, 2).flatten(2)


def _to_columns(whole: Tensor, group: Any) -> Tensor:
    """``[s, B, n p]``, all columns of this rank's tokens, to ``[S, B, p]``."""
    if group.size() == 1:
        return whole
    return _exchanged(whole.unflatten(2, (group.size(), -1)).movedim(2, 0), group).flatten(0, 1)


def _to_tokens(columns: Tensor, group: Any) -> Tensor:
    """``[S, B, p]`` to ``[s, B, n p]``."""
    if group.size() == 1:
        return columns
    return _exchanged(columns.unflatten(0, (group.size(), -1)), group).movedim(0, 2).flatten(2)


def _exchanged(parts: Tensor, group: Any) -> Tensor:
    """Part r goes to rank r; the parts that came, in the order of their ranks."""
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return received

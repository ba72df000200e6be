"""Autograd of in_proj under FP8: views of a weight's rows, and the gates' product.

Legend: S tokens of the tensor-parallel group, s of this rank, B batch, T = S B, D
hidden size, p gate columns of this rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor, nn

from ..ops.autograd import first_derivative_only

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


# One function makes all views, so the weight's hooks run once, after all gradients.
class SplitRows(torch.autograd.Function):
    """Views of the rows of ``weight``, split at the row numbers ``ends``."""

    @staticmethod
    def forward(
        ctx, weight: nn.Parameter, ends: tuple[int, ...], adds_to_main_grad: bool
    ) -> tuple[Tensor, ...]:
        """Return the views.

        ``adds_to_main_grad``: the backward of the products that read the views adds
        gradients to the views' ``main_grad``, and returns no gradients.
        """
        ctx.set_materialize_grads(False)
        ctx.weight = weight
        ctx.adds_to_main_grad = adds_to_main_grad
        views = weight.detach().tensor_split(ends)
        # only the numbers of rows are kept, since the views' memory may be freed
        ctx.row_counts = [len(view) for view in views]
        return views

    @staticmethod
    @first_derivative_only
    def backward(ctx, *d_views: Tensor | None):
        """The weight's gradient from the gradients of the views; None means zero.

        With ``adds_to_main_grad`` the products have added the gradients already. The
        weight's ``grad_added_to_main_grad`` becomes True to tell Megatron so. The
        result is then a gradient that Megatron does not read.
        """
        weight = ctx.weight
        if not ctx.adds_to_main_grad:
            gradients = [
                weight.new_zeros(count, weight.shape[1]) if d_view is None else d_view
                for d_view, count in zip(d_views, ctx.row_counts, strict=True)
            ]
            return torch.cat(gradients), None, None
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None, None, None
        weight.grad_added_to_main_grad = True
        # Megatron requires a gradient, but does not read it
        if getattr(weight, "zero_out_wgrad", False):
            unread = torch.zeros_like(weight)
        else:
            unread = torch.empty_like(weight)
        return unread, None, None


class GateProduct(torch.autograd.Function):
    """``RMSNorm(x) @ weight^T`` in the weight's dtype, tensor-parallel by columns.

        r = 1 / sqrt(mean(x^2) + eps)
        y = r (x @ (gamma weight)^T)

    The normed rows are neither written nor saved. Ranks exchange the gates (64 columns)
    and their weights, not ``x`` (2048 columns). The weight's gradient is summed in
    fp32, and added to ``weight.main_grad`` if the weight has one.

    ``x`` is ``[S, B, D]``, with ``sequence_parallel`` ``[s, B, D]``; ``weight`` is
    ``[p, D]``, ``gamma`` ``[D]`` or None (no norm, r = 1). The results are y
    ``[S, B, p]`` and a view of ``x``. Only the linear of the other columns may read
    this view. So the backward gets that linear's gradient d_x, and adds the gates' term
    to d_x in place:

        d_x += (r d_y) @ (gamma weight) - r^2 / D (y . d_y) x
    """

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        weight: Tensor,
        gamma: Tensor | None,
        eps: float,
        group: ProcessGroup,
        sequence_parallel: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return y and the view of x.

        ``group`` is the tensor-parallel group. With ``sequence_parallel`` each rank has
        other tokens in ``x``; Transformer Engine's linears switch it off on one rank.
        """
        ctx.set_materialize_grads(False)
        # the gate rows of all ranks' weights
        all_weights = gather_from_sequence_parallel_region(weight, group=group)
        x_TD = x.flatten(0, 1)
        factor = all_weights  # gamma * weight
        r_T1 = None
        if gamma is not None:
            factor = (all_weights * gamma).to(all_weights.dtype)
            squares = torch.linalg.vector_norm(
                x_TD, dim=-1, keepdim=True, dtype=_wide_dtype(x)
            ).square()
            r_T1 = (squares / x.shape[-1] + eps).rsqrt()
        # the gates of all ranks' weights, for the tokens of x
        y = _wide_product(x_TD, factor.t())
        y = (y if r_T1 is None else y * r_T1).to(weight.dtype).unflatten(0, x.shape[:2])
        ctx.save_for_backward(x, all_weights, factor, gamma, r_T1, y)
        ctx.group = group
        ctx.sequence_parallel = sequence_parallel
        ctx.main_grad = getattr(weight, "main_grad", None)
        view_of_x = x.view_as(x)
        if not x.requires_grad:
            # Otherwise autograd would compute a gradient of the view whenever the
            # weight needs one.
            ctx.mark_non_differentiable(view_of_x)
        if sequence_parallel:
            # all gates of this rank's tokens become this rank's gates of all tokens
            own_gates = all_to_all_sp2hp(y, group).unflatten(0, (-1, x.shape[1]))
        else:
            own_gates = y.chunk(group.size(), -1)[group.rank()].contiguous()
        return own_gates, view_of_x

    @staticmethod
    @first_derivative_only
    def backward(
        ctx, d_gates: Tensor | None, d_x: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """The gradients of x, weight and gamma; autograd rounds them to the dtypes of
        these tensors.

        ``d_gates`` is the gradient of y, ``d_x`` that of the view of ``x``; None means
        zero.
        """
        if d_gates is None:
            return d_x, None, None, None, None, None
        x, all_weights, factor, gamma, r_T1, y = ctx.saved_tensors
        needs_d_x, needs_d_weight, needs_d_gamma = ctx.needs_input_grad[:3]
        group = ctx.group
        x_TD = x.flatten(0, 1)
        # the gradient of all ranks' gates, for the tokens of x
        if ctx.sequence_parallel:
            d_y = all_to_all_hp2sp(d_gates.flatten(0, 1), group)
        else:
            d_y = all_gather_last_dim_from_tensor_parallel_region(
                d_gates.flatten(0, 1), group
            )
        if r_T1 is None:
            d_scaled = d_y
        else:
            d_scaled = (d_y * r_T1).to(d_y.dtype)
        d_weight = d_gamma = None
        if needs_d_x:
            if d_x is None:
                d_TD = d_scaled @ factor
            else:
                d_TD = d_x.flatten(0, 1).contiguous()
                d_TD.addmm_(d_scaled.to(d_TD.dtype), factor.to(d_TD.dtype))
            if r_T1 is not None:  # the gradient through r
                dot = (y.flatten(0, 1).to(r_T1.dtype) * d_y).sum(-1, keepdim=True)
                along = (dot * r_T1.square() / x.shape[-1]).to(x.dtype)
                d_TD.addcmul_(along, x_TD, value=-1)
            d_x = d_TD.view(x.shape)
        if needs_d_weight or needs_d_gamma:
            d_factor = _wide_product(d_scaled.t(), x_TD)
            if needs_d_gamma:
                d_gamma = (all_weights * d_factor).sum(0)
            if needs_d_weight:
                if gamma is None:
                    d_own = d_factor
                else:
                    d_own = d_factor * gamma
                if ctx.sequence_parallel:
                    d_own = reduce_scatter_to_sequence_parallel_region(
                        d_own, group=group
                    )
                else:
                    d_own = d_own.chunk(group.size())[group.rank()]
                if ctx.main_grad is None:
                    d_weight = d_own
                else:
                    ctx.main_grad.add_(d_own)
        return d_x, d_weight, d_gamma, None, None, None


def _wide_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products and sums with ``x``: fp32, or fp64 if ``x`` is fp64."""
    return torch.promote_types(x.dtype, torch.float32)


def _wide_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` in fp32 or fp64, never rounded to 16 bits."""
    if a.is_cuda and a.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.to(_wide_dtype(a)) @ b.to(_wide_dtype(b))

"""in_proj under Megatron's FP8: all columns but the rule's gates.

    main  = in_proj of the rows before the gates      the linear's own FP8 product
    gates = x @ (rows of the gates)^T                 in the weights' dtype

FP8 puts 3.7% of noise on a column (e4m3, TE 2.20), and the recurrence compounds a decay over the
sequence. The width without the gates is also one that FP8 can take: 12288 / 8 is a multiple of 16,
12352 / 8 is not. Megatron's quantization recipe switches linears on and off by their names, so each
call asks. The weight stays one parameter: for the call alone the linear holds a view of its first
rows, and a view of its rows in ``main_grad``.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import fp8_utils
from torch import Tensor, nn

from ..compat.observe import log_once
from ..ops.autograd import first_derivative_only, uncompiled
from ..ops.layout import Layout
from .gate_product import GateProduct
from .tensor_map import stored_in_fp8


def keep_gates_apart(in_proj: Any, layout: Layout, group: Any) -> None:
    """Let ``in_proj``, of the columns ``layout`` on this rank, compute the gates by themselves."""
    if not hasattr(in_proj, "fp8_meta"):
        log_once(
            f"FP8 has no effect on projections of {type(in_proj).__name__}: they compute in the "
            f"weights' dtype. Build the model with Transformer Engine's linears "
            f"(--transformer-impl transformer_engine, modules='te').",
            logging.WARNING,
        )
        return
    if layout.main_width == layout.width:
        return
    in_proj.__class__ = _apart(type(in_proj))
    vars(in_proj).update(_main_rows=layout.main_width, _gates_group=group)
    in_proj.refuse_settings()


def quantises(config: Any) -> bool:
    """Whether a linear of a model with this config may run in FP8."""
    return bool(config.fp8) or config.quant_recipe is not None


def wide_parameters(config: Any) -> AbstractContextManager[Any]:
    """Inside, linears are built with weights in ``params_dtype``, also under ``fp8_param``.

    Rows of an FP8 weight share a scale and have no bf16 values, so it could not hold the gates.
    """
    if not getattr(config, "fp8_param", False):
        return nullcontext()
    from transformer_engine.pytorch import fp8_model_init  # pyright: ignore[reportMissingImports]

    return fp8_model_init(enabled=False)


def refuse_fp8_weight(linear: Any) -> None:
    """Refuse a weight that a quantization recipe stores in FP8, see :func:`wide_parameters`."""
    weight = getattr(linear, "weight", None)
    if weight is not None and stored_in_fp8(weight):
        raise NotImplementedError(
            "the quantization recipe stores a projection of this layer in FP8 (fp8_param: true). "
            "Rows of such a weight have no bf16 values for the rule's gates, and its first values "
            "are not this layer's. Set fp8_param to false for in_proj and out_proj; their products "
            "are in FP8 all the same."
        )


def runs_in_fp8(linear: Any) -> bool:
    """Whether a call of ``linear`` would now be in FP8; without Transformer Engine none is."""
    manager = getattr(fp8_utils, "FP8GlobalStateManager", None)
    is_on = manager is not None and manager.is_fp8_enabled()
    return hasattr(linear, "fp8_meta") and linear.will_execute_quantized(is_on)


def keep_unquantised_input(linear: Any, config: Any) -> bool:
    """Let ``linear`` save the very tensor that it is given, so that this can be computed again.

    In FP8 a linear of Transformer Engine saves a quantised copy by itself. Asked to, it saves its
    input and quantises it again in the backward; delayed scaling cannot do that. Returns whether
    the linear's backward will read its input.
    """
    if not quantises(config) or not hasattr(linear, "fp8_meta"):
        return True
    if config.fp8 and config.fp8_recipe == "delayed" or not hasattr(linear, "save_original_input"):
        log_once(
            "out_proj keeps its input in FP8 (delayed scaling, or an older Transformer Engine), so "
            "recompute_norm_out, part of recompute='light', drops nothing."
        )
        return False
    linear.save_original_input = True
    return True


class GatesApart(nn.Module):
    """Mixin before the class of a column-parallel linear."""

    _main_rows: int
    _gates_group: Any
    sequence_parallel: bool
    fuse_wgrad_accumulation: bool

    def finish_init(self, quantization_config: Any) -> None:
        """Take the recipe that a whole model gives its linears, by their names in it."""
        super().finish_init(quantization_config)  # pyright: ignore[reportAttributeAccessIssue]
        self.refuse_settings()

    def refuse_settings(self) -> None:
        """Refuse FP4 by the quantization recipe, and delayed weight gradients."""
        linear: Any = self
        of_module = getattr(linear, "te_quant_params", None)
        if of_module is not None:
            for recipe in (of_module.training_recipe, of_module.evaluation_recipe):
                if recipe is not None and recipe.fp4_quantization_recipe is not None:
                    raise NotImplementedError(
                        "the quantization recipe computes in_proj in FP4, which was never run "
                        "beside gates in bf16. Give in_proj an FP8 recipe, or none."
                    )
        delayed = getattr(linear.config, "delay_wgrad_compute", False)
        if delayed and linear.will_execute_quantized(bool(linear.config.fp8)):
            raise NotImplementedError(
                "delay_wgrad_compute with FP8: in_proj computes its gates outside of FP8, and "
                "their weight gradient at once. Switch one of the two off."
            )

    def forward(self, x: Tensor, *args: Any, together: bool = True, **kwargs: Any) -> Any:
        """As the linear's: ``[S, B, P]`` and no bias.

        ``together=False`` returns the columns before the gates and, in place of the bias, the
        gates, which saves a copy each way. Outside of FP8 it is all columns, and None.
        """
        if not runs_in_fp8(self):
            return super().forward(x, *args, **kwargs)
        out, gates = self._in_parts(x, args, kwargs)
        if not together:
            return out, gates
        if isinstance(out, tuple):  # an adapter around the linear asked for the normed rows too
            return (torch.cat([out[0], gates], dim=-1), *out[1:]), None
        return torch.cat([out, gates], dim=-1), None

    @uncompiled  # Dynamo loses gradients of views of the weight, and of the gates
    def _in_parts(
        self, x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Any, Tensor]:
        """What the linear makes of its rows before the gates, and the gates."""
        weight, bias = self._parameters["weight"], self._parameters.get("bias")
        assert weight is not None
        main_weight, gate_weight = self._cut(weight)
        held = {"weight": main_weight}
        if bias is not None:
            held["bias"] = bias[: self._main_rows]
        of_gates = self._norm_before(x, gate_weight)
        gates, handed = GateProduct.apply(*of_gates, self._gates_group, self.sequence_parallel)
        parameters: dict[str, Any] = self._parameters
        kept = {name: parameters[name] for name in held}
        parameters.update(held)
        try:
            out, _ = super().forward(handed if of_gates[0] is x else x, *args, **kwargs)
        finally:
            parameters.update(kept)
        return out, gates if bias is None else gates + bias[self._main_rows :]

    def _norm_before(self, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
        """The first arguments of :class:`GateProduct`, the norm in front of the linear included."""
        norm: Any = self
        gamma = self._parameters.get("layer_norm_weight")
        if gamma is None:
            return x, weight, None, 0.0
        shown: Tensor = gamma.float() + 1 if norm.zero_centered_gamma else gamma
        if norm.normalization == "RMSNorm":
            return x, weight, shown, norm.eps
        shown = shown.to(x.dtype)
        normed = F.layer_norm(x, x.shape[-1:], shown, norm.layer_norm_bias, norm.eps)
        return normed, weight, None, 0.0

    def _cut(self, weight: nn.Parameter) -> tuple[Tensor, Tensor]:
        """Views of the rows, whose gradients the linear may add to ``main_grad`` by itself."""
        if hasattr(weight, "__fsdp_param__"):
            raise NotImplementedError(
                "FP8 under Megatron-FSDP: it makes a weight's gradient buffer in the backward, and "
                "in_proj writes the rows of its gates by themselves. Use the distributed "
                "optimizer, or keep this layer out of FP8."
            )
        fused = self.fuse_wgrad_accumulation and weight.requires_grad and torch.is_grad_enabled()
        parts = _CutRows.apply(weight, self._main_rows, fused)
        if fused:
            main_grad: Any = getattr(weight, "main_grad")  # noqa: B009 - Megatron's, undeclared
            for part, grad in zip(parts, main_grad.tensor_split([self._main_rows]), strict=True):
                vars(part).update(main_grad=grad, grad_added_to_main_grad=False)
        return parts


@cache
def _apart(kind: type[nn.Module]) -> type[nn.Module]:
    """The class under its own name: frameworks look linears up by it."""
    return type(kind.__name__, (GatesApart, kind), {"__module__": kind.__module__})


class _CutRows(torch.autograd.Function):
    """The rows before ``first`` and the others, as views; ``added`` if their users add gradients.

    The weight's hooks (of data-parallel wrappers) then run after both were added.
    """

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, first: int, added: bool) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.weight, ctx.first, ctx.added = weight, first, added
        rows = weight.detach()
        return rows[:first], rows[first:]

    @staticmethod
    @first_derivative_only
    def backward(ctx: Any, d_main: Tensor | None, d_gates: Tensor | None):
        weight = ctx.weight
        if not ctx.added:
            counts = (ctx.first, len(weight) - ctx.first)  # the weight may have no memory by now
            parts = zip((d_main, d_gates), counts, strict=True)
            own = [weight.new_zeros(n, weight.shape[1]) if d is None else d for d, n in parts]
            return torch.cat(own), None, None
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None, None, None
        weight.grad_added_to_main_grad = True
        make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
        return make(weight), None, None  # Megatron wants a gradient to be there, and reads none

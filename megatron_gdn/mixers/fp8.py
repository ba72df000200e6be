"""in_proj under Megatron's FP8: FP8 products compute all columns except the rule's
gates.

    main  = x @ (weight rows before the gates)^T      the linear's own FP8 product
    gates = x @ (weight rows of the gates)^T          in the weights' dtype
    after = x @ (weight rows after the gates)^T       if there are such rows: another
                                                      FP8 product of the linear

FP8 adds 3.7% of noise to a column (e4m3, Transformer Engine 2.20), and the recurrence
compounds the noise of a decay. Without the gates the number of columns also suits FP8:
on 8 ranks, 12288 / 8 is a multiple of 16, 12352 / 8 is not. The weight stays one
parameter, and each product reads a view of some of its rows.

Legend: T tokens of all batch rows, p gate columns and P in_proj columns of this rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core import fp8_utils
from megatron.core.transformer.spec_utils import (
    ModuleSpec,
    build_module,
    get_module,
)
from torch import Tensor, nn

from ..compat.observe import log_once
from ..ops.autograd import uncompiled
from ..ops.layout import Layout, SizeError
from .gate_product import GateProduct, SplitRows
from .tensor_map import stored_quantised

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from torch.distributed import ProcessGroup

    from ..compat.state_dict import StateDict


def check_fp8_settings(
    config: Any, mixer: str, widths: Mapping[str, int], heads_text: str
) -> None:
    """Raise if the config asks for FP4, or for FP8 products that cannot run.

    Args:
        config: Megatron's config of the model.
        mixer: the mixer's name, for the error.
        widths: the numbers of columns that FP8 products have on this rank, each with a
            name for the error.
        heads_text: the heads of this rank, for the error.

    Raises:
        NotImplementedError: FP4, or MXFP8 on a GPU without MXFP8.
        SizeError: FP8 products cannot have one of ``widths``.
    """
    if getattr(config, "fp4", None):
        raise NotImplementedError(
            f"fp4={config.fp4!r}: the gates of {mixer} would pass through 4-bit "
            "products, and the recurrence compounds their error. Switch fp4 off; fp8 "
            "keeps the gates in bf16."
        )
    # A recipe may keep this mixer's linears out of FP8, so with a recipe nothing is
    # checked here.
    if config.fp8 and config.quant_recipe is None:
        multiple = fp8_utils.get_fp8_align_size(config.fp8_recipe)
        if config.fp8_recipe == "mxfp8" and torch.cuda.is_available():
            _require_mxfp8()
        require_fp8_widths(widths, heads_text, multiple)


def _require_mxfp8() -> None:
    """Raise unless the current GPU has products in MXFP8."""
    major, minor = torch.cuda.get_device_capability()
    if major < 10:
        raise NotImplementedError(
            f"fp8_recipe='mxfp8': MXFP8 needs a GPU of compute capability 10.0 or more "
            f"(Blackwell), and this GPU has {major}.{minor}. Take --fp8-recipe "
            "blockwise, tensorwise or delayed."
        )


def widths_in_fp8(layout: Layout) -> dict[str, int]:
    """The widths that FP8 products have in a mixer of this ``layout``, by a name for
    errors."""
    return {
        "in_proj without the gates": layout.main_width,
        "the input of out_proj": layout.mixed_width,
    }


def require_fp8_widths(
    widths: Mapping[str, int], heads_text: str, multiple: int
) -> None:
    """Raise a SizeError if one of ``widths`` is no multiple of ``multiple``.

    ``widths`` are numbers of columns, by a name for the error. ``heads_text`` names the
    heads of this rank in the error.
    """
    for name, width in widths.items():
        if width % multiple:
            raise SizeError(
                f"FP8 needs multiples of {multiple}, but {name} has {width} columns on "
                f"a tensor-parallel rank (remainder {width % multiple}; "
                f"{heads_text}). Use a smaller tensor_model_parallel_size, or keep "
                "this layer out of FP8."
            )


def with_gates_outside_fp8(
    spec: ModuleSpec | type, layout: Layout, section: str = ""
) -> ModuleSpec | type:
    """``spec`` of an in_proj, changed so that the linear computes gates outside of FP8.

    The gates are the last columns of ``layout``, or the columns of ``section`` if it is
    not "". For a linear without FP8, and for a layout without gates, ``spec`` is
    returned as it is. Call :func:`set_gate_columns` on the built linear.
    """
    if section:
        return _with_mixin(spec, SectionOutsideFP8)
    if layout.main_width == layout.width:
        return spec
    return _with_mixin(spec, GatesOutsideFP8)


def spec_outside_fp8(spec: ModuleSpec | type) -> ModuleSpec | type:
    """``spec``, changed so that the linear always computes in its weight's dtype."""
    return _with_mixin(spec, OutsideFP8)


def _with_mixin(spec: ModuleSpec | type, mixin: type[nn.Module]) -> ModuleSpec | type:
    """``spec`` with a class that also inherits from ``mixin``; ``spec`` as it is for a
    linear without FP8."""
    linear_class = get_module(spec)
    if not hasattr(linear_class, "will_execute_quantized"):
        return spec
    linear_class = _class_with_mixin(mixin, linear_class)
    if isinstance(spec, ModuleSpec):
        return replace(spec, module=linear_class)
    return linear_class


def set_gate_columns(
    in_proj: nn.Module, layout: Layout, group: ProcessGroup, section: str = ""
) -> None:
    """Tell the built ``in_proj`` which of its columns are gates.

    The gates are the last columns of ``layout``, or the columns of ``section`` if it is
    not "". ``group`` is the tensor-parallel group. If FP8 has no effect on this linear,
    a log line says so.
    """
    if not hasattr(in_proj, "fp8_meta"):  # an attribute of Transformer Engine's linears
        log_once(
            f"FP8 has no effect on projections of {type(in_proj).__name__}: they "
            "compute in the weights' dtype. Build the model with Transformer Engine's "
            "linears (--transformer-impl transformer_engine, modules='te').",
            logging.WARNING,
        )
        return
    if isinstance(in_proj, GatesOutsideFP8):
        in_proj.rows_before_gates = layout.main_width
        in_proj.gates_group = group
    if isinstance(in_proj, SectionOutsideFP8):
        in_proj.section = layout.columns(section)
    if isinstance(in_proj, _SeveralProducts):
        in_proj.refuse_fp4_and_delayed_gradients()


def may_use_fp8(config: TransformerConfig) -> bool:
    """Whether a linear of a model with this config may run in FP8."""
    return bool(config.fp8) or config.quant_recipe is not None


def build_linear(
    spec: ModuleSpec | type, config: TransformerConfig, *sizes: int, **options: object
) -> Any:
    """Build a linear with a weight in ``params_dtype``, even if the config sets
    ``fp8_param``.

    ``sizes`` (columns in and out) and ``options`` go to the linear's constructor.
    """
    # An FP8 weight would round the gates' rows.
    no_fp8_weights = nullcontext()
    if getattr(config, "fp8_param", False):
        engine = import_module("transformer_engine.pytorch")
        no_fp8_weights = engine.fp8_model_init(enabled=False)
    with no_fp8_weights:
        linear: Any = build_module(spec, *sizes, config=config, **options)
    weight = getattr(linear, "weight", None)
    if may_use_fp8(config) and stored_quantised(weight):
        raise NotImplementedError(
            "the quantization recipe stores a projection of this layer in FP8 "
            "(fp8_param: true), which would round the rows of the gates. Set fp8_param "
            "to false for in_proj and out_proj; their products are in FP8 all the same."
        )
    return linear


def runs_in_fp8(linear: Any) -> bool:
    """Whether a call of ``linear``, one of Transformer Engine's, would run in FP8
    now."""
    # Megatron imports this class only if Transformer Engine is installed
    manager = getattr(fp8_utils, "FP8GlobalStateManager", None)
    is_on = manager is not None and manager.is_fp8_enabled()
    return linear.will_execute_quantized(is_on)


def keep_unquantised_input(linear: Any, config: TransformerConfig) -> bool:
    """Let ``linear`` save its input unquantised for its backward.

    Returns False, and logs why, if this linear can save only an input in FP8.
    """
    if not may_use_fp8(config) or not hasattr(linear, "fp8_meta"):
        return True
    delayed_scaling = config.fp8 and config.fp8_recipe == "delayed"
    if delayed_scaling or not hasattr(linear, "save_original_input"):
        log_once(
            "out_proj keeps its input in FP8 (delayed scaling, or an older Transformer "
            "Engine), so recompute_norm_out, part of recompute='light', frees no "
            "memory."
        )
        return False
    linear.save_original_input = True
    return True


class OutsideFP8(nn.Module):
    """Mixin of a linear whose columns are gates of the rule: it computes in its
    weight's dtype, even if the config or a quantization recipe asks for FP8."""

    def finish_init(self, quantization_config: object) -> None:
        """Megatron calls this with the linear's quantization recipe; take none."""
        super().finish_init(quantization_config)  # pyright: ignore[reportAttributeAccessIssue]
        linear: Any = self
        linear.te_quant_params = _never_quantised()


@cache
def _never_quantised() -> Any:
    """Megatron's ``TEQuantizationParams`` of a linear that no FP8 context quantises."""
    linears: Any = import_module("megatron.core.extensions.transformer_engine")
    empty_recipe = linears.TEQuantizationRecipe()
    return linears.TEQuantizationParams(empty_recipe, empty_recipe)


class _SeveralProducts(nn.Module):
    """Mixin of a column-parallel linear that computes its columns by several products
    under FP8. Each product reads some rows of the weight, which stays one
    parameter."""

    sequence_parallel: bool
    fuse_wgrad_accumulation: bool

    def finish_init(self, quantization_config: object) -> None:
        """Megatron calls this with the linear's quantization recipe; raise if it is not
        legal."""
        super().finish_init(quantization_config)  # pyright: ignore[reportAttributeAccessIssue]
        self.refuse_fp4_and_delayed_gradients()

    def refuse_fp4_and_delayed_gradients(self) -> None:
        """Raise if the quantization recipe asks for FP4, or if FP8 has delayed weight
        gradients."""
        linear: Any = self
        settings = getattr(linear, "te_quant_params", None)
        if settings is not None:
            for recipe in (settings.training_recipe, settings.evaluation_recipe):
                if recipe is not None and recipe.fp4_quantization_recipe is not None:
                    raise NotImplementedError(
                        "the quantization recipe computes in_proj in FP4, which was "
                        "never run beside gates in bf16. Give in_proj an FP8 recipe, "
                        "or none."
                    )
        delayed = linear.config.delay_wgrad_compute
        if delayed and linear.will_execute_quantized(bool(linear.config.fp8)):
            raise NotImplementedError(
                "delay_wgrad_compute with FP8: in_proj computes its gates outside of "
                "FP8, and their weight gradient at once. Switch one of the two off."
            )

    def _product_with(
        self,
        weight: Tensor,
        bias: Tensor | None,
        x: Tensor,
        args: tuple,
        kwargs: dict,
    ) -> Any:
        """The output of the linear's own forward, called with ``x``, while ``weight``
        and ``bias`` stand in for its parameters.

        ``args`` and ``kwargs`` are the further arguments of that forward.
        """
        stand_ins = {"weight": weight}
        if bias is not None:
            stand_ins["bias"] = bias
        # torch refuses to assign a view to the attribute of a parameter
        parameters: StateDict = self._parameters
        own = {name: parameters[name] for name in stand_ins}
        parameters.update(stand_ins)
        try:
            out, _ = super().forward(x, *args, **kwargs)
        finally:
            parameters.update(own)
        return out

    def _split_weight(self, weight: nn.Parameter, *ends: int) -> tuple[Tensor, ...]:
        """Views of the weight's rows, split at the row numbers ``ends``.

        If the linear adds gradients to ``weight.main_grad``, each view gets the same
        rows of that tensor as its own ``main_grad``.
        """
        if hasattr(weight, "__fsdp_param__"):
            raise NotImplementedError(
                "FP8 under Megatron-FSDP: a weight's gradient buffer is made in the "
                "backward, and in_proj needs the buffer in the forward, to write the "
                "gradients of the gates' rows apart. Use the distributed optimizer, or "
                "keep this layer out of FP8."
            )
        adds_to_main_grad = (
            self.fuse_wgrad_accumulation
            and weight.requires_grad
            and torch.is_grad_enabled()
        )
        views = SplitRows.apply(weight, ends, adds_to_main_grad)
        if adds_to_main_grad:
            main_grad: Any = getattr(weight, "main_grad")  # noqa: B009 - Megatron's, undeclared
            # As on Megatron's parameters, the linear's backward adds to ``main_grad`` and
            # sets ``grad_added_to_main_grad`` to True.
            for view, grad in zip(views, main_grad.tensor_split(ends), strict=True):
                vars(view).update(main_grad=grad, grad_added_to_main_grad=False)
        return views


# Transformer Engine's notes about a linear's latest call: attributes of the linear, and
# entries of its fp8_meta.
_NOTES_OF_LATEST_CALL = ("fp8", "fp8_initialized", "fp8_calibration", "fp8_checkpoint")


class SectionOutsideFP8(_SeveralProducts):
    """Mixin of a column-parallel linear that computes one section of its columns
    outside of FP8. Two FP8 products compute the columns before this section and those
    after it.

    Each product is a call of the linear's own forward. So the linear itself gathers the
    tokens of sequence parallelism, and its backward adds gradients to ``main_grad``.
    """

    section: slice  # the rows of the weight that are never quantised

    def forward(self, x: Tensor, *args: object, **kwargs: object) -> Any:
        """The linear's output ``[S, B, P]``, and None in place of a bias."""
        if not runs_in_fp8(self):
            return super().forward(x, *args, **kwargs)
        return self._three_products(x, args, kwargs), None

    # Dynamo would lose the gradients of the weight's views
    @uncompiled
    def _three_products(self, x: Tensor, args: tuple, kwargs: dict) -> Tensor:
        """The columns of the three products in order, ``[S, B, P]``.

        Only the product of the section's columns is computed outside of FP8.
        ``args`` and ``kwargs`` are the arguments of the linear's forward after ``x``.
        """
        linear: Any = self
        weight = self._parameters["weight"]
        bias = self._parameters.get("bias")
        assert weight is not None
        ends = self.section.start, self.section.stop
        weights = self._split_weight(weight, *ends)
        biases = (None,) * 3
        if bias is not None:
            biases = bias.tensor_split(ends)
        # Transformer Engine's linear removes this attribute after a call.
        is_first = getattr(linear, "is_first_microbatch", None)

        def product(index: int) -> Tensor:
            """The columns before the section (0), of the section (1), or after it
            (2)."""
            linear.is_first_microbatch = is_first
            return self._product_with(weights[index], biases[index], x, args, kwargs)

        with self._outside_fp8():
            of_section = product(1)
        before = product(0)
        with self._fp8_weight_of_rows_after():
            after = product(2)
        return torch.cat([before, of_section, after], dim=-1)

    @contextmanager
    def _outside_fp8(self) -> Iterator[None]:
        """In this context the linear computes in its weight's dtype.

        On leaving, Transformer Engine's notes about the linear's latest call are as
        before. If a checkpoint runs the linear again, Transformer Engine reads the
        notes to do what the latest call did. It also reads them when it saves the state
        of delayed scaling.
        """
        linear: Any = self
        attributes = vars(linear)
        fp8_meta = linear.fp8_meta
        names = _NOTES_OF_LATEST_CALL
        notes = {name: attributes[name] for name in names if name in attributes}
        notes_in_meta = {name: fp8_meta[name] for name in names if name in fp8_meta}
        own_settings = linear.te_quant_params
        linear.te_quant_params = _never_quantised()
        attributes.update(dict.fromkeys(notes, False))
        try:
            yield
        finally:
            linear.te_quant_params = own_settings
            attributes.update(notes)
            fp8_meta.update(notes_in_meta)

    @contextmanager
    def _fp8_weight_of_rows_after(self) -> Iterator[None]:
        """In this context the linear's stored FP8 weight is that of the rows after the
        section.

        Transformer Engine stores a linear's FP8 weight under the name "weight". Outside
        of this context that is the FP8 weight of the rows before the section.
        """
        fp8_weights: dict = getattr(self, "_fp8_workspaces", {})
        of_rows_before = fp8_weights.pop("weight", None)
        if "rows_after" in fp8_weights:
            fp8_weights["weight"] = fp8_weights.pop("rows_after")
        try:
            yield
        finally:
            if "weight" in fp8_weights:
                fp8_weights["rows_after"] = fp8_weights.pop("weight")
            if of_rows_before is not None:
                fp8_weights["weight"] = of_rows_before


class GatesOutsideFP8(_SeveralProducts):
    """Mixin of a column-parallel linear that computes the gates, its last columns,
    outside of FP8."""

    rows_before_gates: int  # rows of the weight before the gates' rows
    gates_group: ProcessGroup  # the tensor-parallel group

    def forward(
        self, x: Tensor, *args: object, together: bool = True, **kwargs: object
    ) -> Any:
        """The linear's output ``[S, B, P]``, and None in place of a bias.

        Under FP8, ``together=False`` returns two tensors: the columns before the gates,
        and the gates. This option avoids a copy in the forward and in the backward.
        """
        if not runs_in_fp8(self):
            return super().forward(x, *args, **kwargs)
        out, gates = self._main_and_gate_columns(x, args, kwargs)
        if not together:
            return out, gates
        # Inside an adapter the linear returns a tuple: its columns and the normed rows.
        if isinstance(out, tuple):
            return (torch.cat([out[0], gates], dim=-1),) + out[1:], None
        return torch.cat([out, gates], dim=-1), None

    # Dynamo would lose the gradients of the gates and of the weight's views
    @uncompiled
    def _main_and_gate_columns(
        self, x: Tensor, args: tuple, kwargs: dict
    ) -> tuple[Any, Tensor]:
        """The columns before the gates from an FP8 product, and the gates in the
        weight's dtype.

        The gates are ``[S, B, p]``. If an adapter makes the linear return more than its
        columns, the first result is the linear's tuple. ``args`` and ``kwargs`` are the
        arguments of the linear's forward after ``x``.
        """
        weight = self._parameters["weight"]
        bias = self._parameters.get("bias")
        assert weight is not None
        main_weight, gate_weight = self._split_weight(weight, self.rows_before_gates)
        gate_input, gamma, eps = self._gate_product_inputs(x)
        gates, x_after_gates = GateProduct.apply(
            gate_input,
            gate_weight,
            gamma,
            eps,
            self.gates_group,
            self.sequence_parallel,
        )
        if gate_input is x:
            # GateProduct's backward adds to the gradient of this tensor
            x = x_after_gates
        if bias is None:
            return self._product_with(main_weight, None, x, args, kwargs), gates
        main_bias, gate_bias = bias.tensor_split([self.rows_before_gates])
        out = self._product_with(main_weight, main_bias, x, args, kwargs)
        return out, gates + gate_bias

    def _gate_product_inputs(self, x: Tensor) -> tuple[Tensor, Tensor | None, float]:
        """`GateProduct`'s arguments x, gamma and eps for the linear's input ``x``.

        A linear with a fused RMSNorm gives the norm's gamma and eps; ``GateProduct``
        then computes the norm. With a fused LayerNorm, the first result is already
        normed.
        """
        norm: Any = self
        gamma = self._parameters.get("layer_norm_weight")
        if gamma is None:
            return x, None, 0.0
        if norm.zero_centered_gamma:
            gain: Tensor = gamma.float() + 1
        else:
            gain = gamma
        if norm.normalization == "RMSNorm":
            return x, gain, norm.eps
        gain = gain.to(x.dtype)
        normed = F.layer_norm(x, x.shape[-1:], gain, norm.layer_norm_bias, norm.eps)
        return normed, None, 0.0


@cache
def _class_with_mixin(mixin: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    """A subclass of ``mixin`` and of the linear's class ``kind``.

    It has the name and module of ``kind``, by which frameworks recognise a linear.
    """
    return type(kind.__name__, (mixin, kind), {"__module__": kind.__module__})

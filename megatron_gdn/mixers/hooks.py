"""Hooks and forwards of modules whose parameters a mixer reads without calling the
modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..compat.observe import log_once
from ..ops.layout import Layout

_CONV_FORWARD = nn.Conv1d.forward  # torch's own, before anyone patches the class
_GLOBAL_HOOKS = (  # torch never replaces these dictionaries
    torch_module._global_forward_pre_hooks,
    torch_module._global_forward_hooks,
    torch_module._global_backward_pre_hooks,
    torch_module._global_backward_hooks,
)
# The modules whose hooks wait for gathered parameters. megatron-core has a copy of the
# second module; its name has the same end.
_DDP_MODULE = "megatron.core.distributed.distributed_data_parallel"
_FSDP_MODULE_END = "megatron_fsdp.megatron_fsdp"


def _waits_for_parameters(hook: Callable) -> bool:
    """Whether ``hook`` is a pre-hook by which Megatron's data-parallel wrappers wait
    for gathered parameters."""
    module = getattr(hook, "__module__", None) or ""
    if module.endswith(_FSDP_MODULE_END):
        return getattr(hook, "__name__", None) == "_pre_forward_param_unshard"
    return module == _DDP_MODULE


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs a hook of the module or one of torch's global
    hooks."""
    own = (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    return bool(own) or any(_GLOBAL_HOOKS)


def _has_hooks_besides_forward_pre(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs hooks other than the module's forward
    pre-hooks."""
    own = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or any(_GLOBAL_HOOKS)


def only_waits_for_parameters(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs only hooks that :func:`wait_for_parameters`
    runs."""
    before = module._forward_pre_hooks.values()
    return not _has_hooks_besides_forward_pre(module) and all(
        map(_waits_for_parameters, before)
    )


def wait_for_parameters(module: nn.Module) -> None:
    """Run the pre-hooks by which Megatron's data-parallel wrappers wait for gathered
    parameters.

    Before the gather, parameters hold the last step's values (``overlap_param_gather``)
    or have no memory (Megatron-FSDP).
    """
    for hook in list(module._forward_pre_hooks.values()):
        if _waits_for_parameters(hook):
            hook(module, ())  # these hooks read no inputs


@contextmanager
def gathered_parameters(module: nn.Module) -> Iterator[None]:
    """Gather the parameters of ``module``; in this context its modules do not wait for
    them again.

    In this context the hooks of :func:`wait_for_parameters` are removed.
    """
    hooked = [part for part in module.modules() if part._forward_pre_hooks]
    all_hooks = [part._forward_pre_hooks for part in hooked]
    try:
        for part, hooks in zip(hooked, all_hooks, strict=True):
            wait_for_parameters(part)
            others = (
                (key, hook)
                for key, hook in hooks.items()
                if not _waits_for_parameters(hook)
            )
            part._forward_pre_hooks = OrderedDict(others)
        yield
    finally:
        for part, hooks in zip(hooked, all_hooks, strict=True):
            part._forward_pre_hooks = hooks


def forward_name(module: nn.Module) -> str:
    """The name of the attribute with the forward that a call of ``module`` runs.

    accelerate's hooks replace the attribute ``forward``, and store the module's own
    forward in ``_old_forward``.
    """
    hooked = "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    if hooked:
        return "_old_forward"
    return "forward"


def runs_class_forward(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs its class's ``forward``; True also if only
    accelerate's hooks run around it."""
    if "forward" not in vars(module):
        return True
    forward = vars(module).get(forward_name(module))
    # When accelerate's hooks are removed, the attribute is a bound method of the class.
    return getattr(forward, "__func__", None) is type(module).forward


@contextmanager
def loaded_by_accelerate(*modules: nn.Module) -> Iterator[None]:
    """In this context accelerate's hooks have loaded offloaded parameters of
    ``modules``.

    accelerate loads them in a module's forward, which is not called for ``modules``.
    """
    hooked = [(module, vars(module).get("_hf_hook")) for module in modules]
    hooked = [(module, hook) for module, hook in hooked if hook is not None]
    for module, hook in hooked:
        hook.pre_forward(module)
    try:
        yield
    finally:
        for module, hook in reversed(hooked):
            hook.post_forward(module, ())


def require_plain_conv(conv: nn.Module) -> None:
    """Refuse a ``conv1d`` that is not torch's plain convolution with stride and
    dilation 1.

    accelerate's forward, which moves inputs between devices, is legal, and so is
    modelopt's class while its quantizers are off.
    """
    plain = type(conv).forward is _CONV_FORWARD and runs_class_forward(conv)
    if not plain and any(
        cls.__module__.startswith("modelopt.") for cls in type(conv).__mro__
    ):
        plain = not any(part.is_enabled for part in conv.children())
    if not plain or not conv.dilation == conv.stride == (1,):
        raise NotImplementedError(
            f"conv1d is a {type(conv).__name__} with a forward, dilation or stride of "
            "its own, but the mixer reads the weight and computes the convolution "
            "itself. Leave conv1d out of adapters, quantization (modelopt's quantizers "
            "named '*conv1d*') and patches, or parametrise its weight."
        )


def run_pre_hooks(module: nn.Module, make_input: Callable[[], Tensor]) -> None:
    """Run the forward pre-hooks of ``module``, which is never called.

    The hooks get ``make_input()``, the input that a call would get. A hook that returns
    another input raises a NotImplementedError. Other hooks do not run, and a log line
    says so.
    """
    name = type(module).__name__
    if _has_hooks_besides_forward_pre(module):
        log_once(
            f"GatedDeltaNet: the mixer computes its {name} itself and never calls it, "
            "so forward hooks and backward hooks, also those for all modules, do not "
            f"run on the {name}; its forward pre-hooks do."
        )
    if not module._forward_pre_hooks:
        return
    inputs = (make_input(),)
    # a list, since a hook may remove itself
    for key, hook in list(module._forward_pre_hooks.items()):
        new_inputs: Any
        new_keywords: dict = {}
        # a hook that returns None changes nothing
        if key in module._forward_pre_hooks_with_kwargs:
            new_inputs, new_keywords = hook(module, inputs, {}) or (inputs, {})
        else:
            new_inputs = hook(module, inputs)
            if new_inputs is None:
                new_inputs = inputs
        # for torch, a single tensor means the same as a tuple with this tensor
        if isinstance(new_inputs, tuple) and len(new_inputs) == 1:
            new_inputs = new_inputs[0]
        if new_keywords or new_inputs is not inputs[0]:
            raise NotImplementedError(
                f"a forward pre-hook of GatedDeltaNet's {name} ({hook}) returned "
                "another input. The mixer computes this module from the projection's "
                "rows, so a hook may read them and return None; to change them, hook "
                "in_proj's output."
            )


def read_conv_module(
    conv: nn.Conv1d, rows: Tensor, layout: Layout
) -> tuple[Tensor, Tensor | None]:
    """Run the forward pre-hooks of the module ``conv``; return its weight ``[C, 1, W]``
    and bias ``[C]`` or None.

    The mixer computes the convolution itself, so nothing calls ``conv`` and its hooks.
    ``rows [S, B, P]`` of this ``layout`` have the convolution's input.
    """
    require_plain_conv(conv)
    if has_hooks(conv):  # hooks may change parameters, so they run first
        columns = layout.conv_columns
        # [B, C, S], as a call of ``conv`` would get it
        run_pre_hooks(conv, lambda: rows.detach()[..., columns].permute(1, 2, 0))
    return conv.weight, conv.bias

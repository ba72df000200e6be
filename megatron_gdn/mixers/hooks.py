"""Hooks and forwards of modules whose parameters a mixer reads without calling the
modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules

from ..compat.observe import log_once
from ..ops.layout import Layout

_CONV_FORWARD = nn.Conv1d.forward
_HOOKS_OF_ALL = (  # torch never replaces these dictionaries
    of_all_modules._global_forward_pre_hooks,
    of_all_modules._global_forward_hooks,
    of_all_modules._global_backward_pre_hooks,
    of_all_modules._global_backward_hooks,
)
_MEGATRON_DDP = "megatron.core.distributed.distributed_data_parallel"
# end of a module's name: megatron-core has a copy
_MEGATRON_FSDP = "megatron_fsdp.megatron_fsdp"


def _waits_for_parameters(hook: Callable) -> bool:
    """Whether a pre-hook is one by which Megatron's wrappers wait for gathered
    parameters."""
    module = getattr(hook, "__module__", None) or ""
    if module.endswith(_MEGATRON_FSDP):
        return getattr(hook, "__name__", None) == "_pre_forward_param_unshard"
    return module == _MEGATRON_DDP


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs a hook of the module or one of torch's global
    hooks."""
    own = (
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )
    return bool(own) or any(_HOOKS_OF_ALL)


def _has_other_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs hooks other than the module's forward
    pre-hooks."""
    own = module._forward_hooks or module._backward_hooks or module._backward_pre_hooks
    return bool(own) or any(_HOOKS_OF_ALL)


def only_waits_for_parameters(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs only hooks that :func:`wait_for_parameters`
    runs."""
    before = module._forward_pre_hooks.values()
    return not _has_other_hooks(module) and all(map(_waits_for_parameters, before))


def wait_for_parameters(module: nn.Module) -> None:
    """Run the pre-hooks by which Megatron's data-parallel wrappers wait for gathered
    parameters.

    Before the gather, parameters hold the last step's values (``overlap_param_gather``)
    or have no memory (Megatron-FSDP).
    """
    for hook in list(module._forward_pre_hooks.values()):
        if _waits_for_parameters(hook):
            hook(module, ())


@contextmanager
def gathered_parameters(module: nn.Module) -> Iterator[None]:
    """In this context the parameters of ``module`` are gathered, so calls need not
    wait."""
    parts = [part for part in module.modules() if part._forward_pre_hooks]
    hooks = [part._forward_pre_hooks for part in parts]
    try:
        for part, own in zip(parts, hooks, strict=True):
            wait_for_parameters(part)
            others = (
                (key, hook)
                for key, hook in own.items()
                if not _waits_for_parameters(hook)
            )
            part._forward_pre_hooks = OrderedDict(others)
        yield
    finally:
        for part, own in zip(parts, hooks, strict=True):
            part._forward_pre_hooks = own


def forward_name(module: nn.Module) -> str:
    """The attribute of an instance whose value a call runs in place of the class's
    ``forward``.

    accelerate's hooks replace ``forward``, and call the replaced one, which they keep
    in ``_old_forward``.
    """
    hooked = "_hf_hook" in vars(module) and "_old_forward" in vars(module)
    if hooked:
        return "_old_forward"
    return "forward"


def runs_class_forward(module: nn.Module) -> bool:
    """Whether a call of ``module`` runs its class's ``forward``, inside accelerate's
    hooks if any.

    A bound method of the class is what accelerate leaves behind when its hooks are
    removed.
    """
    if "forward" not in vars(module):
        return True
    forward = vars(module).get(forward_name(module))
    return forward is None or getattr(forward, "__func__", None) is type(module).forward


@contextmanager
def loaded_by_accelerate(*modules: nn.Module) -> Iterator[None]:
    """In this context accelerate's hooks have loaded offloaded parameters of
    ``modules``.

    The hooks run in a module's forward, so they do not run for modules that are not
    called.
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
    """Run the pre-hooks of a module that is never called; none may replace
    ``make_input()``."""
    name = type(module).__name__
    if _has_other_hooks(module):
        log_once(
            f"GatedDeltaNet: the mixer computes its {name} itself and never calls it, "
            "so forward hooks and backward hooks, also those for all modules, do not "
            f"run on the {name}; its forward pre-hooks do."
        )
    if not module._forward_pre_hooks:
        return
    inputs = (make_input(),)
    # a hook may remove itself
    for key, hook in list(module._forward_pre_hooks.items()):
        returned: Any
        added_keywords: dict = {}
        if key in module._forward_pre_hooks_with_kwargs:
            returned, added_keywords = hook(module, inputs, {}) or (inputs, {})
        elif (returned := hook(module, inputs)) is None:
            returned = inputs
        if isinstance(returned, tuple) and len(returned) == 1:
            returned = returned[0]
        if added_keywords or returned is not inputs[0]:
            raise NotImplementedError(
                f"a forward pre-hook of GatedDeltaNet's {name} ({hook}) returned "
                "another input. The mixer computes this module from the projection's "
                "rows, so a hook may read them and return None; to change them, hook "
                "in_proj's output."
            )


def read_conv_module(
    conv: nn.Conv1d, rows: Tensor, layout: Layout
) -> tuple[Tensor, Tensor | None]:
    """Run the forward pre-hooks of the module ``conv`` for ``rows``; return its weight
    and bias."""
    require_plain_conv(conv)
    if has_hooks(conv):  # hooks may change parameters, so they run first
        columns = layout.conv_columns
        run_pre_hooks(conv, lambda: rows.detach()[..., columns].permute(1, 2, 0))
    return conv.weight, conv.bias

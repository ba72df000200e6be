"""Hooks of modules whose parameters are read without a call of the module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .observe import log_once

_MEGATRON_DDP = "megatron.core.distributed.distributed_data_parallel"


def _waits_for_parameters(hook: Callable) -> bool:
    return getattr(hook, "__module__", None) == _MEGATRON_DDP


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of ``module`` would run any hook of its own."""
    return bool(
        module._forward_pre_hooks
        or module._forward_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    )


def only_waits_for_parameters(module: nn.Module) -> bool:
    """Whether ``module`` has no hook but those of :func:`wait_for_parameters`."""
    others = (module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)
    return not any(others) and all(map(_waits_for_parameters, module._forward_pre_hooks.values()))


def wait_for_parameters(module: nn.Module) -> None:
    """Run the pre-hooks by which Megatron's data-parallel wrapper waits for a gather.

    With ``overlap_param_gather`` the parameters of a module hold the last step's values until then.
    These hooks look at the module alone.
    """
    for hook in list(module._forward_pre_hooks.values()):
        if _waits_for_parameters(hook):
            hook(module, ())


def run_pre_hooks(module: nn.Module, rows: Callable[[], Tensor]) -> None:
    """Run all pre-hooks of a module that is computed elsewhere, with the input it would have had.

    Args:
        rows: makes that input; asked only where there are hooks.

    Raises:
        NotImplementedError: a hook returned another input, which nobody would read.
    """
    name = type(module).__name__
    if any((module._forward_hooks, module._backward_hooks, module._backward_pre_hooks)):
        log_once(
            f"GatedDeltaNet: its {name} is computed inside the mixer and never called, so the "
            f"forward hooks and the backward hooks on it do not run; its forward pre-hooks do."
        )
    if not module._forward_pre_hooks:
        return
    given = (rows(),)
    for key, hook in list(module._forward_pre_hooks.items()):  # a hook may remove itself
        if key in module._forward_pre_hooks_with_kwargs:
            returned: Any = hook(module, given, {})
            same = returned is None or (_same(returned[0], given) and not returned[1])
        else:
            returned = hook(module, given)
            same = returned is None or _same(returned, given)
        if not same:
            raise NotImplementedError(
                f"a forward pre-hook of GatedDeltaNet's {name} ({hook}) returned another input. "
                f"The mixer computes this module from the projection's rows, so a hook may read "
                f"them and return None; to change them, hook in_proj's output."
            )


def _same(returned: Any, given: tuple[Tensor]) -> bool:
    one = returned[0] if isinstance(returned, tuple) and len(returned) == 1 else returned
    return one is given[0]

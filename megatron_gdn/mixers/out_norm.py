"""The module ``out_norm`` of a mixer: kernels compute a plain RMSNorm, any other module
is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from ..compat.torch_norm import TorchRMSNorm
from ..ops.autograd import first_derivative_only
from ..ops.layout import Layout
from ..ops.readout.base import SplitReadout, readout_by_module
from ..ops.stages import GatedNorm
from .hooks import (
    gathered_parameters,
    has_hooks,
    only_waits_for_parameters,
    wait_for_parameters,
)

_ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}
# The classes of norms that the kernels compute, each with its forward before anyone
# patched it. A mixer may add a class.
FORWARDS_OF_PLAIN_NORMS: dict[type, Callable] = {
    cls: cls.forward for cls in (TorchRMSNorm, nn.RMSNorm)
}


def is_plain_norm(module: nn.Module) -> bool:
    """Whether the norm ``module`` is a plain RMSNorm, which the kernels compute.

    The plain classes are those in FORWARDS_OF_PLAIN_NORMS and Transformer Engine's
    RMSNorm. A module with a patched forward is not plain.
    """
    # a subclass of a known class may compute another function
    cls: Any = type(module)
    if "forward" in vars(module):
        return False
    if cls in FORWARDS_OF_PLAIN_NORMS:
        is_known = cls.forward is FORWARDS_OF_PLAIN_NORMS[cls]
    else:
        # a patched forward comes from another package
        is_known = cls.__name__ == "RMSNorm" and all(
            one.__module__.split(".")[0] == "transformer_engine"
            for one in (cls, cls.forward)
        )
    if not is_known:
        return False
    norm: Any = module
    # torch's norm may have no eps, no weight, or a weight of more dimensions
    return norm.eps is not None and norm.weight is not None and norm.weight.dim() == 1


def norm_for_stages(
    module: Any,
    group: dist.ProcessGroup | None,
    layout: Layout,
    activation: str = "silu",
) -> GatedNorm | SplitReadout:
    """The norm ``module`` in the form that :func:`..ops.stages.stages_of` takes.

    A plain RMSNorm gives a GatedNorm. Its hooks that wait for gathered parameters run
    here. Any other norm, or a norm with other hooks, gives a readout that calls the
    module.

    Args:
        module: the mixer's ``out_norm``.
        group: sum the gradients of the norm's parameters over these ranks; None: no
            sum.
        layout: the layout of the rows that the stages get.
        activation: the activation of the output gate.
    """
    plain = is_plain_norm(module)
    if plain and has_hooks(module):
        plain = only_waits_for_parameters(module)
        if plain:
            wait_for_parameters(module)
    if plain:
        if group is None:
            gamma = module.weight
        else:
            gamma = with_summed_gradient(module.weight, group)
        zero_centered = bool(getattr(module, "zero_centered_gamma", False))
        return GatedNorm(gamma, module.eps, zero_centered, activation)
    call = partial(apply_gated_norm, module, group=group, activation=activation)
    return readout_by_module(layout.gate_columns, layout.state_heads, call)


def apply_gated_norm(
    norm: nn.Module,
    x: Tensor,
    gate: Tensor,
    group: dist.ProcessGroup | None = None,
    activation: str = "silu",
) -> Tensor:
    """``norm(x) * act(gate)`` of ``x`` and ``gate`` ``[..., H, V]``, in the dtype of
    ``x``; gate and product are computed in fp32 or fp64.

    ``activation`` names act. The gradients of the norm's parameters are summed over the
    ranks of ``group``; None: not summed.
    """
    with gathered_parameters(norm), gradients_summed(norm, group):
        normed = norm(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (normed * _ACTIVATIONS[activation](gate.to(wide))).to(x.dtype)


class _SumGradient(torch.autograd.Function):
    """Return the parameter; the backward sums its gradient over the ranks of
    ``group``."""

    @staticmethod
    def forward(ctx, parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return parameter.view_as(parameter)

    @staticmethod
    @first_derivative_only
    def backward(ctx, gradient: Tensor):
        """Sum ``gradient``, the output's gradient, over the ranks of the group."""
        # Other code may use ``gradient``, so the sum is computed in a copy, in fp32.
        # Autograd rounds it once, to the parameter's dtype.
        wide = torch.promote_types(gradient.dtype, torch.float32)
        total = gradient.to(wide, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=ctx.group)
        return total, None


def with_summed_gradient(parameter: Tensor, group: dist.ProcessGroup) -> Tensor:
    """A view of a replicated parameter; the gradient of the view is summed over the
    ranks of ``group``.

    While gradients are off, the result is the parameter itself.
    """
    if not torch.is_grad_enabled():
        return parameter
    return _SumGradient.apply(parameter, group)


@contextmanager
def gradients_summed(
    module: nn.Module, group: dist.ProcessGroup | None
) -> Iterator[None]:
    """In this context the parameters of ``module`` are results of
    :func:`with_summed_gradient`, so their gradients are summed over ``group``."""
    if group is None or not torch.is_grad_enabled():
        yield
        return
    # the dictionary of each parameter, its name there, and the parameter
    entries: list[tuple[dict, str, nn.Parameter]] = [
        (part._parameters, name, parameter)
        for part in module.modules()
        for name, parameter in part._parameters.items()
        if parameter is not None and parameter.requires_grad
    ]
    summed = {
        parameter: with_summed_gradient(parameter, group) for _, _, parameter in entries
    }
    for parameters, name, parameter in entries:
        parameters[name] = summed[parameter]
    changed_names = []
    try:
        yield
    finally:
        for parameters, name, parameter in entries:
            if parameters.get(name) is summed[parameter]:
                parameters[name] = parameter
            else:
                changed_names.append(name)
    if changed_names:
        raise RuntimeError(
            f"{type(module).__name__}: {', '.join(changed_names)} changed during the "
            f"forward, so the gradient cannot be summed over {group.size()} "
            "tensor-parallel ranks. Under torch's fully_shard, shard the whole "
            "GatedDeltaNet (or the layer around it), not its norm."
        )

"""The layer's ``out_norm``: read by the fused mixer where it is a plain RMSNorm, called elsewhere.

Legend: H value heads, V value dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from .local_norm import TorchRMSNorm
from .module_hooks import has_hooks, only_waits_for_parameters, wait_for_parameters
from .ops.mixer import GatedNorm
from .tensor_parallel import gradients_summed, sum_gradient

if TYPE_CHECKING:
    from .layer import GatedDeltaNet

_PLAIN_FORWARDS = {cls: cls.forward for cls in (TorchRMSNorm, nn.RMSNorm)}


def _has_plain_forward(module: nn.Module) -> bool:
    """Exactly our class, torch's or Transformer Engine's, with the forward it came with."""
    cls = type(module)
    if "forward" in vars(module):
        return False
    if cls in _PLAIN_FORWARDS:
        return cls.forward is _PLAIN_FORWARDS[cls]
    package = "transformer_engine"
    if cls.__name__ != "RMSNorm" or cls.__module__.split(".")[0] != package:
        return False
    return cls.forward.__module__.split(".")[0] == package


def is_plain_rms_norm(module: Any) -> bool:
    """Whether ``out_norm`` computes what the kernels compute, so that they may do it instead.

    Not so with any other class, subclasses and parametrised weights included, another ``forward``,
    or hooks (but those of :func:`wait_for_parameters`): such a module is called as it is.
    """
    return (
        _has_plain_forward(module)
        and getattr(module, "eps", None) is not None
        and module.weight is not None
        and module.weight.dim() == 1
        and only_waits_for_parameters(module)
    )


def summing_group(layer: GatedDeltaNet) -> dist.ProcessGroup | None:
    """The group over which our backward sums the gradients of ``out_norm``; None where none does.

    Every tensor-parallel rank sees its own heads only, so the gradient is the sum over the ranks.
    With sequence parallelism Megatron takes it, once a step with those of all its norms, from the
    mark ``sequence_parallel``; without, it expects the gradient of a replicated parameter whole.
    (megatron-core 0.19's own layer does not sum there, and its norm weights drift apart.)
    """
    return None if layer.tp_size == 1 or layer.config.sequence_parallel else layer.tp_group


def plain_norm(module: nn.Module, group: dist.ProcessGroup | None) -> GatedNorm | None:
    """:func:`read_norm` where :func:`is_plain_rms_norm`, else None."""
    if has_hooks(module):
        return read_norm(module, group) if is_plain_rms_norm(module) else None
    weight, eps = getattr(module, "weight", None), getattr(module, "eps", None)
    if weight is None or eps is None or weight.dim() != 1 or not _has_plain_forward(module):
        return None
    gamma = weight if group is None else sum_gradient(weight, group)
    return GatedNorm(gamma, eps, bool(getattr(module, "zero_centered_gamma", False)))


def read_norm(module: Any, group: dist.ProcessGroup | None) -> GatedNorm:
    """The parameters of a plain norm.

    Args:
        group: sums the weight's gradient, see :func:`sum_gradient`.
    """
    wait_for_parameters(module)
    gamma = sum_gradient(module.weight, group)
    return GatedNorm(gamma, module.eps, bool(getattr(module, "zero_centered_gamma", False)))


def apply_gated_norm(
    norm: nn.Module, x: Tensor, gate: Tensor, group: dist.ProcessGroup | None = None
) -> Tensor:
    """``norm(x) * SiLU(gate)`` in ``x.dtype``, the product taken in fp32 (fp64 for fp64).

    Args:
        x, gate: ``[..., H, V]``.
        group: sums the gradients of the norm's parameters, see :func:`sum_gradient`.
    """
    if group is not None:
        for module in norm.modules():  # their hooks know the parameters, not what stands for them
            wait_for_parameters(module)
    with gradients_summed(norm, group):
        normed = norm(x)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (normed * F.silu(gate.to(wide))).to(x.dtype)

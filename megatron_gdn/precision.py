"""Keeps the decay parameters in fp32, whatever happens to the module around them.

``A_log`` stands in an exponent and the recurrence compounds the decay over the sequence: rounding
it to bf16 changes the decay rate by up to 0.8%. Megatron's ``Float16Module`` (and ``.bfloat16()``,
``.half()``, ``.to(dtype)``) casts every floating-point parameter, so the module itself has to
decline.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from .compat.mixed_dtype_optimizers import repair_mixed_dtype_optimizers


def mark_keep_in_fp32(parameter: nn.Parameter) -> None:
    """Set the mark that newer Megatron (``Float16Module``) and optimizer overrides look for.

    From the first mark on, Megatron's optimizers save and load such parameters beside 16-bit ones,
    see :mod:`megatron_gdn.compat.mixed_dtype_optimizers`.
    """
    assert parameter.dtype == torch.float32, parameter.dtype
    parameter.keep_in_fp32 = True
    repair_mixed_dtype_optimizers()


class Fp32Parameters:
    """Mixin for modules: the parameters named below follow moves but not casts.

    ``_keep_in_float32_parameter_names`` is also the attribute by which Megatron-Bridge knows them.
    All parameters of the module keep the attributes that Megatron sets on them, also where torch
    makes new ones (``to_empty`` from the meta device) or swaps their contents.
    """

    _keep_in_float32_parameter_names: ClassVar[tuple[str, ...]] = ()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Let ``.to()``, ``.bfloat16()``, ``.to_empty()`` and their kin change the device only."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        marks = {name: dict(parameter.__dict__) for name, parameter in parameters.items()}
        names = self._keep_in_float32_parameter_names
        kept = [parameters[name] for name in names if name in parameters]
        protected = [*kept, *(p.grad for p in kept if p.grad is not None)]

        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype != tensor.dtype and any(tensor is p for p in protected):
                return tensor.to(moved.device)
            return moved

        result = super()._apply(apply, recurse)
        for name, parameter in self.named_parameters(remove_duplicate=False):
            parameter.__dict__.update(marks[name] | parameter.__dict__)
        return result

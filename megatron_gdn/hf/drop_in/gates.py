"""``A_log`` and ``dt_bias`` of a transformers module, kept in fp32 by a child module.

The child, the *holder* ``_fp32_params``, has parameters of one dtype, so sharded data parallelism
can make it a group of its own. State dicts do not show it: keys stay ``linear_attn.A_log``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...precision import Fp32Parameters, require_wide_gates
from ..fp32_contract import FP32_GDN_PARAM_NAMES, HOLDER_NAME


class Fp32Gates(Fp32Parameters, nn.Module):
    """Holds ``A_log`` and ``dt_bias`` ``[H]``, which follow moves but not casts."""

    _keep_in_float32_parameter_names = FP32_GDN_PARAM_NAMES

    def forward(self) -> tuple[Tensor, Tensor]:
        """Copies of ``A_log`` and ``dt_bias``.

        Copies, because torch's ``fully_shard`` frees the gathered parameters when this call ends,
        and the mixer reads them after that.

        Raises:
            ValueError: either is narrower than fp32.
        """
        require_wide_gates(self)
        return self.A_log.clone(), self.dt_bias.clone()

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, _bare(prefix), keep_vars)


class HeldParameter:
    """Reads a parameter of the holder as if it were the module's own.

    Without a holder it is not there, so that torch finds the module's own parameter, as while the
    module is being built. An entry of the instance's ``__dict__`` goes before it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        holder = module.__dict__.get("_modules", {}).get(HOLDER_NAME)
        if holder is None:
            raise AttributeError(f"{type(module).__name__} has no {self.name!r} yet")
        return getattr(holder, self.name)


def hold_gates(module: nn.Module) -> dict[str, torch.dtype]:
    """Move the bare parameters of ``module`` into a holder, in fp32; they stay the same objects.

    Returns:
        the dtypes that they had.

    Raises:
        KeyError: ``module`` has no bare ``A_log`` and ``dt_bias``.
    """
    bare = {name: module._parameters.pop(name) for name in FP32_GDN_PARAM_NAMES}
    dtypes = {name: parameter.dtype for name, parameter in bare.items()}
    holder = Fp32Gates()
    for name, parameter in bare.items():
        if parameter.dtype not in (torch.float32, torch.float64):
            parameter.data = parameter.data.float()
            if parameter.grad is not None:
                parameter.grad = parameter.grad.float()
        holder.register_parameter(name, parameter)
    module.add_module(HOLDER_NAME, holder)
    return dtypes


def release_gates(module: nn.Module, dtypes: dict[str, torch.dtype]) -> None:
    """Undo :func:`hold_gates`: the parameters are the module's own again, in ``dtypes``."""
    holder = module._modules.pop(HOLDER_NAME)
    for name, dtype in dtypes.items():
        parameter = holder._parameters[name]
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(dtype)
        module._parameters[name] = parameter


def route_to_holder(state_dict: dict[str, Any], prefix: str) -> None:
    """Give the bare keys of the module at ``prefix`` the names that loading looks for."""
    for name in FP32_GDN_PARAM_NAMES:
        if f"{prefix}{name}" in state_dict:
            state_dict[f"{prefix}{HOLDER_NAME}.{name}"] = state_dict.pop(f"{prefix}{name}")


def _bare(prefix: str) -> str:
    return prefix.removesuffix(f"{HOLDER_NAME}.")

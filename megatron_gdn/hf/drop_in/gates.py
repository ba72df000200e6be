"""``A_log`` and ``dt_bias`` of a transformers module, kept in fp32 by a child module.

The child is the *holder* ``_fp32_params``, which sharded data parallelism can shard as a group of
its own. Keys of state dicts leave out the holder, as in ``linear_attn.A_log``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from ...mixers.precision import Fp32Parameters
from ...ops.front.gates import decay_and_write_gates
from ..state_dict_adapter import FP32_GDN_PARAM_NAMES, HOLDER_NAME
from .families import family_of


class SSMGate(Fp32Parameters, nn.Module):
    """Holds ``A_log`` and ``dt_bias``; casts of the outer module do not change their dtype.

    ``A_log`` and ``dt_bias`` are ``[num_v_heads]`` in a Gated DeltaNet, whose gate
    :meth:`forward` computes:

        g = -exp(A_log) * softplus(a + dt_bias)

    g is clamped at -104 (-746 in fp64), below which exp(g) is 0 anyway. The initial values are
    0 for ``A_log`` and 1 for ``dt_bias``. Another ``dtype`` than fp32 or fp64 raises a ValueError.
    """

    _keep_in_float32_parameter_names = FP32_GDN_PARAM_NAMES

    def __init__(self, num_v_heads: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"gates of dtype {dtype} are refused: the recurrence compounds rounding errors. "
                f"Use torch.float32 or float64; casts of the outer module keep this dtype."
            )
        self.A_log = nn.Parameter(torch.zeros(num_v_heads, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.ones(num_v_heads, dtype=dtype))

    def forward(self, a: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The gate g for ``a``; g and a are ``[..., num_v_heads]``, g in the parameters' dtype.

        Without ``a``, returns copies of ``A_log`` and ``dt_bias``, because torch's ``fully_shard``
        frees the gathered parameters after the call. A ValueError is raised if a parameter was
        rounded, or if ``a`` is given in a Kimi Delta Attention.
        """
        self.require_fp32_parameters()
        if a is None:
            return self.A_log.clone(), self.dt_bias.clone()
        if self.A_log.shape != self.dt_bias.shape:
            raise ValueError(
                "this SSMGate holds the gate of a Kimi Delta Attention, with a decay for each "
                "channel; call it without a tensor and compute the gate from A_log and dt_bias."
            )
        return decay_and_write_gates(a, a, self.A_log, self.dt_bias)[0]

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """Save as torch does, under keys without the holder's name."""
        bare = prefix.removesuffix(f"{HOLDER_NAME}.")
        super()._save_to_state_dict(destination, bare, keep_vars)


class HoldsGates:
    """Mixin of a module whose ``A_log`` and ``dt_bias`` are in a child module, the holder."""

    _modules: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        """Look gate parameters up in the holder, unless the instance's ``__dict__`` has them."""
        holder = self.__dict__.get("_modules", {}).get(HOLDER_NAME)
        if holder is not None and name in FP32_GDN_PARAM_NAMES:
            return getattr(holder, name)
        return super().__getattr__(name)  # pyright: ignore

    @property
    def _gates(self) -> SSMGate:
        """The submodule that holds ``A_log`` and ``dt_bias``."""
        return self._modules[HOLDER_NAME]

    def _load_from_state_dict(self, state_dict: dict, prefix: str, *args: Any) -> None:
        """Load the gate parameters from keys without the holder's name."""
        if HOLDER_NAME in self._modules:
            for name in FP32_GDN_PARAM_NAMES:
                if prefix + name in state_dict:
                    state_dict[f"{prefix}{HOLDER_NAME}.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *args)  # pyright: ignore


def gate_owner(module: Any) -> Any:
    """The module that has ``A_log`` and ``dt_bias``: ``module`` or its forget gate."""
    name = family_of(module).gate
    return module._modules[name] if name else module


def install_ssm_gate(module: Any, fp32_dtype: torch.dtype = torch.float32) -> SSMGate:
    """Move ``A_log`` and ``dt_bias`` of ``module`` into a new holder; return the holder.

    The parameters stay the same objects. 16-bit parameters become ``fp32_dtype``; fp64 parameters
    stay fp64. Missing parameters raise a KeyError, a 16-bit ``fp32_dtype`` raises a ValueError.
    """
    holder = SSMGate(len(module._parameters["A_log"]), fp32_dtype)
    for name in FP32_GDN_PARAM_NAMES:
        parameter = module._parameters.pop(name)
        _cast(parameter, torch.promote_types(parameter.dtype, fp32_dtype))
        holder.register_parameter(name, parameter)
    module.add_module(HOLDER_NAME, holder)
    return holder


def release_gates(owner: Any, dtypes: dict[str, torch.dtype]) -> None:
    """Undo :func:`install_ssm_gate` on ``owner``; cast the parameters back to ``dtypes``."""
    holder = owner._modules.pop(HOLDER_NAME)
    for name, dtype in dtypes.items():
        _cast(holder._parameters[name], dtype)
        owner._parameters[name] = holder._parameters[name]
    if type(owner).__bases__[0] is HoldsGates:
        owner.__class__ = type(owner).__bases__[1]


def _cast(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Cast the values and the gradient of ``parameter`` in place."""
    if parameter.dtype != dtype:
        parameter.data = parameter.data.to(dtype)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(dtype)


def shard_gates(model: nn.Module, **options: Any) -> None:
    """Give the fp32 gates of every replaced module a ``fully_shard`` group of its own.

    Call this function before ``fully_shard`` of the layers, which refuses mixed dtypes:

        shard_gates(model, mesh=mesh)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    Args:
        model: a patched model.
        options: keywords of ``fully_shard``, but no ``mp_policy``, which would round the gates.

    Raises:
        ValueError: the model has no replaced modules.
    """
    from torch.distributed.fsdp import fully_shard

    holders = [module for module in model.modules() if isinstance(module, SSMGate)]
    if not holders:
        raise ValueError(
            f"{type(model).__name__} has no fp32 gates to shard; patch it first: "
            f"megatron_gdn.hf.patch(model)."
        )
    for holder in holders:
        fully_shard(holder, **options)


@contextmanager
def gates_in_fp32() -> Iterator[None]:
    """In this context transformers' ``from_pretrained`` does not round ``A_log`` and ``dt_bias``.

    For example::

        with megatron_gdn.hf.gates_in_fp32():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        megatron_gdn.hf.patch(model)
    """
    from transformers import PreTrainedModel

    post_init = PreTrainedModel.post_init

    @wraps(post_init)
    def post_init_with_gates(model: Any) -> None:
        """Build the model; add the gates to those names of its class that stay fp32."""
        post_init(model)
        names = model._keep_in_fp32_modules_strict or ()
        model._keep_in_fp32_modules_strict = {*names, *FP32_GDN_PARAM_NAMES}

    PreTrainedModel.post_init = post_init_with_gates
    try:
        yield
    finally:
        PreTrainedModel.post_init = post_init

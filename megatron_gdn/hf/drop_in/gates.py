"""``A_log`` and ``dt_bias`` of a transformers module, kept in fp32.

A replaced module keeps both parameters, under transformers' names and in transformers'
order. Its child module ``_fp32_params``, the *holder*, shows the same two parameters,
so that sharded data parallelism can shard them as a group of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ...mixers.precision import Fp32Parameters
from ...ops.front.gates import decay_and_write_gates
from ..state_dict_adapter import FP32_GDN_PARAM_NAMES, HOLDER_NAME
from .families import LinearAttention, family_of, subclass

if TYPE_CHECKING:
    from ...compat.state_dict import StateDict


class SSMGate(Fp32Parameters, nn.Module):
    """Holds ``A_log`` and ``dt_bias``; casts of the outer module do not change their
    dtype.

    ``A_log`` and ``dt_bias`` are ``[num_v_heads]`` in a Gated DeltaNet, whose gate
    :meth:`forward` computes:

        g = -exp(A_log) * softplus(a + dt_bias)

    g is clamped at -104 (-746 in fp64), below which exp(g) is 0 anyway. The initial
    values are 0 for ``A_log`` and 1 for ``dt_bias``. Another ``dtype`` than fp32 or
    fp64 raises a ValueError.
    """

    _keep_in_float32_parameter_names = FP32_GDN_PARAM_NAMES

    def __init__(self, num_v_heads: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"gates of dtype {dtype} are refused: the recurrence compounds "
                "rounding errors. Use torch.float32 or float64; casts of the outer "
                "module keep this dtype."
            )
        self.A_log = nn.Parameter(torch.zeros(num_v_heads, dtype=dtype))
        self.dt_bias = nn.Parameter(torch.ones(num_v_heads, dtype=dtype))

    def forward(self, a: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The gate g for ``a``; g and a are ``[..., num_v_heads]``, g in the
        parameters' dtype.

        Without ``a``, returns copies of ``A_log`` and ``dt_bias``, because torch's
        ``fully_shard`` frees the gathered parameters after the call. A ValueError is
        raised if a parameter was rounded, or if ``a`` is given in a Kimi Delta
        Attention.
        """
        self.require_fp32_parameters()
        if a is None:
            return self.A_log.clone(), self.dt_bias.clone()
        if self.A_log.shape != self.dt_bias.shape:
            raise ValueError(
                "this SSMGate holds the gate of a Kimi Delta Attention, with a decay "
                "for each channel; call it without a tensor and compute the gate from "
                "A_log and dt_bias."
            )
        return decay_and_write_gates(a, a, self.A_log, self.dt_bias)[0]

    def _save_to_state_dict(
        self, destination: StateDict, prefix: str, keep_vars: bool
    ) -> None:
        """Save as torch does, under keys without the holder's name."""
        bare = prefix.removesuffix(f"{HOLDER_NAME}.")
        super()._save_to_state_dict(destination, bare, keep_vars)


class OwnersGate(SSMGate):
    """The holder of a replaced module: an :class:`SSMGate` with the parameters of its
    *owner*.

    The owner's ``_parameters`` has the two parameters and this module's has none. So a
    model that contains both lists, saves, loads and casts each parameter once, as a
    parameter of the owner.
    """

    _owner: HoldsGates

    def __init__(self, owner: HoldsGates) -> None:
        nn.Module.__init__(self)
        # not as a submodule: the owner already contains this module
        vars(self)["_owner"] = owner

    def __getattr__(self, name: str) -> Any:
        if name in FP32_GDN_PARAM_NAMES:
            return self._owner._parameters[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the owner's parameter; sharded data parallelism does so for each
        forward."""
        if name in FP32_GDN_PARAM_NAMES:
            self._owner._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The owner's two parameters, for callers that ask this module itself."""
        for name in FP32_GDN_PARAM_NAMES:
            yield f"{prefix}.{name}" if prefix else name, getattr(self, name)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> OwnersGate:
        """Apply ``fn`` to the owner's two parameters."""
        Fp32Parameters._apply(self._owner, fn, recurse=False)
        return self

    def _save_to_state_dict(self, *args: object, **keywords: object) -> None: ...

    def _load_from_state_dict(self, *args: object, **keywords: object) -> None: ...


class HoldsGates(Fp32Parameters):
    """Mixin of a module with ``A_log`` and ``dt_bias``, the owner of a holder."""

    _modules: dict[str, Any]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse pickle, which finds a class by its name; the patch made this one."""
        raise NotImplementedError(
            f"{type(self).__name__} is patched by megatron_gdn.hf.patch, and a patched "
            "model is not pickled. Save model.state_dict() or call save_pretrained; or "
            "undo the patch, save the model, and patch it again after loading."
        )

    def __copy__(self) -> Self:
        copied: Any = object.__new__(type(self))
        copied.__setstate__(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        copied: Any = object.__new__(type(self))
        memo[id(self)] = copied  # children may refer to this module
        copied.__setstate__(deepcopy(vars(self), memo))
        return copied

    @property
    def _gates(self) -> OwnersGate:
        """The child module that shows ``A_log`` and ``dt_bias``."""
        return self._modules[HOLDER_NAME]

    @property
    def _gates_are_sharded(self) -> bool:
        """Whether torch's ``fully_shard`` has made the holder a group of its own."""
        return isinstance(self._modules.get(HOLDER_NAME), FSDPModule)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """As torch does, but without the holder, unless it is a group of its own.

        Code that walks through the children would handle the two parameters twice.
        """
        for name, child in super().named_children():
            if name != HOLDER_NAME or self._gates_are_sharded:
                yield name, child

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As torch does; what this module has without its children excludes sharded
        gates.

        ``fully_shard`` of an outer module would shard these a second time.
        """
        own_only = self._gates_are_sharded and not recurse
        for name, parameter in super().named_parameters(
            prefix, recurse, remove_duplicate
        ):
            if not own_only or name.rpartition(".")[2] not in FP32_GDN_PARAM_NAMES:
                yield name, parameter

    def _fqn_modifiers(self) -> dict[str, str]:
        """Tells torch's distributed checkpoints that parameter names leave out the
        holder."""
        if self._gates_are_sharded:
            return dict.fromkeys(FP32_GDN_PARAM_NAMES, HOLDER_NAME)
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` as torch does; casts keep ``A_log`` and ``dt_bias`` fp32 or
        wider."""
        super()._apply(fn, recurse)
        if self._gates_are_sharded:
            # `fully_shard` reads the new addresses
            self._gates._apply(lambda tensor: tensor)
        return self

    def _save_to_state_dict(self, *args: object, **keywords: object) -> None:
        """Save as torch does; sharded gates are saved as shards."""
        self._reshard_gates()
        super()._save_to_state_dict(*args, **keywords)

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, *args: Any, **keywords: Any
    ) -> None:
        """Load as torch does; keys of the gate parameters may name the holder."""
        self._reshard_gates()
        for name in FP32_GDN_PARAM_NAMES:
            in_holder = f"{prefix}{HOLDER_NAME}.{name}"
            if in_holder in state_dict:
                state_dict[prefix + name] = state_dict.pop(in_holder)
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)

    def _reshard_gates(self) -> None:
        """Free the gathered ``A_log`` and ``dt_bias``, if they are sharded and
        gathered."""
        if self._gates_are_sharded:
            cast(FSDPModule, self._gates).reshard()


def gate_owner(module: LinearAttention) -> LinearAttention:
    """The module that has ``A_log`` and ``dt_bias``: ``module`` or its forget gate."""
    name = family_of(module).gate
    if name:
        return module._modules[name]
    return module


def install_ssm_gate(
    module: LinearAttention, fp32_dtype: torch.dtype = torch.float32
) -> SSMGate:
    """Move ``A_log`` and ``dt_bias`` of ``module`` into a new holder; return the
    holder.

    The parameters stay the same objects. 16-bit parameters become ``fp32_dtype``; fp64
    parameters stay fp64. Missing parameters raise a KeyError, a 16-bit ``fp32_dtype``
    raises a ValueError.
    """
    holder = SSMGate(len(module._parameters["A_log"]), fp32_dtype)
    for name in FP32_GDN_PARAM_NAMES:
        parameter = module._parameters.pop(name)
        _cast(parameter, torch.promote_types(parameter.dtype, fp32_dtype))
        holder.register_parameter(name, parameter)
    module.add_module(HOLDER_NAME, holder)
    return holder


def hold_gates(owner: LinearAttention) -> None:
    """Make ``owner`` an owner of a holder in place; 16-bit gate parameters become
    fp32."""
    if not isinstance(owner, HoldsGates):
        owner.__class__ = subclass("Holding", HoldsGates, type(owner))
    parameters: StateDict = owner._parameters
    for name in FP32_GDN_PARAM_NAMES:
        parameter = parameters[name]
        _cast(parameter, torch.promote_types(parameter.dtype, torch.float32))
    owner.add_module(HOLDER_NAME, OwnersGate(owner))
    owner._keep_in_float32_parameter_names = FP32_GDN_PARAM_NAMES


def release_gates(owner: LinearAttention, dtypes: dict[str, torch.dtype]) -> None:
    """Undo :func:`hold_gates` on ``owner``; cast the parameters back to ``dtypes``."""
    del owner._modules[HOLDER_NAME]
    del owner._keep_in_float32_parameter_names
    for name, dtype in dtypes.items():
        _cast(owner._parameters[name], dtype)
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
        options: keywords of ``fully_shard``, but no ``mp_policy``, which would round
            the gates.

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
    """In this context transformers' ``from_pretrained`` does not round ``A_log`` and
    ``dt_bias``.

    For example::

        with megatron_gdn.hf.gates_in_fp32():
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
        megatron_gdn.hf.patch(model)
    """
    from transformers import PreTrainedModel

    post_init = PreTrainedModel.post_init

    @wraps(post_init)
    def post_init_with_gates(self: Any) -> None:
        """Build the model; add the gates to those names of its class that stay fp32."""
        post_init(self)
        names = self._keep_in_fp32_modules_strict or ()
        self._keep_in_fp32_modules_strict = set(names).union(FP32_GDN_PARAM_NAMES)

    PreTrainedModel.post_init = post_init_with_gates
    try:
        yield
    finally:
        PreTrainedModel.post_init = post_init

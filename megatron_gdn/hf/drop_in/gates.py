"""``A_log`` and ``dt_bias`` of a transformers module, kept in fp32.

The *owner* of the two parameters is the linear-attention module or its forget gate. A
patched owner keeps both, under transformers' names and in transformers' order. Its
child module ``_fp32_params``, the *holder*, is an :class:`SSMGate` that gives access to
the same two parameters. torch's ``fully_shard`` of the holder shards the two as a group
of their own.
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
from .families import LinearAttention, class_with_mixin, family_of

if TYPE_CHECKING:
    from ...compat.state_dict import StateDict


class SSMGate(Fp32Parameters, nn.Module):
    """Holds ``A_log`` and ``dt_bias``, whose dtype stays when an outer module is cast.

    The holder of a patched owner is a :class:`GateHolder`, a subclass. The holder that
    :func:`install_ssm_gate` makes is an SSMGate itself.

    ``A_log`` and ``dt_bias`` are ``[num_v_heads]`` in a Gated DeltaNet, whose gate
    :meth:`forward` computes:

        g = -exp(A_log) * softplus(a + dt_bias)

    g is clamped at -104 (-746 in fp64); for every lower g, exp(g) is 0. The initial
    values are 0 for ``A_log`` and 1 for ``dt_bias``. A ``dtype`` other than fp32 or fp64
    raises a ValueError.
    """

    # read by Fp32Parameters: the parameters that keep their dtype
    _keep_in_float32_parameter_names = FP32_GDN_PARAM_NAMES

    def __init__(self, num_v_heads: int, dtype: torch.dtype = torch.float32) -> None:
        """Make the two parameters, ``[num_v_heads]`` of ``dtype``, with the initial
        values that the class names."""
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
        """The log-decay g ``[..., num_v_heads]`` for ``a`` of the same shape, in the
        parameters' dtype.

        Without ``a``, the pair ``A_log``, ``dt_bias``. They are copies, because torch's
        ``fully_shard`` frees the gathered parameters after the call. The forwards of
        patched modules call without ``a``. Their method ``_compute_gate`` gives ``a``,
        and so do modules that :func:`install_ssm_gate` has changed.

        A ValueError is raised if a parameter was rounded, or if ``a`` is given in a
        Kimi Delta Attention.
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
        # the second ``a`` stands for b, whose write strength is not used
        return decay_and_write_gates(a, a, self.A_log, self.dt_bias)[0]

    def _save_to_state_dict(
        self, destination: StateDict, prefix: str, keep_vars: bool
    ) -> None:
        """Save as torch does, but under keys without the holder's name
        ``_fp32_params``, which files do not have. ``destination`` is filled in place."""
        bare = prefix.removesuffix(f"{HOLDER_NAME}.")
        super()._save_to_state_dict(destination, bare, keep_vars)


class GateHolder(SSMGate):
    """The holder of a patched owner: an :class:`SSMGate` without parameters of its own,
    which reads and sets those of the owner.

    A model contains owner and holder, and must list, save, load and cast each parameter
    once. So the parameters are in the owner's ``_parameters`` alone.
    """

    _owner: GateOwner

    def __init__(self, owner: GateOwner) -> None:
        """``owner``: the module that has the two parameters."""
        nn.Module.__init__(self)  # SSMGate's would make new parameters
        # not as a submodule: the owner already contains this module
        vars(self)["_owner"] = owner

    def __getattr__(self, name: str) -> Any:
        """The owner's ``A_log`` or ``dt_bias``; other names as torch does."""
        if name in FP32_GDN_PARAM_NAMES:
            return self._owner._parameters[name]
        return super().__getattr__(name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set the owner's ``A_log`` or ``dt_bias``; torch's ``fully_shard`` sets both in
        each forward. Other names as torch does."""
        if name in FP32_GDN_PARAM_NAMES:
            self._owner._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """The owner's two parameters, for callers such as ``fully_shard`` that call this
        method of the holder. ``named_parameters`` of a model does not call it, so a
        model lists the two once."""
        for name in FP32_GDN_PARAM_NAMES:
            yield f"{prefix}.{name}" if prefix else name, getattr(self, name)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> GateHolder:
        """Apply ``fn`` to the owner's own parameters, among them ``A_log`` and
        ``dt_bias``; ``recurse`` is not read."""
        Fp32Parameters._apply(self._owner, fn, recurse=False)
        return self

    def _save_to_state_dict(self, *args: object, **keywords: object) -> None:
        """Save nothing: the owner saves its parameters."""

    def _load_from_state_dict(self, *args: object, **keywords: object) -> None:
        """Load nothing: the owner loads its parameters."""


class GateOwner(Fp32Parameters):
    """Mixin for owners: modules with ``A_log``, ``dt_bias`` and a holder as a child."""

    _modules: dict[str, Any]

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse to be pickled: pickle finds a class by its name in a module, and the
        patch made this class at run time."""
        raise NotImplementedError(
            f"{type(self).__name__} is patched by megatron_gdn.hf.patch, and a patched "
            "model is not pickled. Save model.state_dict() or call save_pretrained; or "
            "undo the patch, save the model, and patch it again after loading."
        )

    def __copy__(self) -> Self:
        """A shallow copy; ``copy.copy`` would call ``__reduce_ex__``, which raises."""
        copied: Any = object.__new__(type(self))
        copied.__setstate__(vars(self))
        return copied

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        """A deep copy; ``copy.deepcopy`` would call ``__reduce_ex__``, which raises.

        ``memo``: id of an object -> its copy, as `copy` passes it.
        """
        copied: Any = object.__new__(type(self))
        memo[id(self)] = copied  # children may refer to this module
        copied.__setstate__(deepcopy(vars(self), memo))
        return copied

    @property
    def _gate_holder(self) -> GateHolder:
        """The holder of ``A_log`` and ``dt_bias``."""
        return self._modules[HOLDER_NAME]

    @property
    def _gates_are_sharded(self) -> bool:
        """Whether torch's ``fully_shard`` has made the holder a group of its own."""
        return isinstance(self._modules.get(HOLDER_NAME), FSDPModule)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """The children; the holder is among them only if it is sharded by itself.

        Otherwise code that visits the module's own parameters and each child's would
        see the two parameters twice.
        """
        for name, child in super().named_children():
            if name != HOLDER_NAME or self._gates_are_sharded:
                yield name, child

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """torch's ``named_parameters``, but without sharded gates if ``recurse`` is
        False.

        ``fully_shard`` of an outer module calls this method with ``recurse=False``, and
        shards all parameters that it gets. It would shard the gates a second time.
        """
        leave_out_gates = self._gates_are_sharded and not recurse
        for name, parameter in super().named_parameters(
            prefix, recurse, remove_duplicate
        ):
            is_gate = name.rpartition(".")[2] in FP32_GDN_PARAM_NAMES
            if not (is_gate and leave_out_gates):
                yield name, parameter

    def _fqn_modifiers(self) -> dict[str, str]:
        """For torch's distributed checkpoints: name of a gate parameter -> the holder's
        name. A sharded gate's full name has the holder's name, its key in a state dict
        does not."""
        if self._gates_are_sharded:
            return dict.fromkeys(FP32_GDN_PARAM_NAMES, HOLDER_NAME)
        return {}

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Apply ``fn`` to all parameters, as torch does; a cast leaves ``A_log`` and
        ``dt_bias`` in fp32 or fp64."""
        super()._apply(fn, recurse)
        if self._gates_are_sharded:
            # `fully_shard` gave the holder an `_apply` that reads the parameters' new
            # addresses. The function that it applies here changes nothing.
            self._gate_holder._apply(lambda tensor: tensor)
        return self

    def _save_to_state_dict(self, *args: object, **keywords: object) -> None:
        """Save as torch does; sharded gates are saved as shards."""
        self._reshard_gates()
        super()._save_to_state_dict(*args, **keywords)

    def _load_from_state_dict(
        self, state_dict: StateDict, prefix: str, *args: Any, **keywords: Any
    ) -> None:
        """Load as torch does; keys of the gate parameters may contain the holder's
        name. Sharded gates are loaded as shards."""
        self._reshard_gates()
        for name in FP32_GDN_PARAM_NAMES:
            in_holder = f"{prefix}{HOLDER_NAME}.{name}"
            if in_holder in state_dict:
                state_dict[prefix + name] = state_dict.pop(in_holder)
        super()._load_from_state_dict(state_dict, prefix, *args, **keywords)

    def _reshard_gates(self) -> None:
        """Free the gathered copies of ``A_log`` and ``dt_bias``, if the two are
        sharded."""
        if self._gates_are_sharded:
            cast(FSDPModule, self._gate_holder).reshard()


def gate_owner(module: LinearAttention) -> LinearAttention:
    """The module that has ``A_log`` and ``dt_bias``: the linear attention ``module`` or
    its forget gate."""
    name = family_of(module).gate_owner
    if name:
        return module._modules[name]
    return module


def install_ssm_gate(
    module: LinearAttention, fp32_dtype: torch.dtype = torch.float32
) -> SSMGate:
    """Move ``A_log`` and ``dt_bias`` of ``module`` into a new holder; return the
    holder. `patch` does not call this function. The function is for modules of classes
    that `patch` does not support.

    The parameters stay the same objects. 16-bit parameters become ``fp32_dtype``; fp64
    parameters stay fp64. Missing parameters raise a KeyError, a 16-bit ``fp32_dtype``
    raises a ValueError.
    """
    holder = SSMGate(len(module._parameters["A_log"]), fp32_dtype)
    for name in FP32_GDN_PARAM_NAMES:
        parameter = module._parameters.pop(name)
        _cast_in_place(parameter, torch.promote_types(parameter.dtype, fp32_dtype))
        holder.register_parameter(name, parameter)
    module.add_module(HOLDER_NAME, holder)
    return holder


def add_gate_holder(owner: LinearAttention) -> None:
    """Give ``owner`` the class :class:`GateOwner` and a holder, in place; 16-bit gate
    parameters become fp32."""
    if not isinstance(owner, GateOwner):
        owner.__class__ = class_with_mixin("Holding", GateOwner, type(owner))
    parameters: StateDict = owner._parameters
    for name in FP32_GDN_PARAM_NAMES:
        parameter = parameters[name]
        _cast_in_place(parameter, torch.promote_types(parameter.dtype, torch.float32))
    owner.add_module(HOLDER_NAME, GateHolder(owner))
    owner._keep_in_float32_parameter_names = FP32_GDN_PARAM_NAMES


def remove_gate_holder(owner: LinearAttention, dtypes: dict[str, torch.dtype]) -> None:
    """Undo :func:`add_gate_holder` on ``owner``; cast the parameters back to ``dtypes``."""
    del owner._modules[HOLDER_NAME]
    del owner._keep_in_float32_parameter_names
    for name, dtype in dtypes.items():
        _cast_in_place(owner._parameters[name], dtype)
    # add_gate_holder gave ``owner`` a class with the bases (GateOwner, its own class).
    # It left a CPAwareGatedDeltaNet, which is a GateOwner itself, as it was: the class
    # of that instance has CPAwareGatedDeltaNet as its first base.
    if type(owner).__bases__[0] is GateOwner:
        owner.__class__ = type(owner).__bases__[1]


def _cast_in_place(parameter: nn.Parameter, dtype: torch.dtype) -> None:
    """Cast the values and the gradient of ``parameter`` to ``dtype``; the parameter
    stays the same object, so optimizers keep it."""
    if parameter.dtype != dtype:
        parameter.data = parameter.data.to(dtype)
        if parameter.grad is not None:
            parameter.grad = parameter.grad.to(dtype)


def shard_gates(model: nn.Module, **options: Any) -> None:
    """Call ``fully_shard`` for the fp32 gates of each linear attention of a patched
    model.

    Call this function before ``fully_shard`` of the layers, which refuses a group of
    parameters with mixed dtypes:

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
        """Run ``post_init``; add the gates to the parameters that ``from_pretrained``
        keeps in fp32."""
        post_init(self)
        names = self._keep_in_fp32_modules_strict or ()
        self._keep_in_fp32_modules_strict = set(names).union(FP32_GDN_PARAM_NAMES)

    PreTrainedModel.post_init = post_init_with_gates
    try:
        yield
    finally:
        PreTrainedModel.post_init = post_init

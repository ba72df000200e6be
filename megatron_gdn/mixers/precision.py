"""Keeps the decay parameters in fp32 when the module around them is cast or sharded.

In bf16 ``A_log``, which is in an exponent, changes the decay rate by up to 0.8%. Megatron's
``Float16Module`` casts every parameter; torch's ``fully_shard`` (FSDP2) gathers a group in one
dtype, so the fp32 parameters form a group of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from ..compat.mixed_dtype_optimizers import repair_mixed_dtype_optimizers
from .loader_layout import launch_arguments

logger = logging.getLogger(__name__)

# The last warned load, known by the list of missing keys that torch passes to all its modules.
_missing_keys_of_warned_load: list[str] | None = None


def mark_keep_in_fp32(parameter: nn.Parameter) -> None:
    """Set the mark by which newer Megatrons and optimizer overrides know an fp32 parameter."""
    assert parameter.dtype == torch.float32, parameter.dtype
    vars(parameter)["keep_in_fp32"] = True
    repair_mixed_dtype_optimizers()


class Fp32Parameters(nn.Module):
    """Mixin for modules: the parameters named below are never narrower than fp32.

    Megatron-Bridge also reads ``_keep_in_float32_parameter_names``.
    """

    _keep_in_float32_parameter_names: ClassVar[tuple[str, ...]] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register a parameter, or the tensor that a wrapper puts in its place."""
        if name in self._keep_in_float32_parameter_names:
            require_gathered_alone(name, param)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Let ``.to()``, ``.bfloat16()`` and the like change the device, and the dtype to fp64."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        names = self._keep_in_float32_parameter_names
        kept = [parameters[name] for name in names if name in parameters]
        protected = [*kept, *(p.grad for p in kept if p.grad is not None)]

        def apply(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            if moved.dtype != tensor.dtype and any(tensor is p for p in protected):
                return tensor.to(moved.device, torch.promote_types(moved.dtype, torch.float32))
            return moved

        return super()._apply(apply, recurse)

    def require_fp32_parameters(self) -> None:
        """Refuse these parameters if they were rounded, as by sharded data parallelism."""
        for name in self._keep_in_float32_parameter_names:
            dtype = getattr(self, name).dtype
            if dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{name} reached the layer in {dtype}, and must be torch.float32 (or float64): "
                    f"the recurrence compounds what it rounds. Under torch's "
                    f"fully_shard, give this layer a MixedPrecisionPolicy without param_dtype; "
                    f"elsewhere, do not replace the layer's parameters by rounded ones."
                )

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Load as torch does; warn of rounded values, once in a load."""
        _metadata, _strict, missing_keys, *_ = args
        names = self._keep_in_float32_parameter_names
        wide = {torch.float32, *(getattr(self, name).dtype for name in names)}
        given = {key: state_dict.get(key) for key in (f"{prefix}{name}" for name in names)}
        dtypes = {key: getattr(value, "dtype", torch.float32) for key, value in given.items()}
        rounded = [f"{key} ({str(d)[6:]})" for key, d in dtypes.items() if d not in wide]
        global _missing_keys_of_warned_load
        if rounded and missing_keys is not _missing_keys_of_warned_load:
            _missing_keys_of_warned_load = missing_keys
            logger.warning(
                "load_state_dict: %s: the layer keeps these in fp32, the state dict does not, so "
                "their values are rounded; those of the layers after it are not listed. Where the "
                "checkpoint's optimizer holds fp32 masters, "
                "megatron_gdn.fp32_masters.load_fp32_masters(model, folder) brings them back.",
                ", ".join(rounded),
            )
        super()._load_from_state_dict(state_dict, prefix, *args)


def require_gathered_alone(name: str, parameter: nn.Parameter | None) -> None:
    """Refuse Megatron-FSDP where gloo would gather ``parameter`` together with other dtypes.

    Megatron-FSDP gathers a layer's parameters in one collective, and gloo cuts its one buffer of
    one dtype by the outputs' bytes, without an error.
    """
    fsdp = getattr(parameter, "_megatron_fsdp_model", None)
    original = getattr(parameter, "orig_param", None)
    if fsdp is None or original is None:
        return
    buffer = fsdp.param_and_grad_buffer
    groups, own = buffer.parameter_groups, buffer.param_to_param_group[original]
    dtypes = {str(groups[i].dtype) for i in buffer.bucket_to_bucket_group[own]}
    backend = torch.distributed.get_backend(fsdp.dist_index.get_fsdp_group())
    if backend == "gloo" and len(dtypes) > 1:
        raise NotImplementedError(
            f"Megatron-FSDP would gather {name} ({original.dtype}) in one collective of "
            f"{' and '.join(sorted(dtypes))}, from which gloo returns wrong numbers. Use the nccl "
            f"backend, parameters of one dtype, DistributedDataParallel, or a "
            f"data_parallel_sharding_strategy other than 'optim_grads_params' (for "
            f"megatron_fsdp.fully_shard: zero_dp_strategy, and no fsdp_unit_modules)."
        )


NOT_BY_SECTION = (
    "Under torch's FSDP2 a rank holds a run of in_proj's rows, which --ckpt-format torch_dist "
    "cannot store section by section (nor does it load the optimizer's step there). Give "
    "--ckpt-format torch_dcp, or with tensor parallelism --use-distributed-optimizer in place of "
    "--use-torch-fsdp2."
)


class Fp32Group(nn.Module):
    """The fp32 parameters of a mixer as a module, which ``fully_shard`` takes; state dicts hide it.

    A parameter that is set in this module is set in the mixer too.
    """

    _mixer: Any

    def __init__(self, mixer: Fp32Parameters) -> None:
        super().__init__()
        vars(self)["_mixer"] = mixer  # not as a submodule: it is the parent
        for name in mixer._keep_in_float32_parameter_names:
            self._parameters[name] = mixer._parameters[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in vars(self).get("_parameters", ()):
            self._parameters[name] = self._mixer._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self) -> tuple[Tensor, ...]:
        """Copies of the parameters: torch frees the gathered ones when this call ends."""
        return tuple(p.clone() for p in self._parameters.values() if p is not None)

    def _save_to_state_dict(self, *args: Any) -> None: ...

    def _load_from_state_dict(self, *args: Any) -> None: ...


class ShardedApart(Fp32Parameters):
    """Mixin for mixers whose fp32 parameters may be gathered by themselves."""

    # Returns the whole parameters, once a forward; None if they are not sharded.
    gathered: Callable[[], tuple[Tensor, ...]] | None = None

    def fp32_parameters(self) -> tuple[Tensor, ...]:
        """The whole parameters for one forward; rounded ones are refused."""
        own = tuple([getattr(self, name) for name in self._keep_in_float32_parameter_names])
        if {parameter.dtype for parameter in own} != {torch.float32}:
            self.require_fp32_parameters()
        return own if self.gathered is None else self.gathered()


def fully_shard(
    module: Any,
    *,
    mp_policy: fsdp.MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    **options: Any,
) -> Any:
    """``torch.distributed.fsdp.fully_shard`` for a module with mixers.

    The fp32 parameters of each mixer form a group of their own: torch shards, gathers and reduces
    them in fp32. Their names do not change. Mixers that are sharded already stay as they are.

    Args:
        module, mp_policy, ignored_params: as torch's. The policy is not that of the fp32
            parameters, so a ``param_dtype`` does not round them.
        options: torch's others.

    Returns:
        ``module``, as torch's function does.
    """
    ignored = set(ignored_params or ())
    for root in module if isinstance(module, list) else [module]:
        for mixer in [m for m in root.modules() if isinstance(m, ShardedApart)]:
            if mixer.gathered is None and not isinstance(mixer, fsdp.FSDPModule):
                group = Fp32Group(mixer)
                fsdp.fully_shard(group, **options)
                mixer.add_module("fp32_group", group)
                vars(mixer)["gathered"] = group  # a submodule once is enough
            ignored.update(getattr(mixer, name) for name in mixer._keep_in_float32_parameter_names)
    policy = fsdp.MixedPrecisionPolicy() if mp_policy is None else mp_policy
    return fsdp.fully_shard(module, mp_policy=policy, ignored_params=ignored, **options)


def _fully_shard_for_a_launch(module: Any, **options: Any) -> Any:
    """Refuse before the first step what the first save would refuse."""
    given = launch_arguments()
    if given.get("save") and given.get("ckpt_format") == "torch_dist":
        raise ValueError(f"--save {given['save']}: {NOT_BY_SECTION}")
    return fully_shard(module, **options)


def shard_apart_in_megatron() -> None:
    """Megatron's ``--use-torch-fsdp2`` calls the functions above in place of torch's."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel

    wrapper: Any = torch_fully_sharded_data_parallel
    if getattr(wrapper, "fully_shard", None) is fsdp.fully_shard:
        wrapper.fully_shard = _fully_shard_for_a_launch

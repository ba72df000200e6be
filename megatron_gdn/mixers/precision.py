"""Keeps a mixer's decay parameters in fp32 when a wrapper casts or shards the model.

exp(A_log) is the decay rate; rounding ``A_log`` to bf16 changes the rate by up to 0.8%.
Megatron's ``Float16Module`` casts every parameter; torch's ``fully_shard`` (FSDP2)
gathers a group in one dtype, so the fp32 parameters form a group of their own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import fsdp

from ..compat.mixed_dtype_optimizers import repair_mixed_dtype_optimizers
from ..compat.observe import log_once
from ..compat.versions import FSDP_JOINS_MEANS_AND_SUMS
from .loader_layout import launch_arguments

if TYPE_CHECKING:
    from ..compat.state_dict import StateDict

logger = logging.getLogger(__name__)

# The argument `missing_keys` of the last load that warned. torch passes the same list
# to all modules of one load, so the list tells whether the present load has warned.
_missing_keys_of_warned_load: list[str] | None = None


def mark_keep_in_fp32(parameter: nn.Parameter) -> None:
    """Set the attribute ``keep_in_fp32``, which tells newer Megatrons and optimizers
    that they must not cast the parameter."""
    assert parameter.dtype == torch.float32, parameter.dtype
    vars(parameter)["keep_in_fp32"] = True
    # older optimizers of Megatron fail on models that mix fp32 with 16-bit parameters
    repair_mixed_dtype_optimizers()


class Fp32Parameters(nn.Module):
    """Mixin of a module whose parameters named in ``_keep_in_float32_parameter_names``
    stay fp32 or fp64."""

    # Megatron-Bridge reads this attribute
    _keep_in_float32_parameter_names: tuple[str, ...] = ()

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register as torch does. Megatron-FSDP registers its sharded parameters here,
        so :func:`prepare_fsdp_for_mixed_dtypes` checks an fp32 parameter first."""
        if name in self._keep_in_float32_parameter_names:
            prepare_fsdp_for_mixed_dtypes(name, param)
        super().register_parameter(name, param)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True):
        """Move or cast as torch does, by ``fn`` for each tensor, but leave the fp32
        parameters and their gradients in fp32 or a wider dtype."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        names = self._keep_in_float32_parameter_names
        kept = [parameters[name] for name in names if name in parameters]
        protected = kept + [p.grad for p in kept if p.grad is not None]

        def apply_without_narrowing(tensor: Tensor) -> Tensor:
            """``fn(tensor)``; for a protected tensor, in fp32 or a wider dtype."""
            moved = fn(tensor)
            if moved.dtype != tensor.dtype and any(tensor is p for p in protected):
                wide = torch.promote_types(moved.dtype, torch.float32)
                return tensor.to(moved.device, wide)
            return moved

        return super()._apply(apply_without_narrowing, recurse)

    def require_fp32_parameters(self) -> None:
        """Raise a ValueError if a wrapper has rounded one of the fp32 parameters."""
        for name in self._keep_in_float32_parameter_names:
            dtype = getattr(self, name).dtype
            if dtype not in (torch.float32, torch.float64):
                raise ValueError(
                    f"{name} reached the layer in {dtype}, and must be torch.float32 "
                    "(or float64): the recurrence compounds its rounding errors. Under "
                    "torch's fully_shard, give this layer a MixedPrecisionPolicy "
                    "without param_dtype; elsewhere, do not replace the layer's "
                    "parameters by rounded ones."
                )

    def _load_from_state_dict(
        self,
        state_dict: StateDict,
        prefix: str,
        local_metadata: StateDict,
        strict: bool,
        missing_keys: list[str],
        *args: Any,
        **keywords: Any,
    ) -> None:
        """Load as torch does, with one warning per load if the file has rounded values.

        With ``assign=True`` torch would take the dtypes of the state dict; here 16-bit
        values become fp32.
        """
        names = self._keep_in_float32_parameter_names
        exact_dtypes = {getattr(self, name).dtype for name in names} | {torch.float32}
        values = {
            f"{prefix}{name}": state_dict.get(f"{prefix}{name}") for name in names
        }
        rounded = []
        for key, value in values.items():
            dtype = getattr(value, "dtype", torch.float32)
            if dtype not in exact_dtypes:
                rounded.append(f"{key} ({str(dtype).removeprefix('torch.')})")
        global _missing_keys_of_warned_load
        if rounded and missing_keys is not _missing_keys_of_warned_load:
            _missing_keys_of_warned_load = missing_keys
            logger.warning(
                "load_state_dict: %s: the layer keeps these parameters in fp32, the "
                "state dict does not, so their values are rounded; later layers' "
                "parameters are not listed. If the checkpoint's optimizer holds fp32 "
                "masters, megatron_gdn.fp32_masters.load_fp32_masters(model, folder) "
                "brings them back.",
                ", ".join(rounded),
            )
        if local_metadata.get("assign_to_params_buffers", False):
            for key, value in values.items():
                if isinstance(value, Tensor):
                    wide_dtype = torch.promote_types(value.dtype, torch.float32)
                    state_dict[key] = value.to(wide_dtype)
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, *args, **keywords
        )


def prepare_fsdp_for_mixed_dtypes(name: str, parameter: nn.Parameter | None) -> None:
    """Refuse parameters of two dtypes in one layer under Megatron-FSDP over gloo; over
    other backends, switch off a fusion that would give wrong gradients.

    Megatron-FSDP gathers the parameters of a layer in one joined collective, and
    reduces their gradients in another one.

    * Over gloo a gather with outputs of two dtypes returns wrong numbers without an
      error. This function raises a NotImplementedError.
    * torch reduces all tensors of a joined collective like the first of them
      (``_coalescing_manager``). With ``gradient_reduce_div_fusion``, Megatron-FSDP
      divides a bf16 gradient by the number of ranks before the sum, and an fp32
      gradient within the sum. So the gradients of one dtype are divided twice or never.
      This function switches the fusion off: then all gradients are divided before the
      sum.

    ``parameter`` is called ``name`` in its module. Nothing happens if Megatron-FSDP has
    not sharded it.
    """
    fsdp = getattr(parameter, "_megatron_fsdp_model", None)
    original = getattr(parameter, "orig_param", None)
    if fsdp is None or original is None:
        return
    buffer = fsdp.param_and_grad_buffer
    groups = buffer.parameter_groups
    group = buffer.param_to_param_group[original]
    joined_groups = buffer.bucket_to_bucket_group[group]
    dtypes = {str(groups[index].dtype) for index in joined_groups}
    if len(dtypes) == 1:
        return
    if torch.distributed.get_backend(fsdp.dist_index.get_fsdp_group()) == "gloo":
        raise NotImplementedError(
            f"Megatron-FSDP would gather {name} ({original.dtype}) in one collective "
            f"of {' and '.join(sorted(dtypes))}, from which gloo returns wrong "
            "numbers. Use the nccl backend, parameters of one dtype, "
            "DistributedDataParallel, or a data_parallel_sharding_strategy other than "
            "'optim_grads_params' (for megatron_fsdp.fully_shard: zero_dp_strategy, "
            "and no fsdp_unit_modules)."
        )
    fused = buffer.ddp_config.gradient_reduce_div_fusion
    if fused and FSDP_JOINS_MEANS_AND_SUMS.is_present():
        buffer.ddp_config.gradient_reduce_div_fusion = False
        log_once(
            f"Megatron-FSDP: {name} is {original.dtype} in a layer of "
            f"{' and '.join(sorted(dtypes))}, so gradient_reduce_div_fusion is switched "
            "off: with it torch would divide one dtype's gradients by the ranks twice, "
            "or never."
        )


# The advice at the end of an error: a rank's shard of in_proj does not consist of
# complete sections, so a checkpoint cannot store the sections.
FSDP2_CHECKPOINT_ADVICE = (
    "Under torch's FSDP2 a rank holds a run of in_proj's rows, which --ckpt-format "
    "torch_dist cannot store section by section (nor does it load the optimizer's step "
    "there). Give --ckpt-format torch_dcp, or with tensor parallelism "
    "--use-distributed-optimizer in place of --use-torch-fsdp2."
)


class Fp32Group(nn.Module):
    """A submodule with a mixer's fp32 parameters, so that FSDP2 shards them as a group
    of their own.

    The parameters are also those of the mixer, which saves and loads them; this module
    adds no keys to a state dict.
    """

    _mixer: Fp32Parameters

    def __init__(self, mixer: Fp32Parameters) -> None:
        """Share the parameters in ``mixer._keep_in_float32_parameter_names``."""
        super().__init__()
        # not as a submodule: the mixer already contains this group
        vars(self)["_mixer"] = mixer
        for name in mixer._keep_in_float32_parameter_names:
            self._parameters[name] = mixer._parameters[name]

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a parameter is set in the mixer too, since FSDP2 sets its
        sharded parameters here."""
        if name in vars(self).get("_parameters", ()):
            self._parameters[name] = value
            self._mixer._parameters[name] = value
        else:
            super().__setattr__(name, value)

    def forward(self) -> tuple[Tensor, ...]:
        """Copies of the gathered parameters; torch frees the gathered tensors after
        this call."""
        return tuple(p.clone() for p in self.parameters())

    def _save_to_state_dict(self, *args: object, **keywords: object) -> None: ...

    def _load_from_state_dict(self, *args: object, **keywords: object) -> None: ...


class SeparatelyShardedFp32(Fp32Parameters):
    """Mixin of a mixer; :func:`fully_shard` shards its fp32 parameters as a group of
    their own."""

    # The mixer's `Fp32Group`, whose call gathers the fp32 parameters for one forward;
    # None if they are not sharded.
    gather_fp32: Fp32Group | None = None

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move or cast the parameters by ``fn``, as :class:`Fp32Parameters` does."""
        super()._apply(fn, recurse)
        if self.gather_fp32 is not None:
            # `fn` was applied to the group, which torch gave an `_apply` that reads the
            # parameters' new addresses, and then to the same parameters here.
            self.gather_fp32._apply(lambda tensor: tensor)
        return self

    def fp32_parameters(self) -> tuple[Tensor, ...]:
        """The fp32 parameters in the order of their names, gathered if they are
        sharded.

        Raises a ValueError if a parameter was rounded.
        """
        own = tuple(
            [getattr(self, name) for name in self._keep_in_float32_parameter_names]
        )
        if {x.dtype for x in own} != {torch.float32}:
            self.require_fp32_parameters()
        if self.gather_fp32 is not None:
            return self.gather_fp32()
        return own


def fully_shard(
    module: nn.Module | list[nn.Module],
    *,
    mp_policy: fsdp.MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    **options: Any,
) -> fsdp.FSDPModule | list[fsdp.FSDPModule]:
    """``torch.distributed.fsdp.fully_shard`` for modules that have mixers; arguments as
    in torch.

    The fp32 parameters of each mixer form a group of their own, which torch shards,
    gathers and reduces in fp32; ``mp_policy`` does not apply to this group. Parameters
    keep their names. Mixers that are already sharded do not change. ``ignored_params``
    are not sharded, as in torch.
    """
    if isinstance(module, list):
        roots = module
    else:
        roots = [module]
    mixers = [
        part
        for root in roots
        for part in root.modules()
        if isinstance(part, SeparatelyShardedFp32)
    ]
    ignored = set(ignored_params or ())
    for mixer in mixers:
        if mixer.gather_fp32 is None and not isinstance(mixer, fsdp.FSDPModule):
            group = Fp32Group(mixer)
            fsdp.fully_shard(group, **options)
            mixer.add_module("fp32_group", group)
            # setattr would register the group twice
            vars(mixer)["gather_fp32"] = group
        ignored.update(
            getattr(mixer, name) for name in mixer._keep_in_float32_parameter_names
        )
    if mp_policy is None:
        mp_policy = fsdp.MixedPrecisionPolicy()
    return fsdp.fully_shard(
        module, mp_policy=mp_policy, ignored_params=ignored, **options
    )


def _fully_shard_for_a_launch(
    module: nn.Module | list[nn.Module], **options: Any
) -> fsdp.FSDPModule | list[fsdp.FSDPModule]:
    """:func:`fully_shard` for a launch of Megatron's scripts.

    Raises a ValueError if the launch saves checkpoints in the format torch_dist. This
    format stores sections of in_proj, but a rank's shard is not a section.
    """
    arguments = launch_arguments()
    if arguments.get("save") and arguments.get("ckpt_format") == "torch_dist":
        raise ValueError(f"--save {arguments['save']}: {FSDP2_CHECKPOINT_ADVICE}")
    return fully_shard(module, **options)


def replace_fully_shard_in_megatron() -> None:
    """Let Megatron's ``--use-torch-fsdp2`` call :func:`fully_shard` in place of
    torch's, and refuse a ``--save`` whose format cannot hold the shards."""
    from megatron.core.distributed import torch_fully_sharded_data_parallel

    wrapper: Any = torch_fully_sharded_data_parallel
    if getattr(wrapper, "fully_shard", None) is fsdp.fully_shard:
        wrapper.fully_shard = _fully_shard_for_a_launch

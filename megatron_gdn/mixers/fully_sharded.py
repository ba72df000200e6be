"""Mixers under torch's ``fully_shard`` (FSDP2): fp32 parameters form a group of their own.

torch gathers the parameters of a group in one buffer of one dtype. In a 16-bit model ``A_log`` and
``dt_bias`` are not of the weights' dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import fsdp

from .loader_layout import launch_arguments
from .precision import Fp32Parameters

NOT_BY_SECTION = (
    "Under torch's FSDP2 a rank holds a run of in_proj's rows, which --ckpt-format torch_dist "
    "cannot store section by section (nor does it load the optimizer's step there). Give "
    "--ckpt-format torch_dcp, or with tensor parallelism --use-distributed-optimizer in place of "
    "--use-torch-fsdp2."
)


class Fp32Group(nn.Module):
    """The fp32 parameters of a mixer as a module of their own, which ``fully_shard`` takes.

    What is set here is set in the mixer, under the same names. State dicts do not show this module.
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
        """Copies: torch frees the gathered parameters when this call ends."""
        return tuple(p.clone() for p in self._parameters.values() if p is not None)

    def _save_to_state_dict(self, *args: Any) -> None: ...

    def _load_from_state_dict(self, *args: Any) -> None: ...


class ShardedApart(Fp32Parameters):
    """Mixin for mixers whose fp32 parameters may be gathered by themselves."""

    # Called once a forward, returns the whole parameters; None where they are whole themselves.
    gathered: Callable[[], tuple[Tensor, ...]] | None = None


def fully_shard(
    module: Any,
    *,
    mp_policy: fsdp.MixedPrecisionPolicy | None = None,
    ignored_params: set[nn.Parameter] | None = None,
    **options: Any,
) -> Any:
    """``torch.distributed.fsdp.fully_shard`` for a module with mixers.

    The fp32 parameters of each mixer form a group of their own: torch shards, gathers and reduces
    them in fp32. They keep their names in ``named_parameters`` and in state dicts. Mixers that are
    sharded already stay as they are.

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

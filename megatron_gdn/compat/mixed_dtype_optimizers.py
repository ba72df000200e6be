"""Lets Megatron's optimizers save and load models that mix fp32 with 16-bit parameters.

A model in bf16 whose ``A_log`` and ``dt_bias`` are fp32 trains with megatron-core 0.19 as it is
(under ``--use-torch-fsdp2`` with 7), but its optimizer state does not survive a checkpoint:

1. ``DistributedOptimizer`` records each parameter's place in its group in the order of the gradient
   buffers, but passes the group to Adam with the fp32 parameters first. So it saves and loads
   another parameter's state under a name: an error if shapes differ, silently wrong if they are
   equal. NVIDIA/Megatron-LM issue 2777, repaired on its dev branch (5835).
2. ``Float16OptimizerWithFloat16Params.sharded_state_dict`` numbers the 16-bit parameters only,
   while Adam's state numbers all of them, with the same consequences. Repaired on main (5929).
3. ``DistributedOptimizer`` loads a shard of an fp32 parameter by writing into a view of it, which
   autograd refuses for ``dp_reshardable`` checkpoints and for those of ``--ckpt-format torch``.
   It also writes this rank's shard only. So replicas hold different values if the checkpoint's
   model and master differ, as in a checkpoint of a layer that kept a 16-bit ``A_log``.
4. ``DistributedOptimizer`` refuses to save ``dp_reshardable``, its default, on a rank whose share
   of the fp32 parameters is empty, see :mod:`.empty_shares`.
5. ``DistributedOptimizer`` saves wrong states under ``fully_reshardable`` where a buffer has
   several buckets, with any dtypes, see :mod:`.padded_buckets`.
6. ``Float16OptimizerWithFloat16Params.state_dict``, which ``--ckpt-format torch`` writes, lists the
   masters of 16-bit parameters only, see :mod:`.listed_masters`.
7. ``Float16OptimizerWithFloat16Params`` reads ``main_grad`` of fp32 parameters. Under torch's FSDP2
   no parameter has it, so the first step raises. 16-bit parameters may have ``grad`` alone.
8. ``LayerWiseDistributedOptimizer`` (Muon) gathers parameters of several dtypes as one tensor, see
   :mod:`.gathered_by_dtype`.
9. ``ChainedOptimizer`` loads no file of ``--ckpt-format torch_dcp``, see :mod:`.states_to_load`.
10. With torch 2.15 no checkpoint's tensors can be listed, see :mod:`.stored_strides`.

The layer therefore installs the wrappers below the first time it marks a parameter, before any
optimizer of it can exist. The wrappers need nothing from the user and leave the parameter
groups as they are. (The alternative, a group of its own for fp32 parameters through
``config_overrides``, must be set in every training script, does nothing for the second optimizer,
and writes checkpoints that no run without that override can load.) Each wrapper checks whether the
optimizer at hand has the fault. It does nothing if not: in models of one dtype, and in a Megatron
that has been repaired.

In a file, an fp32 parameter is its own master: it is stored under ``optimizer.state.param.*`` and
``optimizer.state.fp32_param.*``, like the master of a 16-bit parameter. Checkpoints of layers with
a 16-bit ``A_log`` load here with their fp32 masters, and load there with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor

from .bucket_sizes import (
    with_bucket_sizes_explained,
    with_file_sizes_explained,
    with_switch_named,
    with_switch_of_a_file_named,
)
from .empty_shares import with_empty_shares
from .gathered_by_dtype import with_gathers_by_dtype
from .listed_masters import take_native_masters, with_every_master
from .padded_buckets import with_padded_buckets
from .states_to_load import with_states_to_load
from .stored_strides import with_stored_strides

# Key of the fp32 parameters' masters in a Float16Optimizer's state dict, beside Megatron's own list
# of masters. A Megatron without this wrapper does not read it.
_MASTERS = "fp32_params"

_originals: list[tuple[type, str, Callable]] = []


def repair_mixed_dtype_optimizers() -> None:
    """Install the wrappers; does nothing when called again. Touches no GPU."""
    if _originals:
        return
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import LayerWiseDistributedOptimizer
    from megatron.core.optimizer.optimizer import (
        ChainedOptimizer,
        Float16OptimizerWithFloat16Params,
    )

    for owner, name, wrap in (
        (DistributedOptimizer, "__init__", _with_true_order),
        (DistributedOptimizer, "load_state_dict", _with_equal_replicas),
        (DistributedOptimizer, "load_parameter_state_from_dp_zero", _with_equal_replicas_of_a_file),
        (DistributedOptimizer, "load_parameter_state_from_dp_zero", with_file_sizes_explained),
        (DistributedOptimizer, "sharded_param_state_dp_reshardable", with_empty_shares),
        (DistributedOptimizer, "sharded_param_state_dp_reshardable", with_switch_named),
        (DistributedOptimizer, "save_parameter_state", with_switch_of_a_file_named),
        (ChainedOptimizer, "save_parameter_state", with_switch_of_a_file_named),
        (ChainedOptimizer, "state_dict", with_states_to_load),
        (DistributedOptimizer, "sharded_param_state_fully_reshardable", with_padded_buckets),
        (Float16OptimizerWithFloat16Params, "state_dict", with_every_master),
        (Float16OptimizerWithFloat16Params, "sharded_state_dict", _with_all_parameters),
        (Float16OptimizerWithFloat16Params, "load_state_dict", _with_fp32_masters),
        (
            Float16OptimizerWithFloat16Params, "_copy_model_grads_to_main_grads",
            _with_grads_for_main_grads,
        ),
        (LayerWiseDistributedOptimizer, "allgather_params", with_gathers_by_dtype),
        (TorchDistLoadShardedStrategy, "load", with_bucket_sizes_explained),
        (TorchDistLoadShardedStrategy, "load_tensors_metadata", with_stored_strides),
    ):  # fmt: skip
        original = getattr(owner, name)
        _originals.append((owner, name, original))
        setattr(owner, name, wraps(original)(wrap(original)))


def restore_mixed_dtype_optimizers() -> None:
    """Remove the wrappers; marking the next parameter installs them again."""
    while _originals:
        owner, name, original = _originals.pop()
        setattr(owner, name, original)


def _log_once(message: str) -> None:
    from megatron.core import __version__

    from .observe import log_once

    log_once(f"megatron-core {__version__}: {message}")


def _with_true_order(init: Callable) -> Callable:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        places = _places_in_adam(self)
        if places is not None and places != self.model_param_group_index_map:
            self.model_param_group_index_map = places
            _log_once("DistributedOptimizer's order of fp32 and 16-bit parameters was corrected.")

    return __init__


def _places_in_adam(optimizer: Any) -> dict[Tensor, tuple[int, int]] | None:
    """Model parameter -> (group, index in group) of the shard that Adam updates for it.

    None for optimizers that shard nothing, or keep other tensors than they were given.
    """
    if not hasattr(optimizer, "model_param_group_index_map"):
        return None
    place = {
        id(shard): (group_index, index)
        for group_index, group in enumerate(optimizer.optimizer.param_groups)
        for index, shard in enumerate(group["params"])
    }
    places: dict[Tensor, tuple[int, int]] = {}
    for models, shards in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        (optimizer.model_float16_groups, optimizer.shard_float16_groups),  # no separate masters
    ):
        for model, shard in zip(_flat(models), _flat(shards), strict=True):
            if id(shard) in place:
                places[model] = place[id(shard)]
    return places if places.keys() == optimizer.model_param_group_index_map.keys() else None


def _flat(groups: Iterable[Iterable[Any]]) -> Iterator[Any]:
    return chain.from_iterable(groups)


def _with_equal_replicas(load: Callable) -> Callable:
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        load(self, state_dict)
        if "param_state" in state_dict:
            _gather_fp32_parameters(self)

    return load_state_dict


def _with_equal_replicas_of_a_file(load: Callable) -> Callable:
    """As `_with_equal_replicas`, for the separate state file of ``--ckpt-format torch``."""

    @torch.no_grad()
    def load_parameter_state_from_dp_zero(self, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        _gather_fp32_parameters(self)

    return load_parameter_state_from_dp_zero


def _gather_fp32_parameters(optimizer: Any) -> None:
    """Give every data-parallel replica all shards of the fp32 parameters of a 16-bit model."""
    buffers = getattr(optimizer, "buffers", ())
    if len({buffer.param_dtype for buffer in buffers}) == 1:
        return
    group = optimizer.data_parallel_group
    for bucket in chain.from_iterable(b.buckets for b in buffers if b.param_dtype == torch.float32):
        mine = bucket.param_data.chunk(group.size())[group.rank()]
        torch.distributed.all_gather_into_tensor(bucket.param_data, mine.clone(), group=group)


def _with_grads_for_main_grads(copy: Callable) -> Callable:
    def _copy_model_grads_to_main_grads(self) -> None:
        natives = [p for p in _flat(self.fp32_from_fp32_groups) if not hasattr(p, "main_grad")]
        for parameter in natives:
            parameter.main_grad = parameter.grad
        try:
            copy(self)
        finally:
            for parameter in natives:
                del parameter.main_grad

    return _copy_model_grads_to_main_grads


def _with_all_parameters(sharded: Callable) -> Callable:
    def sharded_by_megatron(self, *args: Any) -> dict[str, Any]:
        self._in_sharded_state_dict = True
        try:
            return sharded(self, *args)
        finally:
            del self._in_sharded_state_dict

    def sharded_state_dict(self, model_sharded_state_dict, is_loading=False, metadata=None):
        natives = [] if self.is_stub_optimizer else list(_flat(self.fp32_from_fp32_groups))
        if not natives or not _forgets_fp32_parameters(sharded, natives[0].device):
            return sharded_by_megatron(self, model_sharded_state_dict, is_loading, metadata)
        _log_once("fp32 parameters were added to Float16Optimizer's checkpoint.")
        with _fp32_parameters_as_their_own_masters(self):
            state = sharded_by_megatron(self, model_sharded_state_dict, is_loading, metadata)
        native = {id(parameter) for parameter in natives}
        is_native = [id(p) in native for g in self.optimizer.param_groups for p in g["params"]]
        masters = list(_flat(state["fp32_from_fp16_params"]))
        state[_MASTERS] = {
            # The model's entry is loaded into the parameter; the master needs its own memory.
            index: replace(master, data=master.data.clone()) if is_loading else master
            for index, master in enumerate(masters)
            if is_native[index]
        }
        others = (master for index, master in enumerate(masters) if not is_native[index])
        state["fp32_from_fp16_params"] = [
            [next(others) for _ in group] for group in self.fp32_from_float16_groups
        ]
        return state

    return sharded_state_dict


@contextmanager
def _fp32_parameters_as_their_own_masters(optimizer: Any) -> Iterator[None]:
    """List all parameters, in Adam's order, where Megatron lists the 16-bit ones."""
    half, masters = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    model_of = {id(m): p for p, m in zip(_flat(half), _flat(masters), strict=True)}
    groups = [group["params"] for group in optimizer.optimizer.param_groups]
    optimizer.float16_groups = [[model_of.get(id(p), p) for p in group] for group in groups]
    optimizer.fp32_from_float16_groups = [list(group) for group in groups]
    try:
        yield
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = half, masters


def _with_fp32_masters(load: Callable) -> Callable:
    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        masters = state_dict.pop(_MASTERS, {}) or take_native_masters(self, state_dict)
        load(self, state_dict)
        parameters = list(_flat(g["params"] for g in self.optimizer.param_groups))
        for index, master in masters.items():
            parameters[int(index)].copy_(master)

    return load_state_dict


@cache
def _forgets_fp32_parameters(sharded: Callable, device: torch.device) -> bool:
    """Whether Megatron's ``sharded_state_dict`` loses the state of an fp32 parameter.

    Tried on an optimizer of two parameters. The fp32 one comes first, so numbering only the 16-bit
    one gives it the wrong number.
    """
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params

    single = torch.nn.Parameter(torch.zeros(1, dtype=torch.float32, device=device))
    half = torch.nn.Parameter(torch.zeros(1, dtype=torch.bfloat16, device=device))
    adam = torch.optim.Adam([single, half])
    for parameter in (single, half):
        adam.state[parameter] = {"exp_avg": torch.zeros(1, device=device)}
    config = OptimizerConfig(lr=0.0, bf16=True, params_dtype=torch.bfloat16)
    no_scaler = cast(Any, None)  # legal in bf16
    probe = Float16OptimizerWithFloat16Params(adam, config, no_scaler, lambda *_: None)
    cast(Any, probe)._in_sharded_state_dict = True
    model = {
        name: ShardedTensor.from_rank_offsets(name, parameter)
        for name, parameter in (("single", single), ("half", half))
    }
    try:
        state = sharded(probe, model)["optimizer"]["state"]
    except (AssertionError, ValueError):
        return True
    return state[0]["exp_avg"].key != "optimizer.state.exp_avg.single"

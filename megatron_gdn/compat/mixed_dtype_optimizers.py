"""Lets Megatron's optimizers train, save and load models that mix fp32 with 16-bit parameters.

A bf16 model whose ``A_log`` and ``dt_bias`` are fp32 meets these faults of megatron-core 0.19:

1. ``DistributedOptimizer`` saves and loads another parameter's state under a name: it records
   places in the order of the gradient buffers, and Adam gets the fp32 parameters first
   (NVIDIA/Megatron-LM issue 2777, repaired on dev, 5835).
2. ``Float16OptimizerWithFloat16Params.sharded_state_dict`` does the same: it numbers 16-bit
   parameters only, Adam's state all of them (repaired on main, 5929).
3. ``DistributedOptimizer`` loads a shard of an fp32 parameter into a view of it, which autograd
   refuses, and this rank's shard only, so that replicas may differ.
4. ``Float16OptimizerWithFloat16Params.state_dict`` (``--ckpt-format torch``) lists the masters of
   16-bit parameters only, by their order.
5. ``Float16OptimizerWithFloat16Params`` reads ``main_grad`` of fp32 parameters, which no parameter
   has under torch's FSDP2; 16-bit ones may have ``grad`` alone.
6. ``LayerWiseDistributedOptimizer`` (Muon) gathers parameters of several dtypes as one tensor.
7. Those of :mod:`.optimizer_checkpoints`.

The layer installs the wrappers the first time it marks a parameter, before any optimizer of it can
exist. Parameter groups stay as they are: a group of its own for fp32 parameters would have to be
set in every script, and its checkpoints load in no run without it. Each wrapper does nothing where
the optimizer at hand has not the fault: in models of one dtype, and in a repaired Megatron.

In a file an fp32 parameter is its own master, under ``optimizer.state.param.*`` and
``optimizer.state.fp32_param.*`` as the master of a 16-bit one. Checkpoints of layers with a 16-bit
``A_log`` load here with their fp32 masters, and load there with ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, wraps
from itertools import chain
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from .optimizer_checkpoints import (
    log_repair,
    with_bucket_sizes_explained,
    with_empty_shares,
    with_file_sizes_explained,
    with_padded_buckets,
    with_states_to_load,
    with_stored_strides,
    with_switch_named,
    with_switch_of_a_file_named,
)

# Key of the fp32 parameters' masters in a Float16Optimizer's state dict, beside Megatron's own list
# of masters. A Megatron without this wrapper does not read it.
_MASTERS = "fp32_params"

_LIST = "fp32_from_fp16_params"  # Megatron's list of masters
_PARAMS_LISTS = {"dp_cp_params_list": "dp_cp", "expt_dp_params_list": "expt_dp"}

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
        (Float16OptimizerWithFloat16Params, "state_dict", _with_every_master),
        (Float16OptimizerWithFloat16Params, "sharded_state_dict", _with_all_parameters),
        (Float16OptimizerWithFloat16Params, "load_state_dict", _with_fp32_masters),
        (
            Float16OptimizerWithFloat16Params, "_copy_model_grads_to_main_grads",
            _with_grads_for_main_grads,
        ),
        (LayerWiseDistributedOptimizer, "allgather_params", _with_gathers_by_dtype),
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


def _with_true_order(init: Callable) -> Callable:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        places = _places_in_adam(self)
        if places is not None and places != self.model_param_group_index_map:
            self.model_param_group_index_map = places
            log_repair("DistributedOptimizer's order of fp32 and 16-bit parameters was corrected.")

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
        dist.all_gather_into_tensor(bucket.param_data, mine.clone(), group=group)


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
        log_repair("fp32 parameters were added to Float16Optimizer's checkpoint.")
        with _fp32_parameters_as_their_own_masters(self):
            state = sharded_by_megatron(self, model_sharded_state_dict, is_loading, metadata)
        native = {id(parameter) for parameter in natives}
        is_native = [id(p) in native for g in self.optimizer.param_groups for p in g["params"]]
        masters = list(_flat(state[_LIST]))
        state[_MASTERS] = {
            # The model's entry is loaded into the parameter; the master needs its own memory.
            index: replace(master, data=master.data.clone()) if is_loading else master
            for index, master in enumerate(masters)
            if is_native[index]
        }
        others = (master for index, master in enumerate(masters) if not is_native[index])
        state[_LIST] = [[next(others) for _ in group] for group in self.fp32_from_float16_groups]
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
        masters = state_dict.pop(_MASTERS, {}) or _take_native_masters(self, state_dict)
        load(self, state_dict)
        parameters = list(_flat(g["params"] for g in self.optimizer.param_groups))
        for index, master in masters.items():
            parameters[int(index)].copy_(master)

    return load_state_dict


def _with_every_master(state_dict: Callable) -> Callable:
    """An fp32 parameter is listed as its own master, in Adam's order.

    So layers with a 16-bit ``A_log`` and with an fp32 one write one list and read it. In
    ``sharded_state_dict``, which lists others, nothing changes.
    """

    def state_dict_with_every_master(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = state_dict(self, *args, **kwargs)
        if not getattr(self, "_in_sharded_state_dict", False) and _LIST in state:
            state[_LIST] = [list(group["params"]) for group in self.optimizer.param_groups]
        return state

    return state_dict_with_every_master


def _take_native_masters(optimizer: Any, state: dict[str, Any]) -> dict[int, Tensor]:
    """Remove the masters of fp32 parameters from the list of ``state``.

    Returns:
        Index of a parameter in Adam -> its master; empty for a list without them.

    Raises:
        ValueError: the list is neither that of all parameters nor that of the 16-bit ones.
    """
    saved = state.get(_LIST)
    own = [[tuple(p.shape) for p in group] for group in optimizer.fp32_from_float16_groups]
    if saved is None or [[tuple(p.shape) for p in group] for group in saved] == own:
        return {}
    groups = [group["params"] for group in optimizer.optimizer.param_groups]
    every = [[tuple(p.shape) for p in group] for group in groups]
    if [[tuple(p.shape) for p in group] for group in saved] != every:
        raise ValueError(
            f"the checkpoint lists {sum(map(len, saved))} fp32 masters, the model has "
            f"{sum(map(len, every))} parameters, or their shapes differ. It was written by another "
            f"model, or before fp32 parameters were listed. --ckpt-format torch_dist with "
            f"--dist-ckpt-optim-fully-reshardable stores masters by name; --no-load-optim loads "
            f"the parameters alone."
        )
    half = {id(master) for group in optimizer.fp32_from_float16_groups for master in group}
    pairs = [list(zip(*both, strict=True)) for both in zip(groups, saved, strict=True)]
    state[_LIST] = [[master for p, master in group if id(p) in half] for group in pairs]
    flat = [pair for group in pairs for pair in group]
    return {index: master for index, (p, master) in enumerate(flat) if id(p) not in half}


def _with_gathers_by_dtype(allgather_params: Callable) -> Callable:
    """fp32 parameters of a 16-bit model are sent by their ranks one by one; the others as ever.

    Each rank updates whole parameters. Megatron flattens those of a rank into one tensor to gather
    them, which is fp32 where an fp32 parameter is among them, and 16-bit on another rank.
    """

    @torch.no_grad()
    def allgather_params_by_dtype(self) -> None:
        groups = self.pg_collection
        whole = {name: getattr(self, name, None) for name in _PARAMS_LISTS}
        try:
            for name, group in _PARAMS_LISTS.items():
                lists = whole[name]
                if groups is not None and lists and len({p.dtype for ps in lists for p in ps}) > 1:
                    setattr(self, name, _without_fp32_ones(lists, getattr(groups, group)))
            allgather_params(self)
        finally:
            vars(self).update(whole)

    return allgather_params_by_dtype


def _without_fp32_ones(lists: list[list[Tensor]], group: Any) -> list[list[Tensor]] | None:
    """Send every fp32 parameter from its rank to the others, and return the other parameters.

    None if rank 0, of whose list Megatron reads the first, has no other: then all are sent here.
    """
    others = [[p for p in ps if p.dtype != torch.float32] for ps in lists]
    for rank, parameters in enumerate(lists):
        for parameter in parameters:
            if parameter.dtype == torch.float32 or not others[0]:
                dist.broadcast(parameter.data, dist.get_global_rank(group, rank), group)
    return others if others[0] else None


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

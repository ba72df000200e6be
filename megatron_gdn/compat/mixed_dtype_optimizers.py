"""Lets Megatron's optimizers train, save and load models that mix fp32 with 16-bit
parameters.

Megatron has faults that show in a bf16 model with fp32 ``A_log`` and ``dt_bias``;
`.versions` lists them. This file wraps the methods that have these faults. For each
16-bit parameter Megatron has an fp32 copy, its *master*, which the optimizer updates.

A wrapper is called as ``wrapper(method, optimizer, *the method's arguments)``. Wrappers
change nothing in models of one dtype. In checkpoints an fp32 parameter is listed as its
own master, also if Megatron has no fault. So layers with fp32 and with 16-bit ``A_log``
load each other's checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from . import versions
from .checkpoints import (
    explain_bucket_size_error,
    explain_file_size_error,
    leave_strides_out,
    load_sections_from_whole_tensor,
    log_repair,
    make_states_to_load,
    slice_without_padding,
    store_empty_shares,
    warn_on_dp_reshardable,
    warn_on_torch_file,
)
from .kda_files import load_old_names
from .versions import UpstreamFault

if TYPE_CHECKING:
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
    )
    from megatron.core.optimizer.optimizer import (
        Float16OptimizerWithFloat16Params as HalfOptimizer,
    )

    from .state_dict import StateDict

# Our key for the masters of fp32 parameters in a Float16Optimizer's state dict
_KEY_OF_FP32_MASTERS = "fp32_params"
# Megatron's key for the masters of 16-bit parameters
_KEY_OF_16_BIT_MASTERS = "fp32_from_fp16_params"
# For LayerWiseDistributedOptimizer: name of an attribute, which lists the parameters of
# each rank -> name of the process group of these ranks.
_GROUP_OF_PARAMS_LIST = {"dp_cp_params_list": "dp_cp", "expt_dp_params_list": "expt_dp"}

_flatten = chain.from_iterable
# The wrapped methods: class, name and Megatron's own method.
_wrapped_methods: list[tuple[type, str, Callable]] = []


def repair_mixed_dtype_optimizers() -> None:
    """Wrap methods of Megatron's optimizers and of its reader of checkpoints, once per
    process; no GPU is used."""
    if _wrapped_methods:
        return
    from megatron.core.dist_checkpointing.strategies.torch import (
        TorchDistLoadShardedStrategy,
    )
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
    from megatron.core.optimizer.layer_wise_optimizer import (
        LayerWiseDistributedOptimizer,
    )
    from megatron.core.optimizer.optimizer import (
        ChainedOptimizer,
        Float16OptimizerWithFloat16Params,
    )

    distributed = DistributedOptimizer
    half = Float16OptimizerWithFloat16Params
    files = TorchDistLoadShardedStrategy
    # Fault -> list of (class, name of the method, wrapper). If two wrappers wrap one
    # method, the later wrapper calls the earlier one.
    repairs: dict[UpstreamFault, list[tuple[type, str, Callable]]] = {
        versions.STATES_IN_BUFFER_ORDER: [(distributed, "__init__", _order_as_adam)],
        versions.REPLICAS_DIFFER: [
            (distributed, "load_state_dict", _load_equal_replicas),
            (distributed, "load_parameter_state_from_dp_zero", _load_equal_replicas),
        ],
        versions.EMPTY_SHARES_REFUSED: [
            (distributed, "sharded_param_state_dp_reshardable", store_empty_shares)
        ],
        versions.NO_STATES_TO_LOAD: [
            (ChainedOptimizer, "state_dict", make_states_to_load)
        ],
        versions.PADDING_BEFORE_STATES: [
            (
                distributed,
                "sharded_param_state_fully_reshardable",
                slice_without_padding,
            )
        ],
        versions.FP32_PARAMETERS_NOT_STORED: [
            (half, "state_dict", _list_every_master),
            (half, "sharded_state_dict", _store_all_parameters),
            (half, "load_state_dict", _load_masters_of_fp32),
        ],
        versions.NO_MAIN_GRADS: [
            (half, "_copy_model_grads_to_main_grads", _use_grads_as_main_grads)
        ],
        versions.MUON_GATHERS_ONE_DTYPE: [
            (LayerWiseDistributedOptimizer, "allgather_params", _gather_by_dtype)
        ],
        versions.IN_PROJ_STORED_BY_RANK: [
            (files, "load", load_sections_from_whole_tensor)
        ],
        versions.KDA_NAMES_OF_0_1: [(files, "load", load_old_names)],
        versions.STRIDES_IN_FILES: [
            (files, "load_tensors_metadata", leave_strides_out)
        ],
        versions.SIZE_ERRORS_WITHOUT_NAMES: [
            (distributed, "load_parameter_state_from_dp_zero", explain_file_size_error),
            (distributed, "sharded_param_state_dp_reshardable", warn_on_dp_reshardable),
            (distributed, "save_parameter_state", warn_on_torch_file),
            (ChainedOptimizer, "save_parameter_state", warn_on_torch_file),
            (files, "load", explain_bucket_size_error),
        ],
    }
    for fault, methods in repairs.items():
        if fault.is_present():
            for owner, name, wrapper in methods:
                _wrap(owner, name, wrapper)


def _wrap(owner: type, name: str, wrapper: Callable) -> None:
    """Replace the method ``name`` of the class ``owner``; keep the original in
    _wrapped_methods."""
    original = getattr(owner, name)
    _wrapped_methods.append((owner, name, original))
    setattr(owner, name, _method_with_wrapper(original, wrapper))


def _method_with_wrapper(original: Callable, wrapper: Callable) -> Callable:
    """A method with the name of ``original`` that calls ``wrapper(original, self,
    ...)``, where ``self`` is the optimizer or the reader of checkpoints."""

    @wraps(original)
    def call_wrapper(self, *args: object, **kwargs: object) -> object:
        return wrapper(original, self, *args, **kwargs)

    return call_wrapper


def restore_mixed_dtype_optimizers() -> None:
    """Put Megatron's methods back, until the next layer with fp32 parameters wraps them
    again."""
    while _wrapped_methods:
        owner, name, original = _wrapped_methods.pop()
        setattr(owner, name, original)


def _order_as_adam(
    init: Callable,
    optimizer: DistributedOptimizer,
    /,
    *args: object,
    **kwargs: object,
) -> None:
    """Run ``__init__`` (``init``), then correct ``model_param_group_index_map``.

    Megatron numbers parameters in the order of its buffers, but Adam has the fp32
    parameters first. With Megatron's numbers a file would store one parameter's states
    under another parameter.
    """
    init(optimizer, *args, **kwargs)
    if not hasattr(optimizer, "model_param_group_index_map"):
        return  # a stub, or an optimizer of Megatron-FSDP
    places = _places_in_adam(optimizer)
    if places != optimizer.model_param_group_index_map:
        optimizer.model_param_group_index_map = places
        log_repair(
            "DistributedOptimizer's places of fp32 and 16-bit parameters were corrected."
        )


def _places_in_adam(optimizer: DistributedOptimizer) -> dict[Tensor, tuple[int, int]]:
    """Model parameter -> (group, index in the group) of its shard in Adam."""
    place_in_adam = {
        id(shard): (group_index, index)
        for group_index, group in enumerate(optimizer.optimizer.param_groups)
        for index, shard in enumerate(group["params"])
    }
    places = {}
    for models, shards in (
        (optimizer.model_fp32_groups, optimizer.shard_fp32_groups),
        (optimizer.model_float16_groups, optimizer.shard_fp32_from_float16_groups),
        # for an Adam without masters, which updates the 16-bit parameters
        (optimizer.model_float16_groups, optimizer.shard_float16_groups),
    ):
        for model, shard in zip(_flatten(models), _flatten(shards), strict=True):
            if id(shard) in place_in_adam:
                places[model] = place_in_adam[id(shard)]
    return places


@torch.no_grad()
def _load_equal_replicas(
    load: Callable,
    optimizer: DistributedOptimizer,
    /,
    *args: object,
    **kwargs: object,
) -> None:
    """Call ``load``, then all-gather the shards of fp32 parameters, so that all
    data-parallel replicas are equal.

    Each rank has one shard of the optimizer, which ``load`` fills. The shard of an fp32
    parameter is a view of the parameter. So on this rank ``load`` changes only that part
    of the parameter. The other parts still have the values of the model's file, which
    may be rounded.
    """
    load(optimizer, *args, **kwargs)
    buffers = getattr(optimizer, "buffers", ())
    if len({buffer.param_dtype for buffer in buffers}) < 2:
        return  # no mixed dtypes
    group = optimizer.data_parallel_group
    for bucket in _flatten(
        b.buckets for b in buffers if b.param_dtype == torch.float32
    ):
        # a copy, since the gather writes the bucket and the shard is a view of it
        shard = bucket.param_data.chunk(group.size())[group.rank()]
        dist.all_gather_into_tensor(bucket.param_data, shard.clone(), group=group)


def _use_grads_as_main_grads(copy_grads: Callable, optimizer: HalfOptimizer) -> None:
    """Call Megatron's ``copy_grads``; during the call ``main_grad`` of an fp32
    parameter is its ``grad``.

    ``copy_grads`` reads ``main_grad`` of every fp32 parameter, and torch's FSDP2 sets
    none.
    """
    without_main_grad = [
        p
        for p in _flatten(optimizer.fp32_from_fp32_groups)
        if not hasattr(p, "main_grad")
    ]
    for parameter in without_main_grad:
        parameter.main_grad = parameter.grad
    try:
        copy_grads(optimizer)
    finally:
        for parameter in without_main_grad:
            del parameter.main_grad


def _store_all_parameters(
    original: Callable,
    optimizer: HalfOptimizer,
    model_sharded_state_dict: StateDict,
    is_loading: bool = False,
    metadata: object = None,
) -> StateDict:
    """Wrap ``sharded_state_dict`` (``original``, with these arguments), to store fp32
    parameters too.

    Megatron's method lists 16-bit parameters only. Under _KEY_OF_16_BIT_MASTERS the
    result has the masters of 16-bit parameters by group, as Megatron's result has.
    Under _KEY_OF_FP32_MASTERS it has index in Adam -> master, for each fp32 parameter.
    """
    if not _mixes_dtypes(optimizer):
        return original(optimizer, model_sharded_state_dict, is_loading, metadata)
    with _fp32_parameters_as_their_own_masters(optimizer):
        state = original(optimizer, model_sharded_state_dict, is_loading, metadata)
    log_repair("fp32 parameters were added to Float16Optimizer's checkpoint.")
    fp32_ids = {
        id(parameter) for parameter in _flatten(optimizer.fp32_from_fp32_groups)
    }
    parameters = _flatten(group["params"] for group in optimizer.optimizer.param_groups)
    state[_KEY_OF_FP32_MASTERS] = {}
    half_masters = []
    masters = _flatten(state[_KEY_OF_16_BIT_MASTERS])
    for index, (parameter, master) in enumerate(zip(parameters, masters, strict=True)):
        if id(parameter) not in fp32_ids:
            half_masters.append(master)
        elif is_loading:
            # An fp32 parameter is its own master, and the model's state dict loads into
            # that tensor too. So the optimizer's entry gets a copy, from which
            # `_load_masters_of_fp32` sets the parameter.
            state[_KEY_OF_FP32_MASTERS][index] = replace(
                master, data=master.data.clone()
            )
        else:
            state[_KEY_OF_FP32_MASTERS][index] = master
    # Megatron's load expects these masters in the groups of the 16-bit parameters.
    rest = iter(half_masters)
    state[_KEY_OF_16_BIT_MASTERS] = [
        [next(rest) for _ in group] for group in optimizer.fp32_from_float16_groups
    ]
    return state


def _mixes_dtypes(optimizer: object) -> bool:
    """Whether ``optimizer`` is a Float16Optimizer with at least one fp32 parameter."""
    return any(getattr(optimizer, "fp32_from_fp32_groups", ()))


@contextmanager
def _fp32_parameters_as_their_own_masters(optimizer: HalfOptimizer) -> Iterator[None]:
    """In this context ``optimizer`` lists fp32 parameters among the 16-bit ones. Each
    fp32 parameter is listed as its own master.

    The lists have the order of Adam's groups, since ``sharded_state_dict`` numbers
    parameters in this order.
    """
    half_parameters = optimizer.float16_groups
    masters = optimizer.fp32_from_float16_groups
    model_of = {
        id(m): p
        for p, m in zip(_flatten(half_parameters), _flatten(masters), strict=True)
    }
    groups = [group["params"] for group in optimizer.optimizer.param_groups]
    optimizer.float16_groups = [
        [model_of.get(id(p), p) for p in group] for group in groups
    ]
    optimizer.fp32_from_float16_groups = groups
    try:
        yield
    finally:
        optimizer.float16_groups = half_parameters
        optimizer.fp32_from_float16_groups = masters


@torch.no_grad()
def _load_masters_of_fp32(
    load: Callable, optimizer: HalfOptimizer, state_dict: StateDict
) -> None:
    """Call ``load``, then copy the masters of fp32 parameters from ``state_dict`` into
    the parameters.

    The masters are under _KEY_OF_FP32_MASTERS, or among the masters of 16-bit parameters
    under _KEY_OF_16_BIT_MASTERS. ``load`` expects them under neither key, so they are
    removed from ``state_dict`` first.
    """
    masters = state_dict.pop(_KEY_OF_FP32_MASTERS, {}) or _take_masters_of_fp32(
        optimizer, state_dict
    )
    load(optimizer, state_dict)
    parameters = list(_flatten(g["params"] for g in optimizer.param_groups))
    for index, master in masters.items():
        parameters[int(index)].copy_(master)


def _list_every_master(
    state_dict: Callable,
    optimizer: HalfOptimizer,
    /,
    *args: object,
    **kwargs: object,
) -> StateDict:
    """Wrap ``state_dict``: list fp32 parameters too, as their own masters.

    The entry _KEY_OF_16_BIT_MASTERS lists the masters of all parameters by Adam's
    groups. If all parameters are 16-bit, Megatron's own entry has this form.
    """
    state = state_dict(optimizer, *args, **kwargs)
    if _mixes_dtypes(optimizer):
        state[_KEY_OF_16_BIT_MASTERS] = [
            list(group["params"]) for group in optimizer.param_groups
        ]
    return state


def _take_masters_of_fp32(
    optimizer: HalfOptimizer, state: StateDict
) -> dict[int, Tensor]:
    """Remove the masters of fp32 parameters from ``state``; return index in Adam ->
    master.

    Raises a ValueError if ``state`` has the masters of another model.
    """

    def shapes(groups: Iterable[Iterable[Tensor]]) -> list[list[torch.Size]]:
        """The shapes of the parameters in each group."""
        return [[p.shape for p in group] for group in groups]

    saved = state.get(_KEY_OF_16_BIT_MASTERS)
    if saved is None or shapes(saved) == shapes(optimizer.fp32_from_float16_groups):
        return {}  # there are no masters of fp32 parameters
    groups = [group["params"] for group in optimizer.optimizer.param_groups]
    if shapes(saved) != shapes(groups):
        raise ValueError(
            f"the checkpoint lists {sum(map(len, saved))} fp32 masters, which do not "
            f"fit the model's {sum(map(len, groups))} parameters: another model wrote "
            "it, or a version that did not list fp32 parameters. Load the parameters "
            "alone (--no-load-optim), or save it with "
            "--dist-ckpt-optim-fully-reshardable (docs/precision.md)."
        )
    half_ids = {id(master) for master in _flatten(optimizer.fp32_from_float16_groups)}
    half_masters: list[list[Tensor]] = []
    fp32_masters: dict[int, Tensor] = {}
    index = 0
    for group, saved_group in zip(groups, saved, strict=True):
        half_masters_of_group = []
        for parameter, master in zip(group, saved_group, strict=True):
            if id(parameter) in half_ids:
                half_masters_of_group.append(master)
            else:
                fp32_masters[index] = master
            index += 1
        half_masters.append(half_masters_of_group)
    state[_KEY_OF_16_BIT_MASTERS] = half_masters
    return fp32_masters


@torch.no_grad()
def _gather_by_dtype(
    allgather_params: Callable, optimizer: LayerWiseDistributedOptimizer
) -> None:
    """Broadcast fp32 parameters one by one; Megatron's ``allgather_params`` gathers the
    other parameters.

    Megatron flattens all parameters of a rank into one tensor, so they must have one
    dtype. During the call of ``allgather_params`` the optimizer's lists do not have the
    parameters that were broadcast.
    """
    groups = optimizer.pg_collection
    before = {name: getattr(optimizer, name, None) for name in _GROUP_OF_PARAMS_LIST}
    try:
        for name, group_name in _GROUP_OF_PARAMS_LIST.items():
            params_by_rank = before[name]
            if not params_by_rank:
                continue
            if len({p.dtype for p in _flatten(params_by_rank)}) > 1:
                group = getattr(groups, group_name)
                setattr(optimizer, name, _broadcast_fp32(params_by_rank, group))
        allgather_params(optimizer)
    finally:
        vars(optimizer).update(before)


def _broadcast_fp32(
    params_by_rank: list[list[Tensor]], group: dist.ProcessGroup
) -> list[list[Tensor]] | None:
    """Broadcast the fp32 parameters in ``group``; return the parameters of other dtypes
    by rank.

    Rank r broadcasts ``params_by_rank[r]``. Megatron reads the dtype from rank 0's first
    parameter. So if rank 0 has fp32 parameters only, all parameters are broadcast, and
    None is returned.
    """
    others = [[p for p in ps if p.dtype != torch.float32] for ps in params_by_rank]
    for rank, parameters in enumerate(params_by_rank):
        for parameter in parameters:
            if parameter.dtype == torch.float32 or not others[0]:
                dist.broadcast(parameter.data, dist.get_global_rank(group, rank), group)
    if others[0]:
        return others
    return None

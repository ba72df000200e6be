"""Loads fp32 masters from a checkpoint's optimizer into parameters that the model saved
in bf16.

Megatron's own layer keeps ``A_log`` and ``dt_bias`` in bf16, and its optimizer keeps an
fp32 copy of each, the *master*. From a checkpoint of Megatron's layer, this package's
layer gets these values:

| the checkpoint's optimizer               | its state is loaded   | not loaded (finetuning)  |
|------------------------------------------|-----------------------|--------------------------|
| Float16Optimizer (no sharding)           | master                | `load_fp32_masters`      |
| DistributedOptimizer, fully_reshardable  | master                | `load_fp32_masters`      |
| DistributedOptimizer, dp_reshardable     | Megatron refuses it   | the rounded value        |
| none                                     |                       | the rounded value        |

dp_reshardable files hold gradient buffers, not named tensors. To use the masters in
such files, first load the checkpoint with the old layer and save it as
fully_reshardable.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .command_line import one_line
from .compat.untrusted_checkpoints import untrusted_checkpoint

if TYPE_CHECKING:
    from .compat.state_dict import StateDict

logger = logging.getLogger(__name__)

# The key of a master: Float16Optimizer calls it fp32_param, DistributedOptimizer param.
_MASTER_KEY_PATTERN = re.compile(
    r"(chained_\d+\.)?optimizer\.state\.(fp32_param|param)\.(?P<key>.+)"
)


def load_fp32_masters(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    metadata: StateDict | None = None,
) -> list[str]:
    """Set parameters marked ``keep_in_fp32`` to their fp32 masters in the checkpoint
    ``folder``.

    Sets only parameters that are 16-bit in the checkpoint's model and fp32 in its
    optimizer. Does not change the optimizer. Every rank must call this function after
    it has loaded the checkpoint. The tensor-parallel size may be any.

    Args:
        model: a Megatron model or its pipeline chunks, bare or wrapped.
        folder: a distributed checkpoint (``torch_dist``).
        metadata: the argument of ``sharded_state_dict`` with which the model was
            loaded.

    Returns:
        Checkpoint keys of the parameters that were set on this rank's pipeline stage.

    Raises:
        ValueError: the checkpoint has two masters for one parameter, or contains a
            pickle that may run code.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.utils import log_single_rank, unwrap_model

    from .compat.mixed_dtype_optimizers import repair_mixed_dtype_optimizers

    # This also lets Megatron's reader read the files of torch 2.15.
    repair_mixed_dtype_optimizers()
    chunks: Any = unwrap_model([model] if isinstance(model, nn.Module) else list(model))
    with untrusted_checkpoint():
        saved: StateDict = dist_checkpointing.load_tensors_metadata(str(folder))
    masters = _masters_by_key(saved)
    # the parameters to set, by the keys of their masters
    wanted: StateDict = {}
    for chunk in chunks:
        for tensor in nested_values(chunk.sharded_state_dict(metadata=metadata)):
            if (
                isinstance(tensor, ShardedTensor)
                and getattr(tensor.data, "keep_in_fp32", False)
                and tensor.key in masters
                # A parameter that is fp32 in the file is exact already. Its master may
                # be out of date, because a fused Adam with its own masters does not
                # update the masters of fp32 parameters.
                and saved[tensor.key].dtype != torch.float32
            ):
                wanted[masters[tensor.key]] = tensor
    # The masters are loaded into new tensors, so that a failed load does not change the
    # model.
    state = {
        name: replace(tensor, key=name, data=torch.empty_like(tensor.data))
        for name, tensor in wanted.items()
    }
    with untrusted_checkpoint():
        loaded: Any = dist_checkpointing.load(state, str(folder))
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.data.copy_(loaded[name])
    log_single_rank(
        logger, logging.INFO, f"{one_line(folder)}: {len(wanted)} fp32 masters loaded"
    )
    return sorted(tensor.key for tensor in wanted.values())


def _masters_by_key(saved: Iterable[str]) -> dict[str, str]:
    """The master's key for each parameter's key; ``saved`` has all keys of the
    checkpoint.

    Raises a ValueError if a parameter has two masters.
    """
    masters: dict[str, str] = {}
    for name in saved:
        match = _MASTER_KEY_PATTERN.fullmatch(name)
        if match is None:
            continue
        key = match["key"]
        other = masters.setdefault(key, name)
        if other != name:
            raise ValueError(
                f"the checkpoint holds two fp32 masters of {key}: {other} and {name}. "
                "Two optimizers over the same parameters wrote the checkpoint; load "
                "the master that you want with the optimizer that wrote it."
            )
    return masters

"""Reads the fp32 values that a checkpoint's optimizer holds for parameters its model held in bf16.

Megatron's own layer keeps ``A_log`` and ``dt_bias`` in bf16; its optimizer's masters in the same
checkpoint are fp32. The layer of this package then gets:

| the checkpoint's optimizer               | loaded with its state | without (finetuning)     |
|------------------------------------------|-----------------------|--------------------------|
| Float16Optimizer (no sharding)           | master                | `load_fp32_masters`      |
| DistributedOptimizer, fully_reshardable  | master                | `load_fp32_masters`      |
| DistributedOptimizer, dp_reshardable     | Megatron refuses it   | the rounded value        |
| none                                     |                       | the rounded value        |

dp_reshardable files hold buffers, not tensors with names. To keep the masters of such a run, save
once more with the old layer and fully_reshardable.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

logger = logging.getLogger(__name__)

# Float16Optimizer says fp32_param, DistributedOptimizer param; chained optimizers add numbers.
_MASTER = re.compile(r"(chained_\d+\.)?optimizer\.state\.(fp32_param|param)\.(?P<key>.+)")


def load_fp32_masters(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    metadata: dict[str, Any] | None = None,
) -> list[str]:
    """Set parameters marked ``keep_in_fp32`` to the checkpoint's fp32 masters.

    It sets only parameters that are 16-bit in the checkpoint's model and fp32 in its optimizer, and
    does not change the optimizer. Every rank calls it, after the model is loaded, at any
    tensor-parallel size.

    Args:
        model: a Megatron model or its pipeline chunks, bare or wrapped.
        folder: a distributed checkpoint (``torch_dist``).
        metadata: for ``sharded_state_dict``; as when the model was loaded.

    Returns:
        Checkpoint keys of the parameters that were set on this rank's pipeline stage.

    Raises:
        ValueError: two masters for one parameter.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.utils import log_single_rank, unwrap_model

    chunks: Any = unwrap_model([model] if isinstance(model, nn.Module) else list(model))
    saved: dict[str, Any] = dist_checkpointing.load_tensors_metadata(str(folder))
    masters = _masters_by_key(saved)
    # A parameter that was fp32 in the file is exact already, and its master may be out of date: a
    # fused Adam with masters of its own keeps none up to date for fp32 parameters.
    wanted: dict[str, Any] = {
        masters[tensor.key]: tensor
        for chunk in chunks
        for tensor in nested_values(chunk.sharded_state_dict(metadata=metadata))
        if isinstance(tensor, ShardedTensor)
        and getattr(tensor.data, "keep_in_fp32", False)
        and tensor.key in masters
        and saved[tensor.key].dtype != torch.float32
    }
    # Loaded into tensors of their own, so that a failure leaves the model as it was.
    loaded: Any = dist_checkpointing.load(
        {
            name: replace(tensor, key=name, data=torch.empty_like(tensor.data))
            for name, tensor in wanted.items()
        },
        str(folder),
    )
    with torch.no_grad():
        for name, tensor in wanted.items():
            tensor.data.copy_(loaded[name])
    log_single_rank(logger, logging.INFO, f"{folder}: {len(wanted)} fp32 masters loaded")
    return sorted(tensor.key for tensor in wanted.values())


def _masters_by_key(saved: Iterable[str]) -> dict[str, str]:
    """The master's key, by the parameter's key in the model."""
    found: dict[str, str] = {}
    for match in filter(None, map(_MASTER.fullmatch, saved)):
        key, name = match["key"], match[0]
        if (other := found.setdefault(key, name)) != name:
            raise ValueError(
                f"the checkpoint holds two fp32 masters of {key}: {other} and {name}. "
                f"It was written by two optimizers over the same parameters; load the one you want "
                f"with the optimizer that wrote it."
            )
    return found

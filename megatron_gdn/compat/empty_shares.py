"""Lets DistributedOptimizer describe a bucket where this rank's share holds no parameter.

A bucket is laid out as ``[parameter | gap | parameter | ... | padding]`` (each parameter starts at
a multiple of 64 elements) and cut into one equal share per data-parallel rank. The fp32 bucket of
``A_log`` and ``dt_bias`` is small, so some shares are gap or padding only. megatron-core 0.19
refuses to save or load those in its default format, ``dp_reshardable`` ("empty bucket
encountered"). NVIDIA/Megatron-LM pull request 6191 is open; it covers shares of padding.

The file covers parameters and gaps, not the padding. So the share gets one entry here. It is marked
as padding and holds the part of the share that the file covers, which may be empty. Every
``dp_reshardable`` file has such entries between parameters, and Megatron's load skips them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from .observe import log_once


def with_empty_shares(sharded: Callable) -> Callable:
    """Wrap ``DistributedOptimizer.sharded_param_state_dp_reshardable``.

    Megatron's function runs first; what a repaired one returns is not changed.
    """

    def sharded_param_state_dp_reshardable(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        try:
            return sharded(self, *args, **kwargs)
        except (AssertionError, IndexError):  # IndexError where python -O skips the assertion
            if not _has_empty_share(self):
                raise
        with _empty_shares_listed(self):
            state = sharded(self, *args, **kwargs)
        from megatron.core import __version__

        log_once(
            f"megatron-core {__version__}: a share of the optimizer's state that holds no "
            f"parameter was added to the dp_reshardable checkpoint."
        )
        return state

    return sharded_param_state_dp_reshardable


def _has_empty_share(optimizer: Any) -> bool:
    buckets = chain.from_iterable(
        buckets for ranges in optimizer.gbuf_ranges for buckets in ranges.values()
    )
    return any(not bucket["param_map"] for bucket in buckets)


@contextmanager
def _empty_shares_listed(optimizer: Any) -> Iterator[None]:
    """Have ``optimizer.get_parameter_state_dp_reshardable`` return an entry for every share."""
    state_of = optimizer.get_parameter_state_dp_reshardable
    optimizer.get_parameter_state_dp_reshardable = partial(_listed, optimizer, state_of)
    try:
        yield
    finally:
        del optimizer.get_parameter_state_dp_reshardable


def _listed(optimizer: Any, state_of: Callable) -> dict[Any, Any]:
    state = state_of()
    group = optimizer.data_parallel_group
    for index, buffer in enumerate(optimizer.buffers):
        for entries_of_buckets in state[index].values():
            known = next(chain.from_iterable(entries_of_buckets), {})
            for bucket, entries in zip(buffer.buckets, entries_of_buckets, strict=True):
                if not entries:
                    share = bucket.grad_data.numel() // group.size()
                    covered = bucket.numel_unpadded - group.rank() * share
                    size = max(0, min(share, covered))
                    entries.append(_entry_of_padding(optimizer, known, size, bucket))
    return state


def _entry_of_padding(
    optimizer: Any, known: dict[str, Any], size: int, bucket: Any
) -> dict[str, Any]:
    """``size`` zeros for the parameter and each state of it, in Megatron's form.

    ``known`` is an entry of this rank in the same buffer, which has the dtypes that the other ranks
    save. Without one they are fp32, as in every buffer of fp32 parameters.
    """
    dtypes = {
        key: value.dtype
        for key, value in known.items()
        if isinstance(value, Tensor) and key != "step"  # a number, not a share
    } or dict.fromkeys(("param", *optimizer.optimizer_state_keys), torch.float32)
    device = bucket.grad_data.device
    zeros = {key: torch.zeros(size, dtype=dtype, device=device) for key, dtype in dtypes.items()}
    # A file cannot hold an empty tensor, so a share of padding alone has none.
    return {
        **(zeros if size else {}),
        "gbuf_local_start": 0,
        "gbuf_local_end": size,
        "padding": True,
    }

"""Adds advice to the errors about an optimizer's state with other gradient buffers.

Megatron's default format of optimizer states (``dp_reshardable``) and the separate file of
``--ckpt-format torch`` hold gradient buffers, not tensors with names. A model with fp32 ``A_log``
and ``dt_bias`` has other buffers than a model that holds them in 16 bits. megatron-core 0.19
refuses such a file, and its error names only sizes. Where Megatron's own layer loads a file of ours
this package cannot add anything, so a warning in the log says it when the file is saved.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from typing import Any

import torch

from .observe import log_once

_OF_A_BUCKET = re.compile(
    r"Global shape mismatch.*bucket_idx|bucket_idx\S* from model not in state dict"
)
_NOTE = (
    "The checkpoint's optimizer state has the format dp_reshardable, which holds gradient buffers, "
    "and the buffers of this model have other sizes. It was written by a layer with 16-bit A_log "
    "and dt_bias, such as Megatron's own, or in another parallel layout. Load the checkpoint with "
    "that layer or layout and save it again with --dist-ckpt-optim-fully-reshardable (in Python "
    "metadata={'distrib_optim_sharding_type': 'fully_reshardable'}): that file loads here. "
    "--no-load-optim loads the parameters alone."
)

_OF_A_FILE = re.compile(r"Number of unpadded elements")
_NOTE_OF_A_FILE = (
    "The file of the optimizer's state (--ckpt-format torch) holds gradient buffers, and the "
    "buffers of this model have other sizes: it was written by a layer with 16-bit A_log and "
    "dt_bias, such as Megatron's own. Load the checkpoint with that layer and save it again with "
    "--ckpt-format torch_dist --auto-detect-ckpt-format --dist-ckpt-optim-fully-reshardable: "
    "that file loads here. --no-load-optim loads the parameters alone."
)

_ON_SAVING = (
    "Megatron's own layer does not load this checkpoint's optimizer state ({format}, with fp32 "
    "parameters). To go on with it, load the checkpoint with this layer and save it again with "
    "{flags}."
)
_FLAGS = "--dist-ckpt-optim-fully-reshardable"
_OF_DP_RESHARDABLE = _ON_SAVING.format(format="dp_reshardable", flags=_FLAGS)
_OF_TORCH = _ON_SAVING.format(
    format="--ckpt-format torch",
    flags=f"--ckpt-format torch_dist --auto-detect-ckpt-format {_FLAGS}",
)


def with_switch_named(sharded: Callable) -> Callable:
    """Wrap ``DistributedOptimizer.sharded_param_state_dp_reshardable``: a save logs the advice."""

    def sharded_param_state_dp_reshardable(
        self, model_sharded_state_dict: Any, is_loading: bool = False, metadata: Any = None
    ) -> Any:
        if not is_loading and _has_fp32_parameters(self):
            log_once(_OF_DP_RESHARDABLE, logging.WARNING)
        return sharded(self, model_sharded_state_dict, is_loading, metadata)

    return sharded_param_state_dp_reshardable


def with_switch_of_a_file_named(save: Callable) -> Callable:
    """Wrap ``save_parameter_state``, of one optimizer or of several: it logs the advice."""

    def save_parameter_state(self, filename: str) -> None:
        if any(map(_has_fp32_parameters, getattr(self, "chained_optimizers", [self]))):
            log_once(_OF_TORCH, logging.WARNING)
        save(self, filename)

    return save_parameter_state


def _has_fp32_parameters(optimizer: Any) -> bool:
    """Beside 16-bit ones Megatron's layer has other buffers; alone Megatron cannot load them.

    It copies into a view of an fp32 parameter without `torch.no_grad`; see the wrappers of
    :mod:`.mixed_dtype_optimizers`.
    """
    return any(buffer.param_dtype == torch.float32 for buffer in getattr(optimizer, "buffers", ()))


def with_file_sizes_explained(load: Callable) -> Callable:
    """Wrap ``DistributedOptimizer.load_parameter_state_from_dp_zero``: its error gets a note."""

    def load_with_a_note(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(self, *args, **kwargs)
        except AssertionError as error:
            if _OF_A_FILE.search(str(error)):
                error.add_note(_NOTE_OF_A_FILE)
            raise

    return load_with_a_note


def with_bucket_sizes_explained(load: Callable) -> Callable:
    """Wrap ``TorchDistLoadShardedStrategy.load``: its error about a bucket gets a note."""

    def load_with_a_note(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return load(self, *args, **kwargs)
        except BaseException as error:  # torch's CheckpointException is no Exception
            if _OF_A_BUCKET.search(str(error)) and _NOTE not in getattr(error, "__notes__", ()):
                error.add_note(_NOTE)
            raise

    return load_with_a_note

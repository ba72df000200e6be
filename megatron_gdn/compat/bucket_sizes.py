"""Adds advice to the errors about an optimizer's state with other gradient buffers.

Megatron's default format of optimizer states (``dp_reshardable``) and the separate file of
``--ckpt-format torch`` hold gradient buffers, not tensors with names. A model with fp32 ``A_log``
and ``dt_bias`` has other buffers than a model that holds them in 16 bits. megatron-core 0.19
refuses such a file, and its error names only sizes. Where Megatron's own layer loads a file of ours
this package is not there to add anything.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

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

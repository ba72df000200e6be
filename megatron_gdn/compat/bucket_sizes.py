"""Says what to do where a ``dp_reshardable`` checkpoint holds buckets of other sizes.

Megatron's default format of optimizer states holds gradient buffers, not tensors with names. The
buffers of a model whose ``A_log`` and ``dt_bias`` are fp32 are others than those of a model that
holds them in 16 bits. megatron-core 0.19 refuses such a file with the shape of a bucket alone.
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
    "and the buffers of this model have other sizes. A layer wrote it that keeps A_log and dt_bias "
    "in 16 bits, as Megatron's own does, or another parallel layout. Load the checkpoint as it was "
    "written and save it again with --dist-ckpt-optim-fully-reshardable (in Python "
    "metadata={'distrib_optim_sharding_type': 'fully_reshardable'}): that file loads here. "
    "--no-load-optim loads the parameters alone."
)


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

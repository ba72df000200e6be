"""Lets megatron-core 0.19 list the tensors of a checkpoint that torch 2.15 has written.

torch 2.15 stores the strides of every tensor among its properties. Megatron hands all properties to
``torch.empty``, which has no such argument, so listing the tensors raises a ``TypeError``.
Megatron lists them for every ``load`` that checks keys (``strict`` other than its default), and the
layer for :func:`megatron_gdn.fp32_masters.load_fp32_masters`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def with_stored_strides(read: Callable) -> Callable:
    """Wrap ``TorchDistLoadShardedStrategy.load_tensors_metadata``: strides are left out.

    Nobody reads them there: each tensor is listed with its global shape.
    """

    def load_tensors_metadata(self, checkpoint_dir: Any, metadata: Any = None) -> Any:
        from megatron.core.dist_checkpointing.strategies import torch as strategy

        if metadata is None:
            metadata = strategy._get_filesystem_reader(checkpoint_dir).read_metadata()
        for stored in metadata.state_dict_metadata.values():
            if isinstance(stored, strategy.TensorStorageMetadata):
                vars(stored.properties).pop("strides", None)
        return read(self, checkpoint_dir, metadata)

    return load_tensors_metadata

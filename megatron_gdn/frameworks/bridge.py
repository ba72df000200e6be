"""Casts Megatron-Bridge's exports to the dtypes of the loaded files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from ..hf.safetensors_files import SafetensorsFolder


def in_published_dtypes(
    weights: Iterable[tuple[str, Tensor]], folder: str | Path
) -> Iterator[tuple[str, Tensor]]:
    """Cast each weight to the dtype of the tensor with the same name in ``folder``.

    Megatron-Bridge itself exports ``A_log`` and ``dt_bias`` of a bf16 model in fp32.

    Args:
        weights: the pairs (Hugging Face name, tensor) that
            ``AutoBridge.export_hf_weights`` yields.
        folder: the folder of safetensors files from which the model was loaded.

    Raises:
        KeyError: the folder has no tensor of a weight's name.
    """
    published = SafetensorsFolder(folder).specs
    for name, weight in weights:
        if name not in published:
            raise KeyError(
                f"{name} is not in {folder}, which has {len(published)} tensors. Give "
                "the folder that the model was loaded from."
            )
        yield name, weight.to(published[name].torch_dtype)

"""Megatron-Bridge's exports, in the dtypes of the files that were loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from torch import Tensor

from ..hf.safetensors_files import SafetensorsFolder


def in_published_dtypes(
    weights: Iterable[tuple[str, Tensor]], folder: str | Path
) -> Iterator[tuple[str, Tensor]]:
    """Weights under their Hugging Face names, each in the dtype that it has in ``folder``.

    Bridge exports a parameter in the dtype that it was trained in: ``A_log`` and ``dt_bias`` of a
    bf16 model are fp32.

    Args:
        weights: what ``AutoBridge.export_hf_weights`` yields.
        folder: what the model was loaded from, with safetensors files; their headers are read.

    Raises:
        KeyError: a weight that the folder does not have.
    """
    published = SafetensorsFolder(folder).specs
    for name, weight in weights:
        if name not in published:
            raise KeyError(
                f"{name} is not in {folder}, which has {len(published)} tensors. Give the folder "
                f"that the model was loaded from."
            )
        yield name, weight.to(published[name].torch_dtype)

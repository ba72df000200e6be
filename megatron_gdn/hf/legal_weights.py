"""Refuse Hugging Face tensors that are integers, would be rounded, or hold NaN or inf."""

from __future__ import annotations

import torch
from torch import Tensor

from .files.safetensors_reader import SafetensorsFolder
from .maps.tensor_map import HFRef, TensorMap
from .plan import Plan


def check_dtypes(folder: SafetensorsFolder, plan: Plan) -> None:
    """Check the dtype of every imported tensor; reads headers only.

    Raises:
        ValueError: a dtype that is not floating-point, or F64 for a tensor that Megatron holds
            in fp32.
    """
    for entry in plan.maps:
        for source in entry.sources:
            path = folder.folder / folder.file_of[source.key]
            entry.check_dtype(folder.spec(source.key).torch_dtype, f"{source.key} in {path}")


def read_pieces(folder: SafetensorsFolder, entry: TensorMap) -> list[Tensor]:
    """The tensors that ``entry`` is made of, in its order.

    Raises:
        ValueError: NaN or inf in one of them.
    """
    return [_read_finite(folder, source) for source in entry.sources]


def _read_finite(folder: SafetensorsFolder, source: HFRef) -> Tensor:
    piece = folder.read(source.key, source.expert)
    if not _is_finite(piece):
        expert = "" if source.expert is None else f" (expert {source.expert})"
        number = int(piece.isfinite().logical_not().sum())
        raise ValueError(
            f"{source.key}{expert} in {folder.folder / folder.file_of[source.key]} holds {number} "
            f"of {piece.numel()} values that are NaN or inf; weights must be finite. Download the "
            f"file again, or take a checkpoint from before the training diverged."
        )
    return piece


def _is_finite(piece: Tensor) -> bool:
    """One pass over the tensor and no copy of it; NaN and inf both show in the extremes."""
    if piece.numel() == 0:
        return True
    return all(bool(extreme.isfinite()) for extreme in torch.aminmax(piece))

"""Converts one layer's tensors between Hugging Face and Megatron."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..gdn.hf import gdn_layer_maps
from ..gdn.sizes import GDNDims
from ..kda.hf import kda_layer_maps
from ..kda.sizes import KDADims
from ..mamba2.hf import mamba2_layer_maps
from ..mamba2.sizes import Mamba2Dims
from ..mixers.tensor_map import TensorMap
from .quantised import refuse_quantised
from .safetensors_files import TensorSpec

# The class of a layer's sizes -> the function that makes the layer's maps.
_MAPS_FUNCTION_OF_SIZES: dict[type, Any] = {
    GDNDims: gdn_layer_maps,
    KDADims: kda_layer_maps,
    Mamba2Dims: mamba2_layer_maps,
}


def layer_from_hf(
    hf_state: Mapping[str, Tensor], dims: Any, tp_size: int = 1, **stored: Any
) -> list[dict[str, Tensor]]:
    """Convert a Hugging Face module's state dict to a Megatron layer's, one dict for
    each rank.

    Args:
        hf_state: the tensors of one Gated DeltaNet, Kimi Delta Attention or Mamba2
            mixer (of Mamba2 or NemotronH), in bf16, fp16, fp32 or fp64.
        dims: the whole layer's sizes: ``GDNDims``, ``KDADims`` or ``Mamba2Dims``.
        tp_size: number of tensor-parallel ranks.
        stored: how ``hf_state`` stores the layer, as keywords of
            :func:`..gdn.hf.gdn_layer_maps` (``storage``),
            :func:`..kda.hf.kda_layer_maps` (``family``, ``in_files``) or
            :func:`..mamba2.hf.mamba2_layer_maps` (``conv_bias``). Also
            ``zero_centered_gamma``, Megatron's ``layernorm_zero_centered_gamma``
            (default True; Mamba2 has no such keyword).

    Returns:
        for each rank, Megatron's parameter names and tensors: ``A_log``, ``dt_bias``,
        ``D`` and a zero-centred ``out_norm.weight`` are fp32, other tensors have the
        dtype of ``hf_state``.

    Raises:
        NotImplementedError: the weights are quantised, such as FP8, NVFP4, INT8 or
            GPTQ.
        ValueError: a tensor is missing, is unknown (such as a bias of a projection), or
            has a wrong shape or dtype. Or ``tp_size`` does not divide the heads or
            groups.
    """
    dims.shard(tp_size)  # raises if tp_size does not divide the heads or groups
    refuse_quantised({key: TensorSpec.of(tensor) for key, tensor in hf_state.items()})
    maps = _layer_maps(dims, stored)
    sources = {source.key: source for entry in maps for source in entry.sources}
    if hf_state.keys() != sources.keys():
        settings = ", ".join(f"{name}={value!r}" for name, value in stored.items())
        raise ValueError(
            f"a layer of {type(dims).__name__}({settings}) has {sorted(sources)}; "
            f"missing {sorted(sources.keys() - hf_state.keys())}, not known "
            f"{sorted(hf_state.keys() - sources.keys())}."
        )
    for key, source in sources.items():
        if tuple(hf_state[key].shape) != source.shape:
            raise ValueError(
                f"{key} has shape {tuple(hf_state[key].shape)}, but the layer's sizes "
                f"ask for {source.shape}."
            )
    ranks: list[dict[str, Tensor]] = [{} for _ in range(tp_size)]
    for entry in maps:
        for source in entry.sources:
            # may_round: fp64 is legal too, and is rounded for fp32 parameters
            entry.check_dtype(hf_state[source.key].dtype, source.key, may_round=True)
        full = entry.to_megatron([hf_state[source.key] for source in entry.sources])
        for state, shard in zip(ranks, entry.shards(full, tp_size), strict=True):
            state[entry.name] = shard
    return ranks


def layer_to_hf(
    ranks: Sequence[Mapping[str, Tensor]],
    dims: object,
    dtypes: Mapping[str, torch.dtype] | None = None,
    originals: Mapping[str, Tensor] | None = None,
    **stored: object,
) -> dict[str, Tensor]:
    """Convert a Megatron layer's state dicts to a Hugging Face module's state dict; the
    inverse of `layer_from_hf`.

    Args:
        ranks: one Megatron state dict for each tensor-parallel rank.
        dims, stored: as for `layer_from_hf`.
        dtypes: Hugging Face key -> the dtype to write. A key that is left out gets the
            dtype of ``originals``, or else Megatron's.
        originals: the imported Hugging Face tensors (see `TensorMap.to_hf`). Only a
            zero-centred norm's weight needs its original to be exported bit for bit.
    """
    state: dict[str, Tensor] = {}
    for entry in _layer_maps(dims, stored):
        full = entry.unshard([rank[entry.name] for rank in ranks])
        exported = entry.to_hf_by_source(full, dtypes or {}, originals or {})
        for source, tensor in exported.items():
            state[source.key] = tensor
    return state


def _layer_maps(dims: object, stored: dict[str, Any]) -> list[TensorMap]:
    """The maps of a layer of sizes ``dims``, without prefixes of keys; ``stored``: as
    for `layer_from_hf`."""
    if type(dims) not in _MAPS_FUNCTION_OF_SIZES:
        legal = ", ".join(cls.__name__ for cls in _MAPS_FUNCTION_OF_SIZES)
        raise TypeError(
            f"dims is a {type(dims).__name__}; give the sizes of a layer with "
            f"published weights: {legal}."
        )
    return _MAPS_FUNCTION_OF_SIZES[type(dims)]("", "", dims, **stored)

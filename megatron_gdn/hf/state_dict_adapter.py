"""State dicts of live Hugging Face style models to those of files and back, with fp32 gates.

These functions are for models that keep the Hugging Face parameter names (Transformers, Automodel)
and may hold ``A_log`` / ``dt_bias`` in the ``_fp32_params`` child. Megatron models go through
`load_hf_weights` and `state_dict_to_hf` instead.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from .fp32_contract import (
    has_gated_delta_net_fp32_checkpoint_contract,
    is_gated_delta_net_fp32_param_key,
    route_fp32_holder_key,
    strip_fp32_holder_key,
    upcast_gated_delta_net_fp32_state_tensor,
)


def to_file_state(
    state_dict: Mapping[str, object], exclude_key_regex: str | None = None
) -> dict[str, object]:
    """A model's state under file names: holder hidden, gate parameters fp32.

    Args:
        state_dict: the live state; tensors that need no cast are shared, not copied.
        exclude_key_regex: file keys that match (``re.match``) are left out, on request only.
    """
    pairs = (one_tensor_to_file(key, tensor) for key, tensor in state_dict.items())
    excluded = re.compile(exclude_key_regex) if exclude_key_regex else None
    return {key: value for key, value in pairs if not (excluded and excluded.match(key))}


def one_tensor_to_file(key: str, tensor: object) -> tuple[str, object]:
    """The file name and the file tensor of one entry of a live state."""
    return strip_fp32_holder_key(key), upcast_gated_delta_net_fp32_state_tensor(key, tensor)


def from_file_state(
    state_dict: Mapping[str, object], route_linear_attn_fp32_params: bool = True
) -> dict[str, object]:
    """A file's state under live names: gate parameters fp32 and, by default, in the holder.

    Args:
        state_dict: the file's state.
        route_linear_attn_fp32_params: False for a model whose gate parameters are bare.
    """
    return {
        route_fp32_holder_key(key) if route_linear_attn_fp32_params else key: (
            upcast_gated_delta_net_fp32_state_tensor(key, tensor)
        )
        for key, tensor in state_dict.items()
    }


def loaded_dtype(
    hf_config: object, key: str, file_dtype: torch.dtype, requested: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    """``(storage, compute)`` dtype of a parameter loaded from a file.

    Storage is ``promote_types(file dtype, requested)``, compute the file's own dtype. For a model
    under the fp32 contract the gate parameters count as fp32 even if the file's dtype differs.
    Non-floating tensors keep their dtype.
    """
    if not file_dtype.is_floating_point:
        return file_dtype, file_dtype
    if has_gated_delta_net_fp32_checkpoint_contract(
        hf_config
    ) and is_gated_delta_net_fp32_param_key(key):
        file_dtype = torch.float32
    return torch.promote_types(file_dtype, requested), file_dtype


def restore_loaded_dtypes(
    hf_config: object, state_dict: Mapping[str, Tensor], file_dtypes: Mapping[str, torch.dtype]
) -> dict[str, Tensor]:
    """Cast a loaded state to its `loaded_dtype` and note the compute dtype on each tensor.

    Args:
        hf_config: read for ``architectures``.
        state_dict: tensors as loaded; each tensor's current dtype counts as the requested one.
        file_dtypes: the dtype every key has in the file.

    Returns:
        The same keys; each tensor carries ``_hf_compute_dtype``.
    """
    restored = {}
    for key, tensor in state_dict.items():
        storage, compute = loaded_dtype(hf_config, key, file_dtypes[key], tensor.dtype)
        restored[key] = tensor.to(storage)
        restored[key]._hf_compute_dtype = compute
    return restored

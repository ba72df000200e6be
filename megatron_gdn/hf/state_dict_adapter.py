"""State dicts of live Hugging Face style models to those of files and back, with fp32 gates.

These functions are for models that keep the Hugging Face parameter names (Transformers, Automodel)
and may hold ``A_log`` / ``dt_bias`` in the ``_fp32_params`` child. Megatron models go through
`load_hf_weights` and `state_dict_to_hf` instead.

Which tensors of a Gated DeltaNet model are fp32 even if the file has another dtype.

``A_log`` and ``dt_bias`` make the decay ``g = -exp(A_log) * softplus(alpha + dt_bias)``. Rounding
``A_log`` to bf16 is a proportional error of the decay rate, and the recurrence compounds it. Some
models keep the two in a child module, the *holder* ``_fp32_params``, so that sharded mixed
precision can treat it as a unit of one dtype; files never show the holder.

Names and signatures are those of the published contract (nemo_automodel's gated_delta_net_fp32).
Unlike there, a parameter name must be the whole last component of the key: ``my_A_log`` is not
``A_log``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeGuard

import torch
from torch import Tensor


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


HOLDER_NAME = "_fp32_params"
FP32_GDN_PARAM_NAMES = ("A_log", "dt_bias")
GDN_FP32_CHECKPOINT_ARCHITECTURES = frozenset(
    (
        "Qwen3NextForCausalLM",
        "Qwen3_5ForCausalLM",
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeForCausalLM",
        "Qwen3_5MoeForConditionalGeneration",
    )
)

_LAYER = ".linear_attn."
_FP32_HOLDER_KEY_RE = re.compile(rf"(\.linear_attn)\.{HOLDER_NAME}\.")


def has_gated_delta_net_fp32_checkpoint_contract(hf_config: object) -> bool:
    """Whether ``hf_config.architectures`` names a model whose gate parameters are fp32.

    A config without the attribute, or with ``None`` in it, has no contract.
    """
    architectures = getattr(hf_config, "architectures", None) or ()
    return any(name in GDN_FP32_CHECKPOINT_ARCHITECTURES for name in architectures)


def is_gated_delta_net_fp32_param_key(
    key: str, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES
) -> bool:
    """Whether ``key`` names an fp32 parameter of a layer, in its holder or bare."""
    return _LAYER in key and key.rpartition(".")[2] in param_names


def route_fp32_holder_key(key: str, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES) -> str:
    """``...linear_attn.A_log`` to ``...linear_attn._fp32_params.A_log``; other keys unchanged.

    Inverse of `strip_fp32_holder_key` for the names in ``param_names``.
    """
    layer, found, name = key.rpartition(_LAYER)
    return f"{layer}{found}{HOLDER_NAME}.{name}" if found and name in param_names else key


def strip_fp32_holder_key(key: str) -> str:
    """``...linear_attn._fp32_params.X`` to ``...linear_attn.X``; other keys unchanged."""
    return _FP32_HOLDER_KEY_RE.sub(r"\1.", key)


def upcast_gated_delta_net_fp32_state_tensor(
    key: str, tensor: object, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES
) -> object:
    """``tensor`` in fp32 if ``key`` demands it; otherwise the same object.

    Integers, non-tensors and tensors that are already fp32 are returned unchanged.
    """
    if not is_gated_delta_net_fp32_param_key(key, param_names) or not _is_floating(tensor):
        return tensor
    return tensor if tensor.dtype == torch.float32 else tensor.to(torch.float32)


def forced_gated_delta_net_fp32_dtype_mapping(state_dict: Mapping[str, object]) -> dict[str, str]:
    """``{key: "F32"}`` for the floating fp32 parameters of ``state_dict``.

    An exporter that honours it writes these tensors as F32 even where the source file had BF16.
    """
    return {
        key: "F32"
        for key, tensor in state_dict.items()
        if is_gated_delta_net_fp32_param_key(key) and _is_floating(tensor)
    }


def _is_floating(tensor: object) -> TypeGuard[Tensor]:
    return isinstance(tensor, Tensor) and tensor.is_floating_point()

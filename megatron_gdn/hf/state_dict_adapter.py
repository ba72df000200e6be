"""Convert state dicts of Hugging Face models to state dicts of files and back, with
the gate parameters ``A_log`` and ``dt_bias`` in fp32.

The two stay fp32 even if a file has another dtype: rounding them changes the decay
``g = -exp(A_log) * softplus(alpha + dt_bias)``, and the recurrence compounds the
change. Some models keep the two in a child module, the *holder* ``_fp32_params``; keys
in files do not have the holder's name.

Names and signatures are those of nemo_automodel's gated_delta_net_fp32. Unlike in
nemo_automodel, a parameter's name must equal the last component of the key:
``my_A_log`` is not ``A_log``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

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

_LINEAR_ATTENTION = ".linear_attn."
_FP32_HOLDER_KEY_RE = re.compile(rf"(\.linear_attn)\.{HOLDER_NAME}\.")


def to_file_state(
    state_dict: Mapping[str, object], exclude_key_regex: str | None = None
) -> dict[str, object]:
    """A model's state under the keys of files, with gate parameters in fp32.

    Other tensors are not copied. Keys that match ``exclude_key_regex`` (``re.match``)
    are left out.
    """
    file_state = {}
    for key, tensor in state_dict.items():
        file_key = strip_fp32_holder_key(key)
        if exclude_key_regex and re.match(exclude_key_regex, file_key):
            continue
        file_state[file_key] = upcast_gated_delta_net_fp32_state_tensor(key, tensor)
    return file_state


def from_file_state(
    state_dict: Mapping[str, object], route_linear_attn_fp32_params: bool = True
) -> dict[str, object]:
    """A model's state from a file's state, with gate parameters in fp32.

    If ``route_linear_attn_fp32_params``, the model has a holder, whose name is put into
    the keys of gate parameters.
    """
    model_state = {}
    for key, tensor in state_dict.items():
        model_key = key
        if route_linear_attn_fp32_params:
            model_key = route_fp32_holder_key(key)
        model_state[model_key] = upcast_gated_delta_net_fp32_state_tensor(key, tensor)
    return model_state


def loaded_dtype(
    hf_config: object, key: str, file_dtype: torch.dtype, requested_dtype: torch.dtype
) -> tuple[torch.dtype, torch.dtype]:
    """The pair of dtypes ``(storage, compute)`` of a parameter loaded from a file.

    Storage is ``promote_types(file_dtype, requested_dtype)``, compute is
    ``file_dtype``. For a gate parameter of a model whose gates are fp32, ``file_dtype``
    counts as fp32. Integers are not cast.
    """
    if not file_dtype.is_floating_point:
        return file_dtype, file_dtype
    has_fp32_gates = has_gated_delta_net_fp32_checkpoint_contract(hf_config)
    if has_fp32_gates and is_gated_delta_net_fp32_param_key(key):
        file_dtype = torch.float32
    return torch.promote_types(file_dtype, requested_dtype), file_dtype


def restore_loaded_dtypes(
    hf_config: object,
    state_dict: Mapping[str, Tensor],
    file_dtypes: Mapping[str, torch.dtype],
) -> dict[str, Tensor]:
    """The tensors of ``state_dict`` cast to `loaded_dtype`'s storage dtype; their
    attribute ``_hf_compute_dtype`` is the compute dtype.

    ``file_dtypes``: the dtype of each key in the file. A tensor's own dtype is the
    requested dtype.
    """
    restored = {}
    for key, tensor in state_dict.items():
        storage, compute = loaded_dtype(hf_config, key, file_dtypes[key], tensor.dtype)
        restored[key] = tensor.to(storage)
        restored[key]._hf_compute_dtype = compute
    return restored


def has_gated_delta_net_fp32_checkpoint_contract(hf_config: object) -> bool:
    """Whether ``hf_config.architectures`` names a model whose gate parameters are
    fp32."""
    architectures = getattr(hf_config, "architectures", None) or ()
    return any(name in GDN_FP32_CHECKPOINT_ARCHITECTURES for name in architectures)


def is_gated_delta_net_fp32_param_key(
    key: str, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES
) -> bool:
    """Whether ``key`` names one of ``param_names`` in a linear attention or in its
    holder."""
    return _LINEAR_ATTENTION in key and key.rpartition(".")[2] in param_names


def route_fp32_holder_key(
    key: str, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES
) -> str:
    """Rename ``...linear_attn.A_log`` to ``...linear_attn._fp32_params.A_log``; keep
    other keys."""
    layer, separator, name = key.rpartition(_LINEAR_ATTENTION)
    if separator and name in param_names:
        return f"{layer}{separator}{HOLDER_NAME}.{name}"
    return key


def strip_fp32_holder_key(key: str) -> str:
    """Rename ``...linear_attn._fp32_params.X`` to ``...linear_attn.X``; keep other
    keys."""
    return _FP32_HOLDER_KEY_RE.sub(r"\1.", key)


def upcast_gated_delta_net_fp32_state_tensor(
    key: str, tensor: object, param_names: tuple[str, ...] = FP32_GDN_PARAM_NAMES
) -> object:
    """``tensor`` in fp32 if its dtype is floating-point and ``key`` names a gate
    parameter; else ``tensor`` itself."""
    is_gate = is_gated_delta_net_fp32_param_key(key, param_names)
    if is_gate and isinstance(tensor, Tensor) and tensor.is_floating_point():
        return tensor.to(torch.float32)
    return tensor


def forced_gated_delta_net_fp32_dtype_mapping(
    state_dict: Mapping[str, object],
) -> dict[str, str]:
    """``{key: "F32"}`` for the floating-point gate parameters, which an exporter writes
    as F32."""
    dtypes = {}
    for key, tensor in state_dict.items():
        is_gate = is_gated_delta_net_fp32_param_key(key)
        if is_gate and isinstance(tensor, Tensor) and tensor.is_floating_point():
            dtypes[key] = "F32"
    return dtypes

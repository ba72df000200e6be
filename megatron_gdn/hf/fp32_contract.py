"""Which tensors of a Gated DeltaNet model are fp32 even if the file has another dtype.

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

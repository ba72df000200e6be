"""The weights of a Gated DeltaNet in Hugging Face's files and in Megatron.

Megatron fuses six projections into one, with the rows of `GDNDims.layout`. Hugging Face
stores the projections "interleaved" (Qwen3-Next: for each key head [q | k | v of its
value heads | z]), "flat" (Qwen3.5, 3.6, 3.8, Qwen4-Exp) or "separate" (OLMo Hybrid). b
is the write strength (beta), a the decay input (alpha). Convolution channels are [q | k
| v]. Files of "separate" layers have three convolutions, which transformers' module
joins ("separate, one conv"). The norm and the output projection of "separate" layers
are named o_norm and o_proj.

Qwen4-Exp's layers need the config's ``output_gate_type`` as the option
`output_gate_activation`, OLMo Hybrid's layers need `allow_neg_eigval` and
``layernorm_epsilon=1e-5``.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ..mixers.tensor_map import TensorMap, conv_map, rows_by_group, tensor_map
from .sizes import GDNDims

# how files or modules of Hugging Face store the projections
Storage = Literal["interleaved", "flat", "separate", "separate, one conv"]

_SEPARATE_PROJECTIONS = {
    "q_proj": ("query",),
    "k_proj": ("key",),
    "v_proj": ("value",),
    "g_proj": ("z",),
    "b_proj": ("beta",),
    "a_proj": ("alpha",),
}
# For each storage: the names of its tensors, and the sections of the fused projection
# that each tensor holds.
PROJECTIONS: dict[Storage, dict[str, tuple[str, ...]]] = {
    "interleaved": {
        "in_proj_qkvz": ("query", "key", "value", "z"),
        "in_proj_ba": ("beta", "alpha"),
    },
    "flat": {
        "in_proj_qkv": ("query", "key", "value"),
        "in_proj_z": ("z",),
        "in_proj_b": ("beta",),
        "in_proj_a": ("alpha",),
    },
    "separate": _SEPARATE_PROJECTIONS,
    "separate, one conv": _SEPARATE_PROJECTIONS,
}


def qkvz_rows(dims: GDNDims) -> list[int]:
    """How many rows of q, k, v and z ``in_proj_qkvz`` has for each key head."""
    value_rows = dims.value_heads_per_key_head * dims.value_head_dim
    return [dims.key_head_dim, dims.key_head_dim, value_rows, value_rows]


def ba_rows(dims: GDNDims) -> list[int]:
    """How many rows of b and a ``in_proj_ba`` has for each key head."""
    return [dims.value_heads_per_key_head] * 2


def interleaved_rows(dims: GDNDims) -> Tensor:
    """For each row of the fused projection, its index in
    ``cat(in_proj_qkvz, in_proj_ba)``.

    `rows_by_group` gives the fused projection's row for each interleaved row;
    ``argsort`` inverts this permutation.
    """
    G = dims.num_key_heads
    widths = dims.layout.widths  # of query, key, value, z, beta, alpha
    qkvz = rows_by_group(widths[:4], G).argsort()
    ba = rows_by_group(widths[4:], G).argsort()
    return torch.cat([qkvz, len(qkvz) + ba])


def gdn_layer_maps(
    prefix: str,
    hf_prefix: str,
    dims: GDNDims,
    storage: Storage,
    zero_centered_gamma: bool = True,
) -> list[TensorMap]:
    """The maps between the two formats, for every tensor of one layer except its input
    norm.

    Args:
        prefix: start of Megatron's keys, such as ``decoder.layers.0.self_attention.``.
        hf_prefix: start of Hugging Face's keys, such as
            ``model.layers.0.linear_attn.``.
        storage: a key of `PROJECTIONS`.
        zero_centered_gamma: ``config.layernorm_zero_centered_gamma`` of the Megatron
            model. If True, Megatron's ``out_norm.weight`` is ``norm.weight - 1``.
    """
    D = dims.hidden_size
    H = dims.num_value_heads
    if storage.startswith("separate"):
        norm = "o_norm"
        out = "o_proj"
    else:
        norm = "norm"
        out = "out_proj"
    width_of = dict(zip(dims.layout.names, dims.layout.widths, strict=True))
    projections = {}  # shapes by Hugging Face's keys
    for name, sections in PROJECTIONS[storage].items():
        rows_of_tensor = sum(width_of[section] for section in sections)
        projections[f"{hf_prefix}{name}.weight"] = (rows_of_tensor, D)
    # In all storages but "interleaved", the concatenated tensors are the fused
    # projection.
    if storage == "interleaved":
        rows = interleaved_rows(dims)
    else:
        rows = None
    taps = dims.conv_kernel_dim
    in_three = storage == "separate"
    norm_weight = {f"{hf_prefix}{norm}.weight": (dims.value_head_dim,)}
    return [
        tensor_map(
            f"{prefix}in_proj.weight",
            projections,
            shard_dim=0,
            rows=rows,
            sections=dims.layout.widths,
        ),
        conv_map(f"{prefix}conv1d.weight", hf_prefix, dims.layout, taps, in_three),
        tensor_map(
            f"{prefix}A_log", {f"{hf_prefix}A_log": (H,)}, shard_dim=0, fp32=True
        ),
        tensor_map(
            f"{prefix}dt_bias", {f"{hf_prefix}dt_bias": (H,)}, shard_dim=0, fp32=True
        ),
        tensor_map(
            f"{prefix}out_norm.weight", norm_weight, shift=-float(zero_centered_gamma)
        ),
        tensor_map(
            f"{prefix}out_proj.weight",
            {f"{hf_prefix}{out}.weight": (D, dims.v_dim)},
            shard_dim=1,
        ),
    ]

"""One Gated DeltaNet layer: Hugging Face tensors to Megatron's, whole or in shards, and back.

Megatron fuses six projections into one, with the rows of `GDNDims.layout`. Hugging Face has three
ways to store them:

  interleaved (Qwen3-Next)   in_proj_qkvz: for each key head  [q | k | v of its r value heads | z]
                             in_proj_ba:   for each key head  [b of its r value heads | a]
  flat (Qwen3.5, 3.6, 3.8,   in_proj_qkv: [q | k | v], in_proj_z, in_proj_b, in_proj_a
    Qwen4-Exp)
  separate (OLMo Hybrid)     q_proj, k_proj, v_proj, g_proj (z), b_proj, a_proj

b is the write strength (beta), a the decay input (alpha). Convolution channels are [q | k | v] in
every family; files of "separate" layers have three tensors of them (transformers joins them in
memory: q_conv1d, k_conv1d, v_conv1d, or conv1d alone), and call norm and out_proj o_norm and
o_proj.

What a weight means is not in it: build Qwen4-Exp's layers with its ``output_gate_type`` as
`output_gate_activation`, OLMo Hybrid's with `allow_neg_eigval` and ``layernorm_epsilon=1e-5``.
"""

# G key heads, R value heads per key head, K key dim, V value dim, D hidden, W conv width.

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from ...mixers.gdn.sizes import GDNDims
from .layer_maps import hf_from_ranks, ranks_from_hf
from .tensor_map import HFRef, TensorMap, conv_map

Storage = Literal["interleaved", "flat", "separate", "separate, one conv"]


def fuse_interleaved(pieces: Sequence[Tensor], dims: GDNDims) -> Tensor:
    """``(qkvz [2GK + 2GRV, D], ba [2GR, D])`` to the fused projection ``[q|k|v|z|beta|alpha]``."""
    qkvz, ba = pieces
    grouped_qkvz = qkvz.reshape(dims.num_key_heads, -1, qkvz.shape[-1])
    grouped_ba = ba.reshape(dims.num_key_heads, -1, ba.shape[-1])
    sections = [*grouped_qkvz.split(qkvz_rows(dims), 1), *grouped_ba.split(ba_rows(dims), 1)]
    dtype = torch.promote_types(qkvz.dtype, ba.dtype)
    return torch.cat([section.flatten(0, 1).to(dtype) for section in sections])


def unfuse_interleaved(in_proj: Tensor, dims: GDNDims) -> tuple[Tensor, Tensor]:
    """The inverse of `fuse_interleaved`."""
    sections = in_proj.split(dims.layout.widths)
    grouped = [s.reshape(dims.num_key_heads, -1, in_proj.shape[-1]) for s in sections]
    return torch.cat(grouped[:4], 1).flatten(0, 1), torch.cat(grouped[4:], 1).flatten(0, 1)


def qkvz_rows(dims: GDNDims) -> list[int]:
    value_rows = dims.value_heads_per_key_head * dims.value_head_dim
    return [dims.key_head_dim, dims.key_head_dim, value_rows, value_rows]


def ba_rows(dims: GDNDims) -> list[int]:
    return [dims.value_heads_per_key_head] * 2


def is_separate(storage: Storage) -> bool:
    return storage.startswith("separate")


def projection_map(prefix: str, hf_prefix: str, dims: GDNDims, storage: Storage) -> TensorMap:
    """The map of ``in_proj.weight``; ``prefix`` and ``hf_prefix`` end in a dot."""
    layout, hidden = dims.layout, dims.hidden_size
    width = dict(zip(layout.names, layout.widths, strict=True))
    if storage == "interleaved":
        rows = {
            "in_proj_qkvz": width["query"] + width["key"] + width["value"] + width["z"],
            "in_proj_ba": width["beta"] + width["alpha"],
        }
        join, split = partial(fuse_interleaved, dims=dims), partial(unfuse_interleaved, dims=dims)
    elif is_separate(storage):
        names = ("q_proj", "k_proj", "v_proj", "g_proj", "b_proj", "a_proj")
        rows = dict(zip(names, layout.widths, strict=True))
        join = split = None  # the fused projection cut in six
    else:
        rows = {
            "in_proj_qkv": layout.conv_width,
            "in_proj_z": width["z"],
            "in_proj_b": width["beta"],
            "in_proj_a": width["alpha"],
        }
        # Flat storage is the fused projection cut in four.
        join = split = None
    return TensorMap(
        names=(f"{prefix}in_proj.weight",),
        sources=tuple(HFRef(f"{hf_prefix}{n}.weight", (r, hidden)) for n, r in rows.items()),
        join=join,
        split=split,
        shard_dim=0,
        sections=layout.widths,
        section_names=layout.names,
    )


def gdn_layer_maps(
    prefix: str,
    hf_prefix: str,
    dims: GDNDims,
    storage: Storage,
    zero_centered_gamma: bool = True,
) -> list[TensorMap]:
    """The maps of every parameter of one layer except its input norm.

    Args:
        prefix: Megatron's, as in ``decoder.layers.0.self_attention.``.
        hf_prefix: Hugging Face's, as in ``model.layers.0.linear_attn.``.
        dims: the whole layer's sizes.
        storage: how the file stores the projections.
        zero_centered_gamma: ``config.layernorm_zero_centered_gamma`` of the Megatron model; then
            ``out_norm.weight`` is ``norm.weight - 1``.
    """
    heads, value_dim = dims.num_value_heads, dims.value_head_dim

    norm, out = ("o_norm", "o_proj") if is_separate(storage) else ("norm", "out_proj")

    def one(name: str, hf_name: str, shape: tuple[int, ...], **kwargs) -> TensorMap:
        return TensorMap(
            names=(prefix + name,), sources=(HFRef(hf_prefix + hf_name, shape),), **kwargs
        )

    return [
        projection_map(prefix, hf_prefix, dims, storage),
        conv_map(prefix, hf_prefix, dims.layout, dims.conv_kernel_dim, storage == "separate"),
        one("A_log", "A_log", (heads,), shard_dim=0, fp32=True),
        one("dt_bias", "dt_bias", (heads,), shard_dim=0, fp32=True),
        one(
            "out_norm.weight",
            f"{norm}.weight",
            (value_dim,),
            shift=-1.0 if zero_centered_gamma else 0.0,
        ),
        one("out_proj.weight", f"{out}.weight", (dims.hidden_size, dims.v_dim), shard_dim=1),
    ]


def gdn_layer_from_hf(
    hf_state: Mapping[str, Tensor],
    dims: GDNDims,
    storage: Storage,
    tp_size: int = 1,
    zero_centered_gamma: bool = True,
) -> list[dict[str, Tensor]]:
    """A ``linear_attn`` module's state dict to the layer's, one dict for each rank.

    Args:
        hf_state: the tensors of ``storage``: projections, convolution, ``A_log``, ``dt_bias``,
            norm and output projection, in bf16, fp16, fp32 or fp64.
        dims: the whole layer's sizes.
        storage: how ``hf_state`` stores the projections.
        tp_size: number of tensor-parallel ranks.
        zero_centered_gamma: as in the Megatron config.

    Returns:
        Megatron parameter names to tensors: ``A_log`` and ``dt_bias`` fp32, a shifted
        ``out_norm.weight`` fp32, all others in the file's dtype.

    Raises:
        ValueError: a tensor is missing, unknown or of the wrong shape or dtype, or heads do not
            split.
    """
    dims.shard(tp_size)
    maps = gdn_layer_maps("", "", dims, storage, zero_centered_gamma)
    return ranks_from_hf(maps, hf_state, tp_size, f"a {storage} layer")


def gdn_layer_to_hf(
    ranks: Sequence[Mapping[str, Tensor]],
    dims: GDNDims,
    storage: Storage,
    dtypes: Mapping[str, torch.dtype] | None = None,
    originals: Mapping[str, Tensor] | None = None,
    zero_centered_gamma: bool = True,
) -> dict[str, Tensor]:
    """The inverse of `gdn_layer_from_hf`.

    Args:
        ranks: one Megatron state dict for each tensor-parallel rank.
        dims, storage, zero_centered_gamma: as in the import.
        dtypes: the dtype to write each Hugging Face tensor in; default the tensor's own.
        originals: Hugging Face tensors as imported (see `TensorMap.to_hf`); ``norm.weight`` is
            the one that needs it.
    """
    maps = gdn_layer_maps("", "", dims, storage, zero_centered_gamma)
    return hf_from_ranks(maps, ranks, dtypes, originals)

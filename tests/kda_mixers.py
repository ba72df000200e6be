"""Kimi Delta Attentions to be held to laws: how they are built and shared out."""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_gdn import KimiDeltaAttention, KimiDeltaAttentionSubmodules
from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.mixers.init import take_share
from megatron_gdn.ops.layout import layout_of_in_proj
from tests.mamba_mixers import alone, randomise_
from tests.parallel import make_config, parallel

LOCAL = KimiDeltaAttentionSubmodules(
    in_proj=ColumnParallelLinear, out_norm=TorchRMSNorm, out_proj=RowParallelLinear
)
SIZES = {
    "hidden_size": 20,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 5,
    "linear_value_head_dim": 6,
    "linear_conv_kernel_dim": 4,
}


def kda_config(**changes):
    return make_config(**{**SIZES, **changes})


def build(config, groups, **options) -> KimiDeltaAttention:
    """In ``config.params_dtype``; of fp64 all of it, so that laws are held to fp64's rounding."""
    mixer = KimiDeltaAttention(config, LOCAL, pg_collection=groups, **options)
    return mixer.double() if config.params_dtype == torch.float64 else mixer


def share_of(name: str, whole: torch.Tensor, mixer: KimiDeltaAttention) -> torch.Tensor:
    """This tensor-parallel rank's share of a whole parameter (or of its gradient)."""
    if name == "out_norm.weight":
        return whole
    dims = mixer.global_dims
    dim, sections = {
        "in_proj.weight": (0, layout_of_in_proj(dims).widths),
        "conv1d_weight": (0, dims.layout.conv_widths),
        "conv1d_bias": (0, dims.layout.conv_widths),
        "out_proj.weight": (1, (dims.layout.mixed_width,)),
    }.get(name, (0, (whole.shape[0],)))
    return take_share(whole, dim, sections, mixer.tp_group.rank(), mixer.tp_group.size())


def whole_mixer(config, **options) -> KimiDeltaAttention:
    """On one rank, the same on all."""
    torch.manual_seed(7)
    mixer = build(config, alone(), **options)
    randomise_(mixer)
    return mixer


def parameters_of_kda(sizes) -> int:
    with parallel():
        return sum(p.numel() for p in whole_mixer(kda_config(**sizes)).parameters())

"""Kimi Delta Attentions to be held to laws: how they are built and shared out."""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_gdn import KimiDeltaAttention, KimiDeltaAttentionSubmodules
from megatron_gdn.compat.torch_norm import TorchRMSNorm
from tests.mamba_mixers import randomise_
from tests.parallel import alone, make_config, parallel

LOCAL = KimiDeltaAttentionSubmodules(
    in_proj=ColumnParallelLinear, out_norm=TorchRMSNorm, out_proj=RowParallelLinear
)
SIZES = {
    "hidden_size": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 5, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def kda_config(**changes):
    return make_config(**{**SIZES, **changes})


def build(config, groups, **options) -> KimiDeltaAttention:
    """In ``config.params_dtype``; of fp64 all of it, so that laws are held to fp64's rounding."""
    options = {"layer_number": 1, **options}
    mixer = KimiDeltaAttention(config, LOCAL, pg_collection=groups, **options)
    return mixer.double() if config.params_dtype == torch.float64 else mixer


def whole_mixer(config, **options) -> KimiDeltaAttention:
    """On one rank, the same on all."""
    torch.manual_seed(7)
    mixer = build(config, alone(), **options)
    randomise_(mixer)
    return mixer


def parameters_of_kda(sizes) -> int:
    """How many numbers a layer of these sizes has; run on a rank."""
    with parallel():
        return sum(p.numel() for p in whole_mixer(kda_config(**sizes)).parameters())

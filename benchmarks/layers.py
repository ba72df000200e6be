"""The layers under measurement: megatron-core's own, and ours, from the same local linears.

Legend: S seq, B batch, D hidden.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_gdn.ops.documents import Documents
from megatron_gdn.ops.fused import GatedNorm, HeadSizes, gated_delta_mixer, resolve_core
from megatron_gdn.ops.fused.recompute import RefilledOutput

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """One batch shape; ``documents`` > 0 packs that many unequal documents into one row."""

    name: str
    batch: int
    tokens: int
    documents: int = 0

    def offsets(self) -> list[int] | None:
        """Unequal lengths that add up: proportional to 1, 2, .., N, none a multiple of 64."""
        if not self.documents:
            return None
        total = self.documents * (self.documents + 1) // 2
        ends = [i * (i + 1) // 2 * self.tokens // total | 1 for i in range(1, self.documents)]
        return [0, *ends, self.tokens]


CASES = {
    case.name: case
    for case in (
        Case("1x32768", 1, 32768),
        Case("1x8192", 1, 8192),
        Case("8x4096", 8, 4096),
        Case("thd32768", 1, 32768, documents=32),
    )
}


def start_megatron() -> None:
    from megatron.core import parallel_state, tensor_parallel

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "nccl" if DEVICE == "cuda" else "gloo",
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
        )
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def transformer_config(hidden: int, sizes: HeadSizes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=16,
        linear_num_key_heads=sizes.key_heads,
        linear_num_value_heads=sizes.value_heads,
        linear_key_head_dim=sizes.key_dim,
        linear_value_head_dim=sizes.value_dim,
        linear_conv_kernel_dim=4,
        normalization="RMSNorm",
        activation_func=torch.nn.functional.silu,
        bf16=True,
        params_dtype=torch.bfloat16,
        gradient_accumulation_fusion=False,
        add_bias_linear=False,
    )


def _submodules(kind):
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return kind(in_proj=ColumnParallelLinear, out_norm=WrappedTorchNorm, out_proj=RowParallelLinear)


def upstream_layer(hidden: int, sizes: HeadSizes) -> nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    return (
        GatedDeltaNet(
            transformer_config(hidden, sizes),
            _submodules(GatedDeltaNetSubmodules),
            layer_number=1,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
        )
        .to(DEVICE)
        .bfloat16()
    )


def package_layer(hidden: int, sizes: HeadSizes) -> nn.Module:
    """``megatron_gdn.layer.GatedDeltaNet`` as a launch builds it."""
    from megatron_gdn.layer import GatedDeltaNet, GatedDeltaNetSubmodules

    return (
        GatedDeltaNet(
            transformer_config(hidden, sizes), _submodules(GatedDeltaNetSubmodules), layer_number=1
        )
        .to(DEVICE)
        .bfloat16()
    )


class MixerLayer(nn.Module):
    """in_proj, the fused mixer and out_proj, with the parameters of an upstream layer."""

    def __init__(self, upstream: nn.Module, sizes: HeadSizes, core: str, recompute: bool) -> None:
        super().__init__()
        self.in_proj, self.out_proj = upstream.in_proj, upstream.out_proj
        self.conv_weight = upstream.conv1d.weight
        self.gamma, self.eps = upstream.out_norm.weight, upstream.config.layernorm_epsilon
        self.A_log = nn.Parameter(upstream.A_log.detach().float())
        self.dt_bias = nn.Parameter(upstream.dt_bias.detach().float())
        self.sizes, self.recompute = sizes, recompute
        self.core, self.reason = resolve_core(
            core, device=DEVICE, dtype=torch.bfloat16, sizes=sizes
        )

    def forward(self, x: Tensor, documents: Documents | None) -> Tensor:
        proj, _ = self.in_proj(x)
        refilled = RefilledOutput() if self.recompute else None
        mixed = gated_delta_mixer(
            proj, self.conv_weight, None, self.A_log, self.dt_bias, self.sizes,
            core=self.core, norm=GatedNorm(self.gamma, self.eps), documents=documents,
            recompute_qkv=self.recompute, refilled=refilled,
        )  # fmt: skip
        out, _ = self.out_proj(mixed)
        if refilled is not None:
            refilled.drop_until_backward_of(out)
        return out


def packed_params(case: Case):
    from megatron.core.packed_seq_params import PackedSeqParams

    offsets = case.offsets()
    if offsets is None:
        return None
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    longest = max(b - a for a, b in zip(offsets, offsets[1:], strict=False))
    return PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=cu_seqlens, cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest, max_seqlen_kv=longest,
    )  # fmt: skip

"""The layers under measurement: megatron-core's own, and ours, from the same linears.

Linears are Megatron's local ones, or Transformer Engine's, which add their weights'
gradients into fp32 buffers (`main_grad`), as Megatron's launches do.

Legend: S seq, B batch, D hidden.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from megatron_gdn.gdn.flash_qla.plan import kernels
from megatron_gdn.ops.delta_rule.base import HeadSizes
from megatron_gdn.ops.documents import Documents

LINEARS = ("local", "te")
GATES = ("fast", "slow")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Case:
    """One batch shape; ``documents`` > 0 packs that many unequal documents into one
    row."""

    name: str
    batch: int
    tokens: int
    documents: int = 0

    def offsets(self) -> list[int] | None:
        """Unequal lengths that add up: proportional to 1, 2, .., N, none a multiple of
        64."""
        if not self.documents:
            return None
        total = self.documents * (self.documents + 1) // 2
        ends = [
            i * (i + 1) // 2 * self.tokens // total | 1
            for i in range(1, self.documents)
        ]
        return [0, *ends, self.tokens]


CASES = {
    case.name: case
    for case in (
        Case("1x32768", 1, 32768),
        Case("1x8192", 1, 8192),
        Case("8x4096", 8, 4096),
        Case("thd32768", 1, 32768, documents=32),
        Case("1x4096", 1, 4096),
        Case("4x4096", 4, 4096),
    )
}


def start_megatron() -> None:
    from megatron.core import parallel_state, tensor_parallel

    if DEVICE == "cpu":
        from megatron_gdn.compat.one_process import run_megatron_on_cpu

        run_megatron_on_cpu()
    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group(
            "nccl" if DEVICE == "cuda" else "gloo",
            store=torch.distributed.HashStore(),
            rank=0,
            world_size=1,
        )
        parallel_state.initialize_model_parallel()
    tensor_parallel.model_parallel_cuda_manual_seed(0)


def transformer_config(
    hidden: int,
    sizes: HeadSizes,
    cp: int = 1,
    deterministic: bool = False,
    linears: str = "local",
):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        context_parallel_size=cp,
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
        gradient_accumulation_fusion=linears == "te",
        add_bias_linear=False,
        deterministic_mode=deterministic,
    )


def _submodules(kind, linears: str = "local"):
    if linears == "te":
        from megatron.core.extensions import transformer_engine as te

        return kind(
            in_proj=te.TELayerNormColumnParallelLinear,
            out_norm=te.TENorm,
            out_proj=te.TERowParallelLinear,
        )
    from megatron.core.tensor_parallel.layers import (
        ColumnParallelLinear,
        RowParallelLinear,
    )
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    return kind(
        in_proj=ColumnParallelLinear,
        out_norm=WrappedTorchNorm,
        out_proj=RowParallelLinear,
    )


def upstream_layer(
    hidden: int,
    sizes: HeadSizes,
    cp: int = 1,
    deterministic: bool = False,
    linears: str = "local",
) -> nn.Module:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules

    if DEVICE == "cuda" and os.environ.get("FLA_FLASH_QLA") != "0":
        # fences FlashQLA's kernels for this layer too: ours would, sooner or later
        kernels()
    return (
        GatedDeltaNet(
            transformer_config(hidden, sizes, cp, deterministic, linears),
            _submodules(GatedDeltaNetSubmodules, linears),
            layer_number=1,
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(["tp", "cp"]),
        )
        .to(DEVICE)
        .bfloat16()
    )


def our_layer(
    hidden: int,
    sizes: HeadSizes,
    backend: str,
    recompute: str | None = None,
    cp: int = 1,
    deterministic: bool = False,
    linears: str = "local",
    **options,
) -> nn.Module:
    """``megatron_gdn.GatedDeltaNet`` as a launch builds it, from the same linears."""
    from megatron_gdn import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron_gdn.compat.torch_norm import TorchRMSNorm

    submodules = _submodules(GatedDeltaNetSubmodules, linears)
    if linears == "local":
        submodules.out_norm = TorchRMSNorm
    layer = GatedDeltaNet(
        transformer_config(hidden, sizes, cp, deterministic, linears),
        submodules,
        layer_number=1,
        backend=backend,
        recompute=recompute,
        **options,
    )
    return layer.to(DEVICE).bfloat16()


# With its initial weights a layer's output is a sixth of its input in size (hidden
# 2048). The gate shrinks with the input, so after four layers nothing is left to
# compare. This factor on out_proj keeps the output near the input's size for three
# layers (1.8); after six it is 42 times as large.
_LARGER = 6.5


def row_of(build: Callable[[], nn.Module], layers: int) -> nn.ModuleList:
    """``layers`` results of ``build``; if more than one, each with a larger
    ``out_proj``."""
    row = nn.ModuleList()
    for _ in range(layers):
        row.append(build())
    if layers > 1:
        with torch.no_grad():
            for layer in row:
                layer.out_proj.weight.mul_(_LARGER)
    return row


def slow_gates(layer: nn.Module) -> None:
    """Decays of exp(-1/4096) a token: a state lives over some 4,096 tokens."""
    with torch.no_grad():
        layer.A_log.fill_(math.log(1 / 4096 / math.log(2)))
        layer.dt_bias.zero_()
        alpha = layer.in_proj.weight[-layer.A_log.numel() :]
        alpha.zero_()  # softplus(0) = log 2 for every token


def accumulate(module: nn.Module) -> None:
    """Give every parameter the fp32 buffer into which Transformer Engine adds its
    gradient."""
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)  # pyright: ignore[reportAttributeAccessIssue]


def through(row: nn.ModuleList, x: torch.Tensor, packed) -> torch.Tensor:
    """``x`` through the layers, one after the other."""
    for layer in row:
        x = layer(x, None, packed_seq_params=packed)[0]
    return x


def thd(offsets: list[int] | None):
    """Megatron's description of documents between these offsets; None for an unpacked
    batch."""
    from megatron.core.packed_seq_params import PackedSeqParams

    if offsets is None:
        return None
    cu_seqlens = torch.tensor(offsets, dtype=torch.int32, device=DEVICE)
    longest = max(b - a for a, b in zip(offsets, offsets[1:], strict=False))
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


OPTIONS = {
    "ours": {},
    "ours-recompute": {"recompute": "light"},
    "ours-bf16": {"rule_operands": "bf16"},
}


def forwards(case: Case, layers: list[str], args, sizes: HeadSizes, count: int = 1):
    """``{layer name: forward}``, and the input they share; ``count``: of layers in a
    row."""
    x = torch.randn(
        case.tokens, case.batch, args.hidden, device="cuda", dtype=torch.bfloat16
    )
    x.requires_grad_()
    offsets = case.offsets()
    documents = None
    if offsets is not None:
        documents = Documents.from_cu_seqlens(offsets, case.tokens, device="cuda")
    packed = thd(case.offsets())
    runs = {}
    modules = {}
    for name in layers:
        linears = getattr(args, "linears", "local")
        if name == "upstream":
            build = partial(upstream_layer, args.hidden, sizes, linears=linears)
        else:
            options = OPTIONS[name]
            build = partial(
                our_layer, args.hidden, sizes, args.core, linears=linears, **options
            )
        row = row_of(build, count)
        if getattr(args, "gates", "fast") == "slow":
            for layer in row:
                slow_gates(layer)
        if linears == "te":
            accumulate(row)
        runs[name] = lambda row=row: through(row, x, packed)
        modules[name] = row if count > 1 else row[0]
    return runs, modules, x, documents


def with_backward(run, module, x):
    grad = torch.randn_like(run())
    parameters = list(module.parameters())

    def both() -> None:
        x.grad = None
        for parameter in parameters:
            parameter.grad = None
        run().backward(grad)

    return both

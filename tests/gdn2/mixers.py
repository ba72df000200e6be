"""Gated DeltaNet-2 layers to be held to laws: how they are built, and written out in fp64."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_gdn import GatedDeltaNet2, GatedDeltaNetSubmodules
from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.gdn2.rule import GDN2Inputs
from megatron_gdn.ops.elementwise import l2norm
from tests.gdn2.oracle import recurrent_gdn2
from tests.mamba_mixers import randomise_
from tests.parallel import alone, make_config

LOCAL = GatedDeltaNetSubmodules(
    in_proj=ColumnParallelLinear, out_norm=TorchRMSNorm, out_proj=RowParallelLinear
)
SIZES = {
    "hidden_size": 20, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 5, "linear_value_head_dim": 6, "linear_conv_kernel_dim": 4,
}  # fmt: skip


def gdn2_config(**changes):
    return make_config(**{**SIZES, **changes})


def build(config, groups, **options) -> GatedDeltaNet2:
    """In ``config.params_dtype``; of fp64 all of it, so that laws are held to fp64's rounding."""
    options = {"layer_number": 1, **options}
    mixer = GatedDeltaNet2(config, LOCAL, pg_collection=groups, **options)
    return mixer.double() if config.params_dtype == torch.float64 else mixer


def whole_mixer(config, **options) -> GatedDeltaNet2:
    """On one rank, the same on all."""
    torch.manual_seed(7)
    mixer = build(config, alone(), **options)
    randomise_(mixer)
    return mixer


def written_out(mixer, x, lengths):
    """The whole mixer token by token in fp64, differentiable."""
    p = {name: t.detach().clone().requires_grad_() for name, t in mixer.named_parameters()}
    layout, sizes = mixer.dims.layout, mixer.dims
    G, H = sizes.num_key_heads, sizes.num_value_heads
    outputs = []
    for u in x.split([n for n in lengths if n]):
        rows = u @ p["in_proj.weight"].T
        if "in_proj.bias" in p:
            rows = rows + p["in_proj.bias"]
        of = dict(zip(layout.names, rows.transpose(0, 1).split(layout.widths, -1), strict=True))
        qkv = torch.cat([of["query"], of["key"], of["value"]], -1)
        qkv = F.pad(qkv.mT, (sizes.conv_kernel_dim - 1, 0))
        qkv = F.conv1d(qkv, p["conv1d.weight"], p.get("conv1d.bias"), groups=qkv.shape[1])
        q, k, v = F.silu(qkv).mT.split(layout.conv_widths, -1)
        q, k = (t.unflatten(-1, (G, -1)) for t in (q, k))
        q, k = (l2norm(t) for t in (q, k)) if mixer.use_qk_l2norm else (q, k)
        softplus = F.softplus(of["f"] + p["dt_bias"]).unflatten(-1, (G, -1))
        g = -p["A_log"].exp()[:, None] * softplus
        b, w = (of[n].sigmoid().unflatten(-1, (heads, -1)) for n, heads in (("b", G), ("w", H)))
        o, _ = recurrent_gdn2(GDN2Inputs(q, k, v.unflatten(-1, (H, -1)), g, b, w))
        normed = o * (o.square().mean(-1, keepdim=True) + mixer.out_norm.eps).rsqrt()
        y = normed * p["out_norm.weight"] * F.silu(of["z"].unflatten(-1, (H, -1)))
        y = y.flatten(2) @ p["out_proj.weight"].T
        y = y + p["out_proj.bias"] if "out_proj.bias" in p else y
        outputs.append(y.transpose(0, 1))
    return torch.cat(outputs), p

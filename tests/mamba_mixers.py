"""Mamba2 mixers to be held to laws: how they are built, shared out, and written out in fp64."""

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from megatron_gdn import Mamba2Mixer, Mamba2MixerSubmodules
from megatron_gdn.mixers.tensor_map import take_share
from megatron_gdn.ops.layout import layout_of_in_proj
from tests.mamba2.oracle import SSDInputs, token_by_token
from tests.parallel import alone, make_config

D = 20
SIZES = {
    "hidden_size": D, "mamba_num_heads": 8, "mamba_num_groups": 2, "mamba_head_dim": 3,
    "mamba_state_dim": 5,
}  # fmt: skip
LOCAL = Mamba2MixerSubmodules(in_proj=ColumnParallelLinear, out_proj=RowParallelLinear)


def mamba_config(**changes):
    return make_config(**{**SIZES, **changes})


def build(config, groups, **options) -> Mamba2Mixer:
    """In ``config.params_dtype``; of fp64 all of it, so that laws are held to fp64's rounding."""
    options = {"layer_number": 1, **options}
    mixer = Mamba2Mixer(config, LOCAL, config.hidden_size, pg_collection=groups, **options)
    return mixer.double() if config.params_dtype == torch.float64 else mixer


def randomise_(mixer) -> None:
    """Every parameter away from its initial value; the convolution's output away from zero."""
    with torch.no_grad():
        for name, parameter in mixer.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if "conv" in name else 0.1))


def whole_mixer(config, **options) -> Mamba2Mixer:
    """On one rank, the same on all."""
    torch.manual_seed(7)
    mixer = build(config, alone(), **options)
    randomise_(mixer)
    return mixer


def share_of(name: str, whole: torch.Tensor, mixer) -> torch.Tensor:
    """This tensor-parallel rank's share of a whole parameter (or of its gradient)."""
    if name in ("out_norm.weight", "out_proj.bias"):
        return whole
    dims = mixer.global_dims
    dim, sections = {
        "in_proj.weight": (0, layout_of_in_proj(dims).widths),
        "conv1d_weight": (0, dims.layout.conv_widths),
        "in_proj.bias": (0, layout_of_in_proj(dims).widths),
        "conv1d.weight": (0, dims.layout.conv_widths),
        "conv1d.bias": (0, dims.layout.conv_widths),
        "conv1d_bias": (0, dims.layout.conv_widths),
        "out_proj.weight": (1, (dims.layout.mixed_width,)),
    }.get(name, (0, (whole.shape[0],)))
    return take_share(whole, dim, sections, mixer.tp_group.rank(), mixer.tp_group.size())


def written_out(mixer: Mamba2Mixer, x, lengths, added=None) -> torch.Tensor:
    """The whole mixer token by token in fp64; ``added(y, z)`` is added to what the norm gives."""
    p = {name: t.detach().clone().requires_grad_() for name, t in mixer.named_parameters()}
    layout, groups = mixer.layout, mixer.ngroups
    outputs = []
    for u in x.split([n for n in lengths if n]):
        rows = (u @ p["in_proj.weight"].T).transpose(0, 1)
        z, xBC, dt = rows.split([mixer.d_inner, layout.conv_width, mixer.nheads], dim=-1)
        xBC = F.pad(xBC.mT, (mixer.d_conv - 1, 0))
        bias = p.get("conv1d_bias")
        xBC = F.silu(F.conv1d(xBC, p["conv1d_weight"], bias, groups=xBC.shape[1])).mT
        x_, B, C = xBC.split(layout.conv_widths, dim=-1)
        dt = F.softplus(dt + p["dt_bias"]).clamp(*mixer.dt_limit)
        B, C = (t.unflatten(-1, (groups, -1)) for t in (B, C))
        x_ = x_.unflatten(-1, (mixer.nheads, -1))
        skip = p["D"].view(mixer.nheads, -1).expand(*dt.shape, -1)
        inputs = SSDInputs(x_, B, C, dt, -p["A_log"].exp() * dt, skip)
        sequences = (len(u),) * u.shape[1]
        y, _ = token_by_token(inputs, sequences)
        o = y.flatten(2)
        y = o * F.silu(z)
        if mixer.rmsnorm:
            y = y.unflatten(-1, (groups, -1))
            y = y * (y.square().mean(-1, keepdim=True) + mixer.norm.eps).rsqrt()
            y = y.flatten(2) * p["norm.weight"]
        y = y if added is None else y + added(o, z)
        outputs.append((y @ p["out_proj.weight"].T).transpose(0, 1))
    return torch.cat(outputs), p

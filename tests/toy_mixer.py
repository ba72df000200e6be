"""Plain linear attention with a scalar decay, as a Megatron mixer built from the base alone:
S_t = exp(g_t) S_{t-1} + k_t v_t^T;  o_t = S_t^T q_t;  y = out_proj(RMSNorm(o) * SiLU(z))"""

from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_gdn.compat.torch_norm import TorchRMSNorm
from megatron_gdn.mixers.base import MixerSubmodules, RecurrentMixer
from megatron_gdn.mixers.fp32_parameters import Fp32Parameter
from megatron_gdn.mixers.options import MixerOptions
from megatron_gdn.ops.conv import convolve_rows
from megatron_gdn.ops.layout import Layout, Section
from megatron_gdn.ops.state_maps.state_map import StateShape
from tests.autograd_parts import AutogradFront, AutogradRule

G = 2
H = 4
K = 3
V = 5
TAPS = 3
HIDDEN = 24

LAYOUT = Layout(
    (
        Section("z", "head", V),
        Section("value", "head", V, conv=True),
        Section("key", "group", K, conv=True),
        Section("query", "group", K, conv=True),
        Section("decay", "head", 1),
    ),
    (("head", H), ("group", G)),
)


class Inputs(NamedTuple):
    q: Tensor  # [B, S, G, K]
    k: Tensor  # [B, S, G, K]
    v: Tensor  # [B, S, H, V]
    g: Tensor  # [B, S, H] fp32, <= 0


def front(layout: Layout, proj, parameters, documents, history) -> Inputs:
    weight, _, decay_bias = parameters
    rows = proj.transpose(0, 1)
    conv = rows[..., layout.conv_columns]
    x = convolve_rows(conv, weight.flatten(1), None, documents, history)
    v, k, q = x.split(layout.conv_widths, dim=-1)
    v = v.unflatten(-1, (layout.heads("head"), -1))
    k, q = (x.unflatten(-1, (layout.heads("group"), -1)) for x in (k, q))
    return Inputs(q, k, v, -F.softplus(rows[..., layout.columns("decay")] + decay_bias))


def sequences(inputs: Inputs, documents) -> list[Inputs]:
    """The inputs of every sequence, in fp32 or wider, q and k repeated for the heads
    they serve."""
    flat = [
        x.flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32)) for x in inputs
    ]
    repeat = inputs.v.shape[2] // inputs.k.shape[2]
    flat[:2] = [x.repeat_interleave(repeat, dim=1) for x in flat[:2]]
    B, S = inputs.v.shape[:2]
    lengths = [S] * B if documents is None else [n for n in documents.lengths if n]
    return [Inputs(*x) for x in zip(*(x.split(lengths) for x in flat), strict=True)]


def run(inputs: Inputs, initial, documents) -> tuple[Tensor, Tensor]:
    outputs = []
    finals = []
    for n, (q, k, v, g) in enumerate(sequences(inputs, documents)):
        sum_TH = g.cumsum(0)
        past = torch.ones(len(g), len(g), dtype=torch.bool, device=g.device).tril()
        between = (
            (sum_TH[:, None] - sum_TH).masked_fill(~past[..., None], -torch.inf).exp()
        )
        o = torch.einsum("tsh,thk,shk,shv->thv", between, q, k, v)
        final = torch.einsum("sh,shk,shv->hkv", (sum_TH[-1] - sum_TH).exp(), k, v)
        if initial is not None:
            o = o + torch.einsum("th,thk,hkv->thv", sum_TH.exp(), q, initial[n])
            final = final + sum_TH[-1].exp()[:, None, None] * initial[n]
        outputs.append(o)
        finals.append(final)
    return torch.cat(outputs).view(inputs.v.shape).to(inputs.v.dtype), torch.stack(
        finals
    )


def through(inputs: Inputs, documents) -> Tensor:
    decays = torch.stack([x.g.sum(0).exp() for x in sequences(inputs, documents)])
    return decays[..., None, None].expand(-1, -1, inputs.k.shape[-1], 1)


RULE = AutogradRule("linear attention", run, through, Inputs)


class Dims(NamedTuple):
    layout: Layout = LAYOUT
    hidden_size: int = HIDDEN
    conv_kernel_dim: int = TAPS

    @property
    def state_shape(self) -> StateShape:
        return StateShape(self.layout.state_heads, K, V, diagonal=True)

    def shard(self, ranks: int) -> "Dims":
        return self._replace(layout=self.layout.share(ranks))


def choose_rule(device, dtype, bits):
    return RULE, "the only one"


def make_front(layout, rule, device, dtype, taps):
    return AutogradFront(layout, partial(front, layout), Inputs, ("q", "k", "v"))


class ToyMixer(RecurrentMixer):
    """``[s, B, D] -> [s, B, D]``; ``decay_bias`` is fp32 whatever the layer around it
    is."""

    fp32 = (Fp32Parameter(name="decay_bias", section="decay", first_values=0.0),)
    recurrence = "attention"

    def __init__(self, config, pg_collection, *, cp_layout="zigzag", **options) -> None:
        given = MixerOptions(cp_layout=cp_layout, **options)
        super().__init__(
            config,
            Dims(),
            given,
            layer_number=None,
            pg_collection=pg_collection,
            pp_layer_offset=0,
            A_init_range=(1, 16),
            conv_init=None,
        )
        specs = MixerSubmodules(ColumnParallelLinear, TorchRMSNorm, RowParallelLinear)
        self._build(
            specs, choose_rule, make_front, name=None, bias=False, conv_bias=False
        )

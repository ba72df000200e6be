"""The SSD recurrence token by token in fp64: what every implementation is held to."""

import torch

from megatron_gdn.mamba2.rule import SSDInputs
from megatron_gdn.ops.layout import Layout, Section

G = 2
H = 6
K = 5
V = 3


def random_inputs(
    S: int, B: int = 1, dtype=torch.float64, per_channel_D: bool = False, **sizes
):
    g_heads = sizes.get("G", G)
    heads = sizes.get("H", H)
    k, v = sizes.get("K", K), sizes.get("V", V)
    made = torch.Generator().manual_seed(S + B)

    def randn(*shape):
        return torch.randn(*shape, generator=made, dtype=torch.float64)

    dt = torch.nn.functional.softplus(randn(B, S, heads))
    inputs = SSDInputs(
        randn(B, S, heads, v).to(dtype),
        randn(B, S, g_heads, k).to(dtype),
        randn(B, S, g_heads, k).to(dtype),
        dt,
        -dt * randn(heads).exp(),
        randn(heads, v if per_channel_D else 1).expand(B, S, -1, -1),
    )
    wide = torch.promote_types(dtype, torch.float32)
    inputs = inputs._replace(
        **{n: getattr(inputs, n).to(wide) for n in ("dt", "g", "D")}
    )
    return inputs, randn(B, S, heads, v).to(dtype)


def token_by_token(inputs, lengths, initial=None):
    """Output ``[B, S, H, V]`` and final states ``[N, H, K, V]``, one token after
    another."""
    x, B, C, dt, g, D = (t.double() for t in inputs)
    repeat = x.shape[2] // B.shape[2]
    flat = [t.flatten(0, 1) for t in (x, B, C, dt, g, D)]
    flat[1:3] = [t.repeat_interleave(repeat, dim=1) for t in flat[1:3]]
    outputs = []
    finals = []
    for n, (x, B, C, dt, g, D) in enumerate(
        zip(*(t.split(lengths) for t in flat), strict=True)
    ):
        state = x.new_zeros(x.shape[1], B.shape[2], x.shape[2])
        if initial is not None:
            state = initial[n].double()
        for t in range(len(x)):
            written = torch.einsum("hk,hv->hkv", B[t], dt[t, :, None] * x[t])
            state = g[t].exp()[:, None, None] * state + written
            outputs.append(torch.einsum("hkv,hk->hv", state, C[t]) + D[t] * x[t])
        finals.append(state)
    return torch.stack(outputs).view(inputs.x.shape), torch.stack(finals)


def oracle(inputs: SSDInputs, lengths, d_o, initial=None, d_final=None):
    lengths = tuple(n for n in lengths if n)
    shape = (len(lengths), inputs.x.shape[2], inputs.B.shape[3], inputs.x.shape[3])
    initial = torch.zeros(shape, dtype=torch.float64) if initial is None else initial
    leaves = [t.detach().double().requires_grad_() for t in (*inputs, initial)]
    o, final = token_by_token(SSDInputs(*leaves[:-1]), lengths, leaves[-1])
    d_final = torch.zeros(shape, dtype=torch.float64) if d_final is None else d_final
    *grads, d_initial = torch.autograd.grad(
        (o, final), leaves, (d_o.double(), d_final.double())
    )
    return o.detach(), final.detach(), SSDInputs(*grads), d_initial


def layout_of(H: int, G: int, V: int, K: int) -> Layout:
    """Of H heads of V channels and G groups of K states."""
    return Layout(
        (
            Section("z", "head", V),
            Section("x", "head", V, True),
            Section("B", "group", K, True),
            Section("C", "group", K, True),
            Section("dt", "head", 1),
        ),
        (("head", H), ("group", G)),
    )

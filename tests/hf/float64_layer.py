"""A transformers layer's own equation in float64, token by token, which settles who is right."""

import torch
import torch.nn.functional as F
from torch import Tensor


def float64_layer(layer, x_BSD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    params = {n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()}
    if hasattr(layer, "forget_gate"):
        return _kda(layer, x_BSD, params), params
    B, S, _ = x_BSD.shape
    G, H, K, V = layer.num_k_heads, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim

    def linear(name: str) -> Tensor:
        return x_BSD @ params[f"{name}.weight"].T

    def project(name: str) -> Tensor:
        return linear(f"in_proj_{name}")

    if hasattr(layer, "g_proj"):
        qkv = torch.cat([linear(f"{name}_proj") for name in "qkv"], -1)
        z, b, a = (linear(f"{name}_proj") for name in "gba")
    elif hasattr(layer, "in_proj_qkvz"):
        # Their own untangling of the interleaved rows, not ours.
        *qkv, z, b, a = layer.fix_query_key_value_ordering(project("qkvz"), project("ba"))
        qkv = torch.cat([part.flatten(2) for part in qkv], -1)
    else:
        qkv, z, b, a = (project(name) for name in ("qkv", "z", "b", "a"))
    kernel = params["conv1d.weight"]
    padded = F.pad(qkv.transpose(1, 2), (kernel.shape[-1] - 1, 0))
    qkv = F.silu(F.conv1d(padded, kernel, groups=kernel.shape[0])).transpose(1, 2)
    q, k, v = qkv.split([G * K, G * K, H * V], -1)
    q, k = (_unit(t.reshape(B, S, G, K)).repeat_interleave(H // G, 2) for t in (q, k))
    v, z = v.reshape(B, S, H, V), z.reshape(B, S, H, V)
    g = -params["A_log"].exp() * F.softplus(a + params["dt_bias"])
    beta = b.sigmoid() * (2 if getattr(layer, "allow_neg_eigval", False) else 1)
    o = _rule(q, k, v, g[..., None], beta)
    name, out = ("o_norm", "o_proj") if hasattr(layer, "o_norm") else ("norm", "out_proj")
    norm = getattr(layer, name)
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    act = {"silu": F.silu, "sigmoid": torch.sigmoid}[norm.activation]
    mixed = params[f"{name}.weight"] * o * act(z)
    return mixed.flatten(2) @ params[f"{out}.weight"].T, params


def _kda(layer, x_BSD: Tensor, params: dict[str, Tensor]) -> Tensor:
    B, S, _ = x_BSD.shape
    H, K, gate = layer.num_heads, layer.head_dim, layer.forget_gate

    def linear(name: str, x: Tensor = x_BSD) -> Tensor:
        return x @ params[f"{name}.weight"].T

    if hasattr(gate, "f_proj"):
        f, z = linear("forget_gate.f_proj"), linear("g_proj")
    else:
        f = linear("forget_gate.f_b_proj", linear("forget_gate.f_a_proj"))
        z = linear("g_b_proj", linear("g_a_proj"))
    kernel = params["conv1d.weight"]
    qkv = torch.cat([linear(f"{name}_proj") for name in "qkv"], -1)
    qkv = F.pad(qkv.transpose(1, 2), (kernel.shape[-1] - 1, 0))
    qkv = F.silu(F.conv1d(qkv, kernel, groups=kernel.shape[0])).transpose(1, 2)
    q, k, v = (part.reshape(B, S, H, K) for part in qkv.chunk(3, -1))
    q, k = _unit(q), _unit(k)
    rate = params["forget_gate.A_log"].flatten().exp()[:, None]
    x = (f + params["forget_gate.dt_bias"]).reshape(B, S, H, K)
    bounded = getattr(gate, "safe_gate", getattr(gate, "safe_gate_lower_bound", None) is not None)
    g = -5.0 * torch.sigmoid(rate * x) if bounded else -rate * F.softplus(x)
    o = _rule(q, k, v, g, linear("b_proj").sigmoid())
    o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + layer.o_norm.variance_epsilon)
    mixed = params["o_norm.weight"] * o * z.reshape(B, S, H, K).sigmoid()
    return mixed.flatten(2) @ params["o_proj.weight"].T


def _rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The delta rule token by token, whose state decays by exp(g)."""
    state, outputs = q.new_zeros(*k[:, 0].shape, v.shape[-1]), []
    for t in range(q.shape[1]):
        state = state * g[:, t].exp()[..., None]
        error = v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]) / k.shape[-1] ** 0.5)
    return torch.stack(outputs, 1)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)

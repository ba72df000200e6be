"""A transformers layer's own equation in float64, token by token, which settles who is
right."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.rules.token_rule import recurrence


def float64_layer(layer, x_BSD: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    params = {
        n: p.detach().double().requires_grad_() for n, p in layer.named_parameters()
    }

    def linear(name: str, x: Tensor = x_BSD) -> Tensor:
        return x @ params[f"{name}.weight"].T

    mixed, out = (_kda if hasattr(layer, "forget_gate") else _gdn)(
        layer, params, linear
    )
    return linear(out, mixed.flatten(2)), params


def _gdn(layer, params: dict[str, Tensor], linear) -> tuple[Tensor, str]:
    """``[B, S, H, V]`` and the name of the linear that follows."""
    G = layer.num_k_heads
    H = layer.num_v_heads
    K = layer.head_k_dim
    V = layer.head_v_dim
    if hasattr(layer, "g_proj"):
        *qkv, z, b, a = (linear(f"{name}_proj") for name in "qkvgba")
    elif hasattr(layer, "in_proj_qkvz"):
        # Their own untangling of the interleaved rows, not ours.
        rows = linear("in_proj_qkvz"), linear("in_proj_ba")
        *qkv, z, b, a = layer.fix_query_key_value_ordering(*rows)
    else:
        *qkv, z, b, a = (linear(f"in_proj_{name}") for name in ("qkv", "z", "b", "a"))
    q, k, v = _convolved(params, qkv, [G * K, G * K, H * V])
    g = -params["A_log"].exp() * F.softplus(a + params["dt_bias"])
    beta = b.sigmoid() * (2 if getattr(layer, "allow_neg_eigval", False) else 1)
    o = _rule(_heads(q, G), _heads(k, G), _heads(v, H), g, beta)
    name, out = (
        ("o_norm", "o_proj") if hasattr(layer, "o_norm") else ("norm", "out_proj")
    )
    norm = getattr(layer, name)
    act = {"silu": F.silu, "sigmoid": torch.sigmoid}[norm.activation]
    normed = F.rms_norm(o, (V,), params[f"{name}.weight"], norm.variance_epsilon)
    return normed * act(z.reshape(o.shape)), out


def _kda(layer, params: dict[str, Tensor], linear) -> tuple[Tensor, str]:
    H = layer.num_heads
    K = layer.head_dim
    gate = layer.forget_gate
    if hasattr(gate, "f_proj"):
        f, z = linear("forget_gate.f_proj"), linear("g_proj")
    else:
        f = linear("forget_gate.f_b_proj", linear("forget_gate.f_a_proj"))
        z = linear("g_b_proj", linear("g_a_proj"))
    qkv = _convolved(params, [linear(f"{name}_proj") for name in "qkv"], 3 * [H * K])
    rate = params["forget_gate.A_log"].flatten().exp()[:, None]
    x = _heads(f + params["forget_gate.dt_bias"], H)
    bounded = getattr(
        gate, "safe_gate", getattr(gate, "safe_gate_lower_bound", None) is not None
    )
    g = -5.0 * torch.sigmoid(rate * x) if bounded else -rate * F.softplus(x)
    o = _rule(*(_heads(part, H) for part in qkv), g, linear("b_proj").sigmoid())
    normed = F.rms_norm(o, (K,), params["o_norm.weight"], layer.o_norm.variance_epsilon)
    return normed * _heads(z, H).sigmoid(), "o_proj"


def _convolved(params: dict[str, Tensor], parts: list[Tensor], widths: list[int]):
    kernel = params["conv1d.weight"]
    qkv = torch.cat([part.flatten(2) for part in parts], -1).mT
    qkv = F.conv1d(F.pad(qkv, (kernel.shape[-1] - 1, 0)), kernel, groups=len(kernel))
    return F.silu(qkv).mT.split(widths, -1)


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1))


def _rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    return recurrence(l2norm(q) * q.shape[-1] ** -0.5, l2norm(k), v, g, beta, None)[0]

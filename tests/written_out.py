"""Whole mixers with every step written out, one token after the other: what a forward is held to.

Legend: S seq, B batch, G key heads (or groups), H value heads, K rows and V columns of a state.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_gdn import Mamba2Mixer
from megatron_gdn.ops.elementwise import l2norm
from megatron_gdn.ops.layout import layout_of_in_proj
from megatron_gdn.ops.rules.token_rule import recurrence

ACTIVATIONS = {"silu": F.silu, "sigmoid": torch.sigmoid}


def written_out(mixer, x: Tensor, lengths, added=None) -> tuple[Tensor, dict[str, Tensor]]:
    """The output in the dtype of ``x``, differentiable, and the parameters that it was made of.

    ``added(o, z)`` is added to what Mamba2's norm gives.
    """
    p = {name: t.detach().to(x.dtype).requires_grad_() for name, t in mixer.named_parameters()}
    weight, bias = (p.get(f"conv1d.{name}", p.get(f"conv1d_{name}")) for name in ("weight", "bias"))
    layout, sections = layout_of_in_proj(mixer.dims), mixer.dims.layout
    outputs = []
    for u in x.split([n for n in lengths if n]):
        rows = (u @ p["in_proj.weight"].T + p.get("in_proj.bias", 0)).transpose(0, 1)
        of = dict(zip(layout.names, rows.split(layout.widths, -1), strict=True))
        narrow = [name for name in of if name.endswith("_a")]  # halves of KDA's gates
        of |= {name[0]: of[name] @ p[f"{name[0]}_b_weight"].T for name in narrow}
        qkv = torch.cat([of[name] for name in sections.conv_names], -1).mT
        qkv = F.conv1d(F.pad(qkv, (weight.shape[-1] - 1, 0)), weight, bias, groups=len(weight))
        convolved = F.silu(qkv).mT.split(sections.conv_widths, -1)
        of |= dict(zip(sections.conv_names, convolved, strict=True))
        if isinstance(mixer, Mamba2Mixer):
            mixed = _mamba2(mixer, p, of, added)
        else:
            mixed = _delta_rule(mixer, p, of)
        y = mixed.flatten(2) @ p["out_proj.weight"].T + p.get("out_proj.bias", 0)
        outputs.append(y.transpose(0, 1))
    return torch.cat(outputs), p


def _heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1))


def _run(q, k, v, g, beta=None, erased=None) -> Tensor:
    """The recurrence, in fp32 at least."""
    wide = torch.promote_types(v.dtype, torch.float32)
    q, k, x, g, beta, erased = (t if t is None else t.to(wide) for t in (q, k, v, g, beta, erased))
    return recurrence(q, k, x, g, beta, None, None, erased)[0].to(v.dtype)


def _delta_rule(mixer, p: dict[str, Tensor], of: dict[str, Tensor]) -> Tensor:
    """``[B, S, H, V]`` of a Gated DeltaNet, Gated DeltaNet-2 or Kimi Delta Attention."""
    G, H = mixer.dims.num_key_heads, mixer.dims.num_value_heads
    q, k, v = _heads(of["query"], G), _heads(of["key"], G), _heads(of["value"], H)
    if getattr(mixer, "use_qk_l2norm", True):
        q, k = l2norm(q), l2norm(k)
    rate, gates, activation = p["A_log"].exp(), {}, "silu"
    if "alpha" in of:
        g = -rate * F.softplus(of["alpha"] + p["dt_bias"])
        gates["beta"] = of["beta"].sigmoid() * (2 if mixer.allow_neg_eigval else 1)
        activation = mixer.output_gate_activation
    else:
        gate, bound = _heads(of["f"] + p["dt_bias"], len(rate)), None
        if "beta" in of:
            gates["beta"], activation = of["beta"].sigmoid(), "sigmoid"
            bound = mixer.gate_lower_bound
        else:
            gates["erased"] = _heads(of["b"].sigmoid(), G) * k
            v = _heads(of["w"].sigmoid(), H) * v
        rate = rate[:, None]
        g = -rate * F.softplus(gate) if bound is None else bound * (rate * gate).sigmoid()
    o = _run(q * q.shape[-1] ** -0.5, k, v, g, **gates)
    gamma = p["out_norm.weight"] + getattr(mixer.out_norm, "zero_centered_gamma", False)
    normed = F.rms_norm(o, o.shape[-1:], gamma, mixer.out_norm.eps)
    return normed * ACTIVATIONS[activation](_heads(of["z"], H))


def _mamba2(mixer, p: dict[str, Tensor], of: dict[str, Tensor], added) -> Tensor:
    """``[B, S, H, V]``."""
    G, H = mixer.ngroups, mixer.nheads
    dt = F.softplus(of["dt"] + p["dt_bias"]).clamp(*mixer.dt_limit)
    x, B, C = _heads(of["x"], H), _heads(of["B"], G), _heads(of["C"], G)
    o = _run(C, B, dt[..., None] * x, -p["A_log"].exp() * dt) + _heads(p["D"], H) * x
    y = o.flatten(2) * F.silu(of["z"])
    if mixer.rmsnorm:
        y = _heads(y, G)
        y = y * (y.square().mean(-1, keepdim=True) + mixer.norm.eps).rsqrt()
        y = y.flatten(2) * p["norm.weight"]
    y = y if added is None else y + added(o.flatten(2), of["z"])
    return _heads(y, H)

"""The plain-torch twin of :mod:`.front_triton`: same signatures, any device, fp64 for fp64 input.

Legend: S seq, B batch, P projection width, G key heads, H value heads, K key dim, V value dim,
C conv channels, W taps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..conv import convolve_rows
from ..documents import Documents
from ..elementwise import decay_and_write_gates, l2norm
from ..front.history import History
from .base import HeadSizes, RuleInputs


class GDNParameterGrads(NamedTuple):
    """Gradients of a front's parameters, in the parameters' shapes and dtypes."""

    conv_weight: Tensor
    conv_bias: Tensor | None
    A_log: Tensor
    dt_bias: Tensor


def prepare_forward(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    *,
    documents: Documents | None = None,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    parts: str = "qkvg",
    dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    convolve: Callable[..., Tensor] = convolve_rows,
    gates: Tensor | None = None,
    history: History | None = None,
) -> RuleInputs:
    """As :func:`.front_triton.prepare_forward`, differentiable; ``convolve`` is conv + SiLU."""
    wide = torch.promote_types(proj.dtype, torch.float32)
    rows_BSP = proj.transpose(0, 1)
    assert parts and parts in "qkvg"
    heads = {"q": sizes.key_heads, "k": sizes.key_heads, "v": sizes.value_heads}
    made: dict[str, Any] = dict.fromkeys(RuleInputs._fields)
    names = {"q": "query", "k": "key", "v": "value"}
    for part in parts.rstrip("g"):
        section = sizes.layout.columns(names[part])  # of a row, and of conv channels
        x = convolve(
            rows_BSP[..., section].to(wide),
            conv_weight.flatten(1)[section].to(wide),
            None if conv_bias is None else conv_bias[section].to(wide),
            documents,
            None if history is None else history.columns(section),
        )
        x = x.unflatten(-1, (heads[part], -1))
        if normalise_qk and part != "v":
            x = l2norm(x)
        made[part] = x.to(dtype or proj.dtype).contiguous()
    if "g" in parts:
        raw = rows_BSP[..., sizes.beta_column :] if gates is None else gates.transpose(0, 1)
        b, alpha = raw.to(wide).split(sizes.value_heads, dim=-1)
        g, beta = decay_and_write_gates(
            alpha, b, A_log.to(wide), dt_bias.to(wide), allow_neg_eigval=allow_neg_eigval
        )
        made |= {"g": g.contiguous(), "beta": beta.contiguous()}
    return RuleInputs(**made)


def prepare_backward(
    proj: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    A_log: Tensor,
    dt_bias: Tensor,
    sizes: HeadSizes,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    dg: Tensor | None,
    dbeta: Tensor | None,
    d_proj: Tensor,
    *,
    documents: Documents | None = None,
    factor: Tensor | None = None,
    normalise_qk: bool = True,
    allow_neg_eigval: bool = False,
    batch_invariant: bool = False,
    convolve: Callable[..., Tensor] = convolve_rows,
    gates: Tensor | None = None,
    d_gates: Tensor | None = None,
    history: History | None = None,
) -> GDNParameterGrads:
    """As :func:`.front_triton.prepare_backward`, through autograd of the forward above."""
    wide = torch.promote_types(proj.dtype, torch.float32)
    inputs = [proj, conv_weight, A_log, dt_bias]
    before = None if history is None else history.rows
    inputs += [x for x in (conv_bias, gates, before) if x is not None]
    with torch.enable_grad():
        leaves = [x.detach().to(wide).requires_grad_() for x in inputs]
        rows, weight, decay, time_bias, *others = leaves
        past = None if history is None else history._replace(rows=others.pop())
        raw = None if gates is None else others.pop()
        outputs = prepare_forward(
            rows, weight, others[0] if others else None, decay, time_bias, sizes,
            documents=documents, normalise_qk=normalise_qk, allow_neg_eigval=allow_neg_eigval,
            convolve=convolve, gates=raw, parts="qkv" if dg is None else "qkvg", history=past,
        )  # fmt: skip
    heads = sizes.key_heads
    dq, dk = (x.to(wide).unflatten(2, (heads, -1)).sum(3) for x in (dq, dk))
    d_outputs = [x.to(wide) for x in (dq, dk, dv, dg, dbeta) if x is not None]
    if factor is not None:
        of_key_head = factor.view(heads, -1)[:, :1]
        factors = (of_key_head, of_key_head, factor[:, None], factor, factor)
        d_outputs = [x * y for x, y in zip(d_outputs, factors, strict=False)]
    outputs = [x for x in outputs if x is not None]
    grads = torch.autograd.grad(outputs, leaves, d_outputs, materialize_grads=True)
    z, rest = sizes.conv_width, sizes.beta_column
    d_proj[..., :z] = grads[0][..., :z]
    if dg is not None:
        d_proj[..., rest:] = grads[0][..., rest:]
    if history is not None and history.d_rows is not None:
        *grads, d_rows = grads
        history.d_rows.copy_(d_rows)
    if d_gates is not None:
        d_gates.copy_(grads[-1])
    d_weight, d_A_log, d_dt_bias = (
        grad.to(x.dtype) for grad, x in zip(grads[1:4], inputs[1:4], strict=True)
    )
    d_bias = None if conv_bias is None else grads[4].to(conv_bias.dtype)
    return GDNParameterGrads(d_weight, d_bias, d_A_log, d_dt_bias)

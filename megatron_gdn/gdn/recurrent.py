"""The gated delta rule in plain torch: the token recurrence.

This is the definition everything else is tested against. Per value head, with state ``S [K, V]``:

    S_t = exp(g_t) S_{t-1} + beta_t k_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T
    o_t = scale * S_t^T q_t

(Yang, Kautz, Hatamizadeh, "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024.)

Legend: B batch, T tokens, G key heads, R value heads per key head, H = G * R value heads, K key
dim, V value dim, N sequences (B of them, or the packed documents).

The gated delta rule one token after the other, for decode steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops.delta_rule.base import check_rule_inputs
from ..ops.documents import Documents
from ..ops.elementwise import l2norm
from ..ops.rules.token_rule import TokenRule


def recurrent_gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    *,
    scale: float | None = None,
    cu_seqlens: Tensor | Sequence[int] | Documents | None = None,
) -> tuple[Tensor, Tensor | None]:
    """One token at a time, in fp32 (fp64 when ``value`` is fp64); slow, and the oracle.

    Args, returns and errors: as :func:`megatron_gdn.ops.gated_delta_rule`.
    """
    documents = check_rule_inputs(query, key, value, g, beta, initial_state, cu_seqlens)
    wide = torch.promote_types(value.dtype, torch.float32)
    if use_qk_l2norm_in_kernel:
        query, key = l2norm(query), l2norm(key)
    factor = key.shape[-1] ** -0.5 if scale is None else scale
    groups = key.shape[2]

    def by_group(x: Tensor) -> Tensor:
        return x.to(wide).unflatten(2, (groups, -1))

    q_BTGK, k_BTGK = query.to(wide) * factor, key.to(wide)
    v_BTGRV, g_BTGR, beta_BTGR = by_group(value), by_group(g), by_group(beta)

    if documents is None:
        spans = [(slice(None), slice(None), 0, query.shape[1])]
    else:
        offsets = documents.offsets
        spans = [(slice(0, 1), slice(n, n + 1), offsets[n], offsets[n + 1])
                 for n in range(len(offsets) - 1)]  # fmt: skip

    outputs, states = [], []
    for rows, state_rows, start, end in spans:
        if initial_state is not None:
            S = initial_state[state_rows].to(wide).unflatten(1, (groups, -1))
        else:
            S = v_BTGRV.new_zeros(
                v_BTGRV[rows].shape[0], *v_BTGRV.shape[2:4], key.shape[-1], value.shape[-1]
            )
        for t in range(start, end):
            q_K, k_K = q_BTGK[rows, t, :, None, :, None], k_BTGK[rows, t, :, None, :, None]
            S = g_BTGR[rows, t, :, :, None, None].exp() * S
            error_V = v_BTGRV[rows, t, :, :, None] - (S * k_K).sum(-2, keepdim=True)
            S = S + beta_BTGR[rows, t, :, :, None, None] * k_K * error_V
            outputs.append((S * q_K).sum(-2).flatten(1, 2))
        states.append(S.flatten(1, 2))

    o_BTHV = torch.stack(outputs, dim=1) if outputs else torch.zeros_like(value)
    final_state = torch.cat(states) if output_final_state else None
    return o_BTHV.to(value.dtype), final_state


class RecurrentRule(TokenRule):
    """The definition itself, in plain torch: elementwise products and sums over a state's rows."""

    def tokens(
        self, inputs: Any, documents: Documents | None, initial: Tensor | None
    ) -> tuple[Tensor, Any]:
        q, k, v, g, beta = inputs
        return recurrent_gated_delta_rule(q, k, v, g, beta, initial, True, cu_seqlens=documents)

"""Kimi Delta Attention in plain torch: the token recurrence.

This is the definition everything else is tested against. Per head, with state ``S [K, V]``:

    S_t = Diag(exp(g_t)) S_{t-1}
    S_t = S_t + beta_t k_t (v_t - S_t^T k_t)^T
    o_t = S_t^T q_t / sqrt(K)

(Kimi Team, "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.) It is the gated
delta rule with one log-decay for every row of a state.

Legend: B batch, T tokens, G key heads, H heads, K key dim, V value dim, N sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...documents import Documents
from ...gdn.rule.base import RuleInputs
from ...rules.token_rule import TokenRule


def recurrent_kda(
    inputs: RuleInputs, documents: Documents | None = None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """One token at a time, in fp32 (fp64 for fp64); differentiable.

    Args:
        inputs: with ``g [B, T, H, K]``; q and k have G heads, each for H / G neighbouring ones.
        documents: boundaries, all batch rows end to end; None when a row is one sequence.
        initial: ``[N, H, K, V]``; None is zero.

    Returns:
        The output ``[B, T, H, V]`` and the states after it, ``[N, H, K, V]``.
    """
    (B, T, H, V), K = inputs.v.shape, inputs.k.shape[-1]
    wide = torch.promote_types(inputs.v.dtype, torch.float32)
    q, k, v, g, beta = (x.to(wide).flatten(0, 1) for x in inputs)
    q, k = (x.repeat_interleave(H // x.shape[1], dim=1) for x in (q, k))
    lengths = (T,) * B if documents is None else tuple(n for n in documents.lengths if n)
    outputs, states, t = [], [], 0
    for n, length in enumerate(lengths):
        S = v.new_zeros(H, K, V) if initial is None else initial[n].to(wide)
        for _ in range(length):
            S = g[t].exp()[..., None] * S
            error = v[t] - (S * k[t][..., None]).sum(-2)
            S = S + (beta[t][:, None] * k[t])[..., None] * error[:, None]
            outputs.append((S * (q[t] * K**-0.5)[..., None]).sum(-2))
            t += 1
        states.append(S)
    o = torch.stack(outputs).view(B, T, H, V) if outputs else torch.zeros_like(v).view(B, T, H, V)
    return o.to(inputs.v.dtype), torch.stack(states) if states else v.new_zeros(0, H, K, V)


class RecurrentKDA(TokenRule):
    """The definition itself, for decode steps."""

    def tokens(
        self, inputs: Any, documents: Documents | None, initial: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return recurrent_kda(inputs, documents, initial)
